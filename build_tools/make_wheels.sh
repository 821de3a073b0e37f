#!/usr/bin/env bash
# The sdist, and made of it the wheels of an architecture, into dist/: for the Pythons that are named, of
# which 3.12 stands for all later ones (stable ABI).
#
#   build_tools/make_wheels.sh x86_64 3.11 3.12
#
# auditwheel tags them by the oldest glibc that has what they call. Each is looked at, installed into an
# environment with nothing but its dependencies, and called there. aarch64 on another machine: by cross
# compiler and QEMU, and for the one Python that Debian has.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$1
shift
work=$PWD/build/wheels-$arch
tools=$work/tools/bin
crosses=
tools_version=3.12
if [[ $arch != "$(uname -m)" ]]; then
  [[ $arch == aarch64 ]] || { echo "ARCH: expected $(uname -m) or aarch64, got $arch" >&2; exit 2; }
  crosses=1
  tools_version=3.11  # that of the wheel
fi
rm -rf dist "$work"

"$(build_tools/find_python.sh "$tools_version" || build_tools/find_python.sh 3.13)" -m venv "$work/tools"
"$tools/pip" install --quiet --upgrade 'pip>=25.1'
"$tools/pip" install --quiet --group wheels ${crosses:+--group build}
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

build_for_aarch64() {
  local wheel emulated
  . build_tools/aarch64.sh
  aarch64_get_python "$work"
  "$tools/python" build_tools/ffi_headers.py "$work/headers"
  aarch64_wheel "$tools" "$sdist" "$work" "$work/whl" \
    --config-settings=cmake.define.XLA_FFI_INCLUDE_DIR="$work/headers/jaxlib/include"
  wheel=$(echo "$work/whl"/*.whl)
  check "$wheel"
  aarch64_install "$tools" "$work" "$wheel"
  aarch64_python "$work"
  (cd / && "${emulated[@]}" "$OLDPWD/build_tools/try_wheel.py")
  cp "$wheel" dist
}

for version in "$@"; do
  if [[ $crosses && $version == 3.11 ]]; then
    build_for_aarch64
    continue
  elif [[ $crosses ]]; then
    echo "no Python $version for $arch: no wheel for it"
    continue
  fi
  python=$(build_tools/find_python.sh "$version" ||
    { [[ $version == 3.12 ]] && build_tools/find_python.sh 3.13; }) ||
    { echo "no Python $version: no wheel for it"; continue; }
  build_for "$python" "$version"
done
ls -l dist
