# make demo         train a detector that overflows, without and with the guard
# make test         lint, types and the quick tests: every file, the shortest
#                   form of each scenario
# make test-all     all of them
# make setup        what they do first: set up the environment of STACK
#
# STACK=common has torch 2.1, STACK=oldest Python 3.8 and torch 2.0.
# PYTHON=/path/to/python uses an environment that already has mmdet.
# WORKERS=n runs so many tests at a time, each on one core.

PYTHON ?=
STACK ?= main
WORKERS ?= 2
BASE := $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,\
  $(shell command -v $(p) 2>/dev/null)))

ifeq ($(PYTHON),)
RUN := .venv$(filter-out -main,-$(STACK))/bin/python
READY := setup
else
RUN := PYTHONPATH="$(CURDIR)" $(PYTHON)
READY := check
endif

# Workers with several threads each would be in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: demo test test-all lint setup check clean

demo: $(READY)
	@$(RUN) bench/demo.py

test: lint
	@$(PYTEST) -m 'not slow'

test-all: lint
	@$(PYTEST)

lint: $(READY)
ifeq ($(STACK),main)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
endif

setup:
	@$(or $(BASE),$(error setup: no python3 was found; install Python 3.11)) \
	  tools/setup_env.py --stack "$(STACK)"

check:
	@$(or $(BASE),$(PYTHON)) tools/setup_env.py --check "$(PYTHON)"

clean:
	rm -rf .venv .venv-* .setup build dist *.egg-info work_dirs
