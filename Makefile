# make demo    train a detector that overflows, without and with the guard
# make test    lint, types and tests
# make setup   what both do first: .venv with the tested versions
#
# PYTHON=/path/to/python uses an environment that already has mmdet.

PYTHON ?=
BASE := $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,\
  $(shell command -v $(p) 2>/dev/null)))

ifeq ($(PYTHON),)
RUN := .venv/bin/python
READY := setup
else
RUN := PYTHONPATH="$(CURDIR)" $(PYTHON)
READY := check
endif

.PHONY: demo test setup check clean

demo: $(READY)
	@$(RUN) bench/demo.py

test: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest

setup:
	@$(or $(BASE),$(error setup: no python3 was found; install Python 3.11)) \
	  tools/setup_env.py

check:
	@$(or $(BASE),$(PYTHON)) tools/setup_env.py --check "$(PYTHON)"

clean:
	rm -rf .venv .setup build dist *.egg-info work_dirs
