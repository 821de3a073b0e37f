# Every target does its own set-up: a virtual environment in $(VENV), the build, the run.
#
#   make demo       a small real model generates text for a dozen requests at once
#   make serve      an OpenAI-compatible server of that model on http://127.0.0.1:8000
#   make test       a covering selection of C++ and Python tests, in minutes
#   make test-rest  the tests that `make test` leaves out; SHARE=K/N: one in N of them, from the K-th on
#   make test-all   both
#   make sanitize   C++ tests and Python tests under ASAN, UBSAN and TSAN; ARGS=--some: a five-minute part
#   make fuzz       made-up plans, requests, tool calls, bytes on sockets; ARGS=--seconds=N, --help
#   make bench      CPU benchmarks -> benchmarks/results/
#   make bench-gpu  GPU benchmarks -> benchmarks/results/
#   make bench-serve  the server over HTTP -> benchmarks/results/
#   make lint       ruff, mypy, clang-format, and whether README.md and docs/ are up to date
#   make docs       the pages of docs/ -> build/docs; warnings are errors
#   make wheels     the sdist and manylinux wheels -> dist/; each is tried. aarch64 by cross compiler
#   make digest     hashes of the sources that a result file must carry
#   make clean      remove the results of the above
#
# Variables
#   PYTHON  a version (3.12) or a path; default: python3 if supported, else one that is (find_python.sh)
#   VENV    where the environment goes
#   JAX     a requirement that narrows jax, e.g. make test VENV=.venv-old JAX='jax==0.10.0'
#   ARCH    of wheels; default: this machine's and aarch64
#   PY      an interpreter that already has jax_attn and its dependencies: skips the set-up
VENV ?= .venv
JAX ?= jax
ARCH ?= $(sort $(shell uname -m) aarch64)
ARGS ?=  # more arguments for the demo, the server, pytest or the benchmarks

# Python's variable: without compiled modules every start of a process takes seconds longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-rest test-all sanitize fuzz bench bench-gpu bench-serve lint docs wheels digest clean

ifdef PY
ready :=
full :=
else
PY := $(VENV)/bin/python
ready := $(VENV)/ready.stamp
full := $(VENV)/full.stamp
test_ready := $(VENV)/test.stamp
dev_ready := $(VENV)/dev.stamp
docs_ready := $(VENV)/docs.stamp
cuda_ready := $(VENV)/cuda.stamp
# XLA's compilation, on one core, takes much of a test's time.
pytest_workers := -n auto --maxprocesses 4 --dist worksteal
endif
QUIETLY = build_tools/quietly.sh
# --no-compile below: most installed modules are never imported; the others are compiled on import.
PIP = $(PY) -m pip --disable-pip-version-check --no-input
build_dir := build/$(subst /,-,$(VENV))
native := BEST
headers := build/ffi_headers
# Without build isolation, objects are reused by the next build, and only changes are compiled.
# --verbose prints the compiler's steps, which $(QUIETLY) counts.
INSTALL = $(PIP) install --verbose --no-compile --no-build-isolation \
  --config-settings=build-dir=$(build_dir) \
  --config-settings=cmake.define.JAX_ATTN_TESTS=ON \
  --config-settings=cmake.define.JAX_ATTN_NATIVE=$(native) \
  --config-settings=cmake.define.XLA_FFI_INCLUDE_DIR=$(CURDIR)/$(headers)/jaxlib/include \
  --editable
sources := $(shell find csrc -type f 2>/dev/null) build_tools/CMakeLists.txt \
  build_tools/embed_sources.py

demo: $(ready)
	$(PY) examples/demo.py $(ARGS)

serve: $(ready)
	$(PY) -m jax_attn.serve $(ARGS)

# Seconds of processor time of the Python tests that are selected (tests/helpers/selection.py).
covering := 150

test: $(test_ready)
	$(if $(ready),@$(QUIETLY) 'C++ tests compile' \
	  $(VENV)/bin/cmake --build $(build_dir) --target cpp_tests_part)
	$(if $(ready),$(VENV)/bin/ctest --test-dir $(build_dir) --parallel 2 --output-on-failure \
	  -L '^cpp_tests_part$$')
	$(PY) -m pytest $(pytest_workers) --covering $(covering) $(ARGS)

SHARE ?= 0/1
cpp_rest = $(shell ls tests/csrc/*/*_test.cc | sed 's#.*/##; s#[.]cc$$##' | \
  awk -v share=$(SHARE) 'BEGIN { split(share, s, "/") } NR % s[2] == s[1]')
comma := ,
empty :=
space := $(empty) $(empty)

test-rest: $(test_ready)
	$(if $(ready),@$(QUIETLY) 'C++ tests compile' \
	  $(VENV)/bin/cmake --build $(build_dir) --target $(cpp_rest) fuzz_plan)
	$(if $(ready),$(VENV)/bin/ctest --test-dir $(build_dir) --parallel 2 --output-on-failure \
	  -R '^($(subst $(space),|,$(cpp_rest)))$$|^fuzz_')
	$(PY) -m pytest $(pytest_workers) --covering $(covering) --rest --share $(SHARE) $(ARGS)

