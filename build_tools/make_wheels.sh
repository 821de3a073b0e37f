#!/usr/bin/env bash
# The sdist, and made of it the wheels of an architecture, into dist/: for the Pythons that are named, of
# which 3.12 stands for all later ones (stable ABI).
#
#   build_tools/make_wheels.sh x86_64 3.11 3.12
#
# auditwheel tags them by the oldest glibc that has what they call. Each is looked at, installed into an
# environment with nothing but its dependencies, and called there. aarch64 on another machine: by cross
# compiler and QEMU.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$1
shift
work=$PWD/build/wheels-$arch
tools=$work/tools/bin
crosses=
if [[ $arch != "$(uname -m)" ]]; then
  [[ $arch == aarch64 ]] || { echo "ARCH: expected $(uname -m) or aarch64, got $arch" >&2; exit 2; }
  crosses=1
fi
rm -rf dist "$work"

later=$(build_tools/find_python.sh 3.12 || build_tools/find_python.sh 3.13)
"$later" -m venv "$work/tools"
"$tools/pip" install --quiet --upgrade 'pip>=25.1'
"$tools/pip" install --quiet --group wheels
"$tools/python" -m build --sdist --outdir dist . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
sdist=$(echo dist/*.tar.gz)
release=${sdist#dist/jax_attn-}

# A wheel that was repaired: its version is that of the sdist, which has no git.
check() {
  [[ $(basename "$1") == "jax_attn-${release%.tar.gz}-"* ]] ||
    { echo "$(basename "$1"): expected the version of $sdist"; return 1; }
  "$tools/python" build_tools/check_wheel.py "$1"
}

build_for() {
  local python=$1 version=$2 wheel
  "$python" -m venv "$work/$version"
  "$work/$version/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/$version.raw" "$sdist"
  PATH="$tools:$PATH" "$tools/auditwheel" repair --wheel-dir "$work/$version.whl" \
    "$work/$version.raw"/*.whl >"$work/auditwheel.log" 2>&1 || { cat "$work/auditwheel.log"; exit 1; }
  wheel=$(echo "$work/$version.whl"/*.whl)
  check "$wheel"
  "$work/$version/bin/pip" install --quiet "$wheel"
  (cd / && "$work/$version/bin/python" "$OLDPWD/build_tools/try_wheel.py")
  cp "$wheel" dist
}

# build_for_aarch64 VERSION: by this machine's Python for Debian's of that version.
build_for_aarch64() {
  local version=$1 folder=$work/$1 python wheel emulated
  local host=$folder/host/bin
  . build_tools/aarch64.sh
  python=$(build_tools/find_python.sh "$version") || { echo "no Python $version: no wheel by it"; return; }
  "$python" -m venv "$folder/host"
  "$host/pip" install --quiet --upgrade 'pip>=25.1'
  "$host/pip" install --quiet --group wheels --group build
  aarch64_get_python "$folder" "$version"
  "$host/python" build_tools/ffi_headers.py "$folder/headers"
  aarch64_wheel "$host" "$version" "$sdist" "$folder" "$folder/whl" \
    --config-settings=cmake.define.XLA_FFI_INCLUDE_DIR="$folder/headers/jaxlib/include"
  wheel=$(echo "$folder/whl"/*.whl)
  check "$wheel"
  aarch64_install "$host" "$version" "$folder" "$wheel"
  aarch64_python "$version" "$folder"
  (cd / && "${emulated[@]}" "$OLDPWD/build_tools/try_wheel.py")
  cp "$wheel" dist
}

for version in "$@"; do
  if [[ $crosses ]]; then
    [[ $version != 3.12 ]] || version=3.13  # of Debian 13; Debian has no 3.12
    build_for_aarch64 "$version"
    continue
  fi
  python=$(build_tools/find_python.sh "$version" ||
    { [[ $version == 3.12 ]] && build_tools/find_python.sh 3.13; }) ||
    { echo "no Python $version: no wheel for it"; continue; }
  build_for "$python" "$version"
done
ls -l dist
