#!/bin/bash
# Builds the wheel for aarch64, and tries it and a part of the Python tests under QEMU.
#
#   build_tools/aarch64_python.sh BUILD    the CMake build for aarch64 of `.ci/run aarch64`
#
# Exits with 77, and says why, if Debian's Python or PyPI's wheels for aarch64 are not available.
set -euo pipefail
build=$(realpath "$1")
host=$PWD/.venv/bin
. build_tools/aarch64.sh

debian_python "$build/python" arm64 3.11 || exit 77
"$host/python" -m pip install --quiet --group wheels
aarch64_wheel "$host" 3.11 . "$build" "$build/wheel" --config-settings=build-dir="$build" \
  --config-settings=cmake.define.XLA_FFI_INCLUDE_DIR="$PWD/build/ffi_headers/jaxlib/include"
wheel=$(echo "$build"/wheel/*.whl)
"$host/python" build_tools/check_wheel.py "$wheel"
version=$("$host/python" -c 'import jaxlib; print(jaxlib.__version__)')
rm -rf "$build/site"
aarch64_install "$host" 3.11 "$build" "jax==$version" "jaxlib==$version" 'pytest>=8,<10' \
  'pytest-timeout>=2.3,<3' 'hypothesis>=6.100,<7' || { echo "no wheels of jaxlib for aarch64"; exit 77; }
aarch64_install "$host" 3.11 "$build" --no-deps "$wheel"

rm -rf "$build/checkout"
mkdir "$build/checkout"
cp -r tests examples benchmarks pyproject.toml "$build/checkout"
cp build_tools/try_wheel.py "$build/checkout"
cd "$build/checkout"
aarch64_python 3.11 "$build"
"${emulated[@]}" -c 'from jax_attn import _core; print(_core.cpu_isa())' | grep -x neon
"${emulated[@]}" try_wheel.py
# One set of parameters of each test. Three tests of variants take one of the three minutes in all.
printf '%s\n' tests/ops/test_attention.py \
  "tests/variant/test_variant.py -k 'test_functions or test_without_softmax or test_rows_of_operands'" \
  'tests/ops/test_append.py tests/ops/test_formats.py tests/ops/test_merge.py' \
  "tests/models/test_product.py -k 'not loading'" |  # models are loaded with tokenizers
  xargs -d '\n' -P "$(getconf _NPROCESSORS_ONLN)" -I {} bash -c "
    ${emulated[*]@Q} -m pytest -q -p no:cacheprovider --at-most 1 --timeout 600 -W ignore -r fE {}"
