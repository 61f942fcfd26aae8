# Ridgeline's verbs; `make` alone prints them. Each sets up what it needs, once, from the pins in requirements.lock.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup report test test-gpu test-hf test-tritons sanitize lint types format pyi readme compiled zh docs test-docs dist hooks clean browser

PYTHON ?= python3
# Processes that run tests side by side.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

VENV := .venv
READY := $(VENV)/.ready
PY := $(VENV)/bin/python
# The interpreter's products are NumPy's: one kernel of OpenBLAS for all processors, so that roundings are the same.
CORE := $(if $(filter x86_64,$(shell uname -m)),OPENBLAS_CORETYPE=Haswell)
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(CORE)
PYTEST := $(ONE_THREAD) $(PY) -m pytest -q -n $(JOBS) --dist worksteal --timeout 300
TRITONS := 3.6.0 3.9.0
# The two newest minor versions that `make test-hf` runs with.
TRANSFORMERS := 5.23.0 5.24.0

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

test-hf: $(TRANSFORMERS:%=build/transformers-%/.ready) ## run the tests of ridgeline.hf with the two newest versions of transformers
	@failed=0; for version in $(TRANSFORMERS); do \
		echo "transformers $$version"; \
		HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/build/transformers-$$version $(PYTEST) tests/hf || failed=1; \
		TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/build/transformers-$$version $(PYTEST) tests/hf || failed=1; \
	done; exit $$failed

# compute-sanitizer is the PATH's, a CUDA toolkit's, or the package index's. Every tensor is an allocation of its own, so that a
# step past its end is seen; racecheck, which is slow, leaves torch's kernels out. A check that watched no call is not clean.
# initcheck does not see what the copy engine writes: whose results come so has no such check, and what is copied to the CPU (cuBLAS may have
# written it) is left to the law; nor racecheck how Gluon's warps meet at mbarriers. What a check leaves out serves no call in it either.
sanitize: ## run compute-sanitizer's memcheck and, but for Gluon's, initcheck and racecheck over every kernel on a GPU (OPS="gelu mul": of those ops)
	@tool=$$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer build/sanitizer/nvidia/*/bin/compute-sanitizer 2>/dev/null | head -1 || true); \
	if [ -z "$$tool" ]; then \
		echo "compute-sanitizer is not installed. It is in NVIDIA's CUDA toolkit; or take it from the package index, for CUDA 13 or 12:" >&2; \
		echo "    $(PYTHON) -m pip install --no-deps --target build/sanitizer nvidia-cuda-sanitizer-api" >&2; \
		echo "    $(PYTHON) -m pip install --no-deps --target build/sanitizer nvidia-cuda-sanitizer-api-cu12" >&2; exit 1; \
	fi; \
	here=$$(dirname "$$tool"); lib=$$(cd "$$here/.." && pwd)/lib; chmod -f +x "$$tool" "$$here"/../compute-sanitizer/* || true; \
	mkdir -p build; failed=; for check in memcheck initcheck racecheck; do \
		echo "compute-sanitizer $$check ($$tool)"; log=build/sanitize-$$check.log; \
		options="--tool $$check --error-exitcode 3 --target-processes application-only --print-limit 20"; \
		case $$check in memcheck) options+=" --report-api-errors no";; initcheck) options+=" --check-api-memory-access no";; racecheck) options+=" --kernel-name-exclude kns=2at6native";; esac; \
		case $$check in memcheck) rungs=;; initcheck) rungs="--without kind=gluon,matmul.cuda_cluster,cuda_bulk,cuda_tma,cuda_ring";; *) rungs="--without kind=gluon,matmul.cuda_cluster";; esac; \
		if [ -e "$$lib/libsanitizer-collection.so" ]; then options+=" --injection-path $$lib"; fi; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src $(ONE_THREAD) "$$tool" $$options $(PYTHON) tests/sanitize.py $(OPS) $$rungs 2>&1 | tee $$log \
			&& grep -q " calls, 0 wrong" $$log || failed+=" $$check"; \
	done; \
	if [ -n "$$failed" ]; then echo "not clean:$$failed (build/sanitize-*.log)" >&2; exit 1; fi; echo "memcheck is clean; initcheck and racecheck are, but for the kernels left out of them"

# Triton 3.6's interpreter does not work with numpy 2.4 and later.
build/triton-%/.ready: requirements.lock | $(READY)
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$* $(if $(filter 3.6.%,$*),numpy==2.3.5)
	@touch $@

# accelerate and peft would bring a torch of their own.
build/transformers-%/.ready: requirements.lock | $(READY)
	$(PY) -m pip install --quiet --upgrade --target $(@D) transformers==$* psutil
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) accelerate==1.15.0 peft==0.21.2
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
	$(PY) -m ridgeline.lab.presentation.stubs

readme: $(READY) ## write the README's figures, docs/ops.md, docs/measured/ and the pictures from results/ and the registry
	$(PY) -m ridgeline.lab.presentation.readme

zh: $(READY) ## bring the Chinese catalogues, docs/zh/pages.txt and README.zh.md up to date; then translate what is open
	$(PY) -m ridgeline.lab.presentation.catalogues

compiled: $(READY) ## compile the kernels that have changed: write results/compiled/ and tests/kernels_that_fit.txt
	$(PY) -m ridgeline.lab.presentation.site.compiled
	$(PYTEST) tests/test_kernels.py -k test_kernels_fit --remember-kernels

docs: $(READY) build/sphinx/.ready ## build the site into site/, in Chinese below site/zh/; it needs no network, and no server
	$(PY) -m ridgeline.lab.presentation.site --out build/site
	$(PY) -m ridgeline.lab.presentation.site.chinese build/site build/site-zh
	@rm -rf site
	PYTHONPATH=build/sphinx $(PY) -m sphinx -W --keep-going -q -j $(JOBS) -d build/site-trees build/site site
	PYTHONPATH=build/sphinx $(PY) -m sphinx -W --keep-going -q -j $(JOBS) -d build/site-trees-zh build/site-zh site/zh
	@echo "The site: file://$(CURDIR)/site/index.html"

test-docs: docs browser build/transformers-$(lastword $(TRANSFORMERS))/.ready ## build the site; run its code, check its links, open its pages in a browser
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/build/sphinx:$(CURDIR)/build/transformers-$(lastword $(TRANSFORMERS)) $(PYTEST) tests/site

dist: $(READY) ## build the wheel and the source archive into dist/, and try the wheel in a fresh environment
	@rm -rf dist build/dist
	$(PY) tests/release.py build dist
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet --constraint requirements.lock "$$(ls dist/*.whl)[lab]" transformers==$(lastword $(TRANSFORMERS))
	cd build/dist && env -u PYTHONPATH bin/python $(CURDIR)/tests/release.py try $(CURDIR)/README.md

build/sphinx/.ready: requirements-docs.lock | $(READY)
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) --requirement requirements-docs.lock
	@touch $@

hooks: $(READY) ## run lint, types and the stub's check before each commit
	$(PY) -m pre_commit install

clean: ## remove what these verbs made, except .venv
	rm -rf build report site dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
