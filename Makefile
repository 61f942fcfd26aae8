# Ridgeline's verbs; `make` alone prints them. Each sets up what it needs, once, from the pins in requirements.lock.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup report test test-gpu test-tritons lint types format pyi readme hooks clean browser

PYTHON ?= python3
# Processes that run tests side by side.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

VENV := .venv
READY := $(VENV)/.ready
PY := $(VENV)/bin/python
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(PY) -m pytest -q -n $(JOBS) --timeout 300
TRITONS := 3.6.0 3.9.0

# $(call debian,PACKAGE): installs a package of Debian's where we may, else says what to do and fails.
define debian
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) >/dev/null; \
	else echo "$(1) is missing; install it with: sudo apt-get install $(1)" >&2; false; fi
endef

help: ## print this list
	@echo "make VERB, where VERB is one of:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  %-13s %s\n", $$1, $$2 }'

setup: $(READY) ## make .venv from requirements.lock (the verbs below do it when it is needed)
	@:

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Ridgeline needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V); name another: make PYTHON=python3.12" >&2; false; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { $(call debian,python3-venv); }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --requirement requirements.lock
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

report: $(READY) ## measure this machine, check and time every implementation, write report/index.html (QUICK=1: smaller sizes)
	$(PY) -m ridgeline report --out report $(if $(QUICK),--quick)
	@echo "The report: file://$(CURDIR)/report/index.html"

test: $(READY) browser ## run every test that needs no GPU (JOBS=2: that many processes)
	@mkdir -p build && rm -f build/tests-*.xml; failed=0; \
	echo "1 of 2: kernels in Triton's interpreter"; \
	TRITON_INTERPRET=1 $(PYTEST) --junitxml build/tests-interpreted.xml || failed=1; \
	echo "2 of 2: everything else"; \
	$(PYTEST) --junitxml build/tests-rest.xml || failed=1; \
	$(PY) tests/totals.py build/tests-interpreted.xml build/tests-rest.xml; exit $$failed

test-gpu: ## run the kernels' and the GPU's tests from the source tree with PYTHON=python3, which needs torch, triton and pytest
	PYTHONPATH=src $(PYTHON) -m pytest -q -m "kernels or gpu"

test-tritons: $(READY) $(TRITONS:%=build/triton-%/.ready) ## run the interpreter's and the compiler's tests with Triton 3.6 and 3.9
	@failed=0; for version in $(TRITONS); do \
		echo "Triton $$version: kernels in the interpreter"; \
		TRITON_INTERPRET=1 PYTHONPATH=build/triton-$$version $(PYTEST) -m kernels || failed=1; \
		echo "Triton $$version: kernels compiled"; \
		PYTHONPATH=build/triton-$$version $(PYTEST) -m compiles || failed=1; \
	done; exit $$failed

# Triton 3.6's interpreter does not work with numpy 2.4 and later.
build/triton-%/.ready: requirements.lock | $(READY)
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$* $(if $(filter 3.6.%,$*),numpy==2.3.5)
	@touch $@

browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| { $(call debian,chromium); } || echo "without it, the tests of the report in a browser are skipped" >&2

lint: $(READY) ## check the code's style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY) ## check the types
	$(PY) -m mypy

format: $(READY) ## write the code in its style
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

pyi: $(READY) ## write src/ridgeline/__init__.pyi, which tells editors of every op
	$(PY) -m ridgeline.lab.stubs

readme: $(READY) ## write README.md's table, docs/measured.md and docs/roofline.svg from the rows in results/h100
	$(PY) -m ridgeline.lab.readme

hooks: $(READY) ## run lint, types and the stub's check before each commit
	$(PY) -m pre_commit install

clean: ## remove what these verbs made, except .venv
	rm -rf build report .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
