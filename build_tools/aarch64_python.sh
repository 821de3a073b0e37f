#!/bin/bash
# Runs a part of the Python tests on aarch64, under QEMU.
#
#   build_tools/aarch64_python.sh BUILD    the CMake build for aarch64 of `.ci/run aarch64`
#
# Debian's Python 3.11 and PyPI's wheels for aarch64 are unpacked into BUILD/python and BUILD/site: nothing
# is installed on this machine. Exits with 77, and says why, where they cannot be had.
set -euo pipefail
build=$(realpath "$1")
host=.venv/bin
root=$build/python site=$build/site
mkdir -p "$root" "$site" "$build/debs/partial" "$build/lists/partial" "$build/wheels"

missing() { echo "$1"; exit 77; }

apt() {
  apt-get -q -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oDir::State::status=/dev/null \
    -oDir::State::Lists="$build/lists" "$@"
}
if [[ ! -x $root/usr/bin/python3.11 ]]; then
  apt update >/dev/null 2>&1 || missing "no package lists of Debian for arm64"
  (cd "$build/debs" && apt download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib \
    libpython3.11-dev libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 \
    >/dev/null 2>&1) || missing "no Python 3.11 of Debian for arm64"
  for package in "$build"/debs/*.deb; do dpkg -x "$package" "$root"; done
  cp "$root"/usr/include/aarch64-linux-gnu/python3.11/pyconfig.h "$root/usr/include/python3.11/"
fi
if [[ ! -d $site/jaxlib ]]; then
  platforms=()
  for platform in manylinux2014 manylinux_2_17 manylinux_2_27 manylinux_2_28; do
    platforms+=(--platform "${platform}_aarch64")
  done
  version=$("$host/python" -c 'import jaxlib; print(jaxlib.__version__)')
  "$host/python" -m pip download -q --only-binary=:all: --python-version 3.11 --implementation cp \
    --abi cp311 --abi abi3 --abi none "${platforms[@]}" -d "$build/wheels" \
    "jax==$version" "jaxlib==$version" 'pytest>=8,<10' 'pytest-timeout>=2.3,<3' 'hypothesis>=6.100,<7' \
    || missing "no wheels of jaxlib for aarch64"
  for wheel in "$build"/wheels/*.whl; do "$host/python" -m zipfile -e "$wheel" "$site"; done
fi

# The headers are that Python's; nothing is linked to it.
"$host/cmake" -S build_tools -B "$build" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" >/dev/null
"$host/cmake" --build "$build" --target _core >"$build/log" || { cat "$build/log"; exit 1; }
rm -rf "$build/checkout"
mkdir "$build/checkout"
cp -r jax_attn tests examples benchmarks pyproject.toml "$build/checkout"
rm -f "$build"/checkout/jax_attn/_core*.so
cp "$(find "$build" -maxdepth 1 -name '_core*.so')" "$build/checkout/jax_attn/_core.so"

cd "$build/checkout"
export PYTHONHOME=$root/usr PYTHONPATH=$build/checkout:$site PYTHONDONTWRITEBYTECODE=1
emulated=(qemu-aarch64-static -L "$root" "$root/usr/bin/python3.11")
"${emulated[@]}" -c 'from jax_attn import _core; print(_core.cpu_isa())' | grep -x neon
# One set of parameters of each test. Of variants three tests: a minute of the three that it all takes.
printf '%s\n' tests/test_attention.py \
  "tests/test_variant.py -k 'test_functions or test_without_softmax or test_rows_of_operands'" \
  'tests/test_append.py tests/test_formats.py tests/test_merge.py' \
  "tests/test_product.py -k 'not loading'" |  # models are loaded with tokenizers
  xargs -d '\n' -P "$(getconf _NPROCESSORS_ONLN)" -I {} bash -c "
    ${emulated[*]@Q} -m pytest -q -p no:cacheprovider --at-most 1 --timeout 600 -W ignore -r fE {}"