test-all: test test-rest

sanitize: $(test_ready)
	build_tools/sanitize.sh $(PY) $(ARGS)

# The C++ fuzzer under the sanitizers of `make sanitize`, in the same build.
fuzz: $(test_ready)
	$(if $(ready),$(VENV)/bin/cmake -S build_tools -B build/sanitize/address -G Ninja \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) \
	  -DXLA_FFI_INCLUDE_DIR=$(CURDIR)/$(headers)/jaxlib/include \
	  -DJAX_ATTN_TESTS=ON -DJAX_ATTN_SANITIZE=address >/dev/null)
	$(if $(ready),$(VENV)/bin/cmake --build build/sanitize/address --target fuzz_plan >/dev/null)
	$(PY) -m tests.fuzz $(ARGS)

bench: $(full)
	$(PY) -m benchmarks.bench_cpu $(ARGS)

bench-gpu: $(cuda_ready) $(full)
	$(PY) -m benchmarks.bench_gpu $(ARGS)

bench-serve: $(full)
	$(PY) -m benchmarks.bench_serve $(ARGS)

lint: $(ready) $(dev_ready)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cuh' 'tests/csrc/*.cc' 'tests/csrc/*.h' \
	  'build_tools/*.cc' | xargs $(dir $(PY))clang-format --dry-run -Werror
	$(PY) build_tools/readme_tables.py --check

docs: $(ready) $(docs_ready)
	$(PY) -m sphinx -q -E -W --keep-going -c docs . build/docs  # -E: rebuild all pages, so that warnings repeat

wheels:
	build_tools/make_wheels.sh $(ARCH)

digest:
	@python=$$(build_tools/find_python.sh $(PYTHON)) && $$python benchmarks/digest.py

clean:
	rm -rf $(VENV) build dist

$(VENV)/tools.stamp: pyproject.toml
	@test -x $(VENV)/bin/python || { python=$$(build_tools/find_python.sh $(PYTHON)) && \
	  { $$python -m venv $(VENV) || { $$python -m venv --clear --without-pip $(VENV) && \
	    $$python -m pip --python $(VENV)/bin/python install --quiet pip; }; }; }
	@$(QUIETLY) 'pip and cmake into $(VENV)' sh -c "$(PIP) install --upgrade 'pip>=25.1' && \
	  $(PIP) install --no-compile --group build"
	@touch $@

$(headers)/ready.stamp: pyproject.toml build_tools/ffi_headers.py | $(VENV)/tools.stamp
	@$(QUIETLY) "XLA's headers" $(PY) build_tools/ffi_headers.py $(headers)
	@touch $@

# What tests need comes along if tests are what is wanted: one installation less.
with_tests := $(filter test test-% sanitize fuzz,$(MAKECMDGOALS))

$(VENV)/ready.stamp: $(VENV)/tools.stamp $(headers)/ready.stamp $(sources)
	@$(QUIETLY) 'jax, and jax_attn compiled, into $(VENV)' \
	  $(INSTALL) '.[serve$(if $(with_tests),$(comma)test)]' '$(JAX)'
	@touch $@ $(if $(with_tests),$(VENV)/test.stamp)
	@rm -f $(VENV)/full.stamp

# What is measured is compiled as for a wheel.
$(VENV)/full.stamp: private native := OFF
$(VENV)/full.stamp: private build_dir := $(build_dir)-full
$(VENV)/full.stamp: $(VENV)/ready.stamp
	@$(QUIETLY) 'jax_attn compiled with all optimization, into $(VENV)' $(INSTALL) . --no-deps
	@touch $@

$(VENV)/test.stamp: $(VENV)/tools.stamp | $(VENV)/ready.stamp
	@test $@ -nt $(VENV)/tools.stamp || \
	  $(QUIETLY) 'what tests need into $(VENV)' $(INSTALL) '.[serve,test]' '$(JAX)'
	@touch $@
	@rm -f $(VENV)/full.stamp

$(VENV)/dev.stamp: $(VENV)/tools.stamp | $(VENV)/ready.stamp
	@$(QUIETLY) 'linters into $(VENV)' $(INSTALL) '.[dev]' '$(JAX)'
	@touch $@ $(VENV)/test.stamp  # dev includes the packages of test
	@rm -f $(VENV)/full.stamp

$(VENV)/docs.stamp: $(VENV)/tools.stamp | $(VENV)/ready.stamp
	@$(QUIETLY) 'Sphinx into $(VENV)' $(PIP) install --no-compile --group docs
	@touch $@

$(VENV)/cuda.stamp: $(VENV)/tools.stamp | $(VENV)/ready.stamp
	@$(QUIETLY) 'CUDA into $(VENV)' $(INSTALL) '.[cuda13]' '$(JAX)'
	@touch $@
	@rm -f $(VENV)/full.stamp
