# make demo         train a detector that overflows, without and with the guard
# make test         lint, types and tests
# make test-stack   the tests with older versions: STACK=common has torch 2.1,
#                   STACK=oldest Python 3.8 and torch 2.0; STACK=main is
#                   make test
# make setup        what they do first: set up the environment of STACK
#
# PYTHON=/path/to/python uses an environment that already has mmdet.

PYTHON ?=
STACK ?= main
BASE := $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,\
  $(shell command -v $(p) 2>/dev/null)))

ifeq ($(PYTHON),)
RUN := .venv$(filter-out -main,-$(STACK))/bin/python
READY := setup
else
RUN := PYTHONPATH="$(CURDIR)" $(PYTHON)
READY := check
endif

.PHONY: demo test test-stack setup check clean

demo: $(READY)
	@$(RUN) bench/demo.py

test: $(READY)
ifeq ($(STACK),main)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
endif
	@$(RUN) -m pytest

test-stack: test

setup:
	@$(or $(BASE),$(error setup: no python3 was found; install Python 3.11)) \
	  tools/setup_env.py --stack "$(STACK)"

check:
	@$(or $(BASE),$(PYTHON)) tools/setup_env.py --check "$(PYTHON)"

clean:
	rm -rf .venv .venv-* .setup build dist *.egg-info work_dirs
