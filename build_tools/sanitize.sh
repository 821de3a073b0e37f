#!/usr/bin/env bash
# The C++ tests and a CPU selection of the Python tests, built for the sanitizers of GCC and run.
#
#   build_tools/sanitize.sh PYTHON         all of it, most of an hour
#   build_tools/sanitize.sh PYTHON --some  a part that fits five minutes on two cores
#
# PYTHON is the interpreter of an environment with the tests' dependencies (make's), which does not
# change: the instrumented extension goes into a separate environment that borrows its packages.
#
# There are no suppressions. Not checked:
#   leaks in Python: the interpreter and XLA keep allocations until exit, and so do, on purpose, the
#     registry and the kernels. The C++ tests do check for leaks.
#   fork in a process with threads: AddressSanitizer's allocator leaves its locks as they are (GCC
#     before 14). ThreadSanitizer does run that test.
#   races in Python: neither the interpreter nor XLA's thread pool is built for ThreadSanitizer, so
#     it would miss what orders our threads there and call that a race. The C++ tests run the task
#     pool on threads of their own, and kernels from many threads at once.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$(command -v "$1")")
amount=${2:-all}
bin=$(dirname "$python")
work=$(pwd)/build/sanitize
headers=$(pwd)/build/ffi_headers/jaxlib/include

if [[ $amount == --some ]]; then
  # The fuzzer of damaged plans runs attention and append on those that pass the check.
  address_tests=(jit_test append_cuda_test task_pool_test)
  fuzz_tests=(fuzz_replay fuzz_damaged)
  thread_tests=(jit_test task_pool_test)
  python_tests=(tests/plan/test_plan_file.py tests/ops/test_merge.py)
else
  address_tests=(tests/csrc/*/*_test.cc)
  address_tests=("${address_tests[@]##*/}")
  address_tests=("${address_tests[@]%.cc}")
  fuzz_tests=(fuzz_replay fuzz_damaged fuzz_batches)
  thread_tests=(jit_test task_pool_test attention_cpu_test)
  python_tests=(tests --ignore tests/serve
    --deselect tests/xla/test_jit.py::test_precompile_and_plan_in_a_forked_child)
fi

# configure SANITIZER: a build in $work/SANITIZER
configure() {
  "$bin/cmake" -S build_tools -B "$work/$1" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
    -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE="$python" -DXLA_FFI_INCLUDE_DIR="$headers" \
    -DJAX_ATTN_TESTS=ON -DJAX_ATTN_NATIVE=ON -DJAX_ATTN_SANITIZE="$1" >"$work/$1.log" || { cat "$work/$1.log"; return 1; }
}

# build SANITIZER TARGETS...
build() {
  local sanitizer=$1
  shift
  configure "$sanitizer"
  "$bin/cmake" --build "$work/$sanitizer" --target "$@" >"$work/$sanitizer.log" ||
    { cat "$work/$sanitizer.log"; return 1; }
}

# run SANITIZER TESTS...
run() {
  local sanitizer=$1
  shift
  "$bin/ctest" --test-dir "$work/$sanitizer" --parallel "$(getconf _NPROCESSORS_ONLN)" \
    --output-on-failure -R "^($(IFS='|'; echo "$*"))\$"
}

# An environment beside $python's, in which jax_attn is this source tree with the extension just built.
make_environment() {
  local venv=$work/venv site borrowed
  rm -rf "$venv"
  "$python" -m venv --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  borrowed=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$borrowed" >"$site/borrowed.pth"  # without its own .pth files: an editable jax_attn stays out
  mkdir "$site/jax_attn"
  ln -s "$(pwd)"/jax_attn/* "$site/jax_attn/"
  ln -s "$(pwd)/data" "$site/data"  # the bundled model
  # Not cmake --install: it would write the bundled model into the source tree, through the links.
  cp "$work"/address/_core.*.so "$site/jax_attn/"
}

mkdir -p "$work"
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN)}
echo "== AddressSanitizer and UndefinedBehaviorSanitizer: C++"
build address _core fuzz_plan "${address_tests[@]}"
run address "${address_tests[@]}" "${fuzz_tests[@]}"

echo "== ThreadSanitizer: C++"
build thread "${thread_tests[@]}"
run thread "${thread_tests[@]}"

echo "== AddressSanitizer and UndefinedBehaviorSanitizer: Python"
make_environment
# PYTHONSAFEPATH: the source tree, which has no extension in it, must not shadow that environment.
# The sanitizer must be loaded first, and looks for libstdc++ when it starts.
libasan=$(g++ -print-file-name=libasan.so)
libstdcxx=$(g++ -print-file-name=libstdc++.so.6)
run_python() {
  PYTHONSAFEPATH=1 LD_PRELOAD="$libasan $libstdcxx" ASAN_OPTIONS=detect_leaks=0 \
    UBSAN_OPTIONS=print_stacktrace=1 "$work/venv/bin/python" "$@"
}
run_python -c 'import jax_attn._core as core; print(core.__file__)'
run_python -m pytest -q -p no:cacheprovider -n auto --maxprocesses 4 --dist worksteal "${python_tests[@]}"
