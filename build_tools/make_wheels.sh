#!/usr/bin/env bash
# Builds into dist/ the sdist and, from it, two wheels per architecture: for Python 3.11, and for 3.12
# and later (stable ABI).
#
#   build_tools/make_wheels.sh x86_64 aarch64
#
# auditwheel tags them with the oldest glibc that has the functions they call, 2.28 or older
# (old_glibc.cc). Each wheel is checked, installed into environments with only its dependencies, and
# called there: with the Python that built it, and with one on glibc 2.31. The wheel for later Pythons is
# also called with Debian's 3.14 and 3.15, with its extras. On another machine aarch64 uses a cross
# compiler, and QEMU with Debian's Pythons. Pythons are kept in build/pythons.
set -euo pipefail
cd "$(dirname "$0")/.."
. build_tools/debian.sh
. build_tools/aarch64.sh
work=$PWD/build/wheels
pythons=$PWD/build/pythons
tools=$work/tools/bin
for arch in "$@"; do
  [[ $arch == "$(uname -m)" ]] ||
    [[ $arch == aarch64 && $(command -v aarch64-linux-gnu-g++) && $(command -v qemu-aarch64-static) ]] ||
    { echo "ARCH: expected $(uname -m), or aarch64 with aarch64-linux-gnu-g++ and qemu-aarch64-static" \
      "(Debian: apt install g++-aarch64-linux-gnu qemu-user-static), got $arch" >&2; exit 2; }
done
rm -rf dist "$work"

later=$(build_tools/find_python.sh 3.12 || build_tools/find_python.sh 3.13)
"$later" -m venv "$work/tools"
"$tools/pip" install --quiet --upgrade 'pip>=25.1'
"$tools/pip" install --quiet --group wheels
"$tools/python" -m build --sdist --outdir dist . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
sdist=$(echo dist/*.tar.gz)
release=${sdist#dist/jax_attn-}
# One source folder for all wheels, so that ccache recognizes files that later wheels compile again.
mkdir "$work/source"
tar -xf "$sdist" -C "$work/source" --strip-components=1

# The repaired wheel has the version of the sdist, which has no git.
check() {
  [[ $(basename "$1") == "jax_attn-${release%.tar.gz}-"* ]] ||
    { echo "$(basename "$1"): expected the version of $sdist"; return 1; }
  "$tools/python" build_tools/check_wheel.py "$1"
}

# try_with PYTHON REQUIREMENT: that Python's pip takes the wheel, and a call succeeds.
try_with() {
  rm -rf "$work/try"
  "$1" -m venv --without-pip "$work/try"
  "$tools/pip" --python "$work/try/bin/python" install --quiet --no-compile "$2"
  (cd / && "$work/try/bin/python" "$OLDPWD/build_tools/try_wheel.py")
}

# try_elsewhere WHEEL VERSION...: on x86-64, with Pythons that this machine may lack.
try_elsewhere() {
  local wheel=$1 version=$2 folder=$pythons/$2-old-glibc
  shift 2
  if old_python "$folder" "$version"; then
    run_from_root "$folder" "$version" "$tools/patchelf"
    try_with "$folder/root/usr/bin/python$version" "$wheel"
  else
    echo "NOT TRIED on glibc 2.31: $(basename "$wheel")"
  fi
  for version in "$@"; do
    folder=$pythons/$version-x86_64
    if debian_python "$folder" amd64 "$version"; then
      run_from_root "$folder" "$version" "$tools/patchelf"
      try_with "$folder/root/usr/bin/python$version" "$wheel[serve,test]"
    else
      echo "NOT TRIED with Python $version: $(basename "$wheel")"
    fi
  done
}

# build_here VERSION
build_here() {
  local version=$1 folder=$work/$(uname -m)-$1 python wheel
  python=$(build_tools/find_python.sh "$version" ||
    { [[ $version == 3.12 ]] && build_tools/find_python.sh 3.13; }) ||
    { echo "no Python $version: no wheel for it"; return; }
  "$tools/pip" --python "$python" wheel --quiet --no-deps --wheel-dir "$folder/raw" \
    --config-settings=cmake.define.JAX_ATTN_OLD_GLIBC=ON "$work/source"
  PATH="$tools:$PATH" "$tools/auditwheel" repair --wheel-dir "$folder/whl" "$folder/raw"/*.whl \
    >"$folder/auditwheel.log" 2>&1 || { cat "$folder/auditwheel.log"; return 1; }
  wheel=$(echo "$folder/whl"/*.whl)
  check "$wheel"
  try_with "$python" "$wheel"
  if [[ $(uname -m) == x86_64 && $version == 3.11 ]]; then
    try_elsewhere "$wheel" 3.11
  elif [[ $(uname -m) == x86_64 ]]; then
    try_elsewhere "$wheel" 3.13 3.14 3.15
  fi
  cp "$wheel" dist
}

# build_for_aarch64 VERSION: by this machine's Python, for Debian's of that version.
build_for_aarch64() {
  local version=$1 folder=$work/aarch64-$1 python wheel emulated emulates later=()
  local host=$folder/host/bin
  if [[ $version == 3.12 ]]; then version=3.13 later=(3.14 3.15); fi  # Debian has no 3.12
  python=$(build_tools/find_python.sh "$version") || { echo "no Python $version: no wheel by it"; return; }
  "$python" -m venv "$folder/host"
  "$host/pip" install --quiet --upgrade 'pip>=25.1'
  "$host/pip" install --quiet --group wheels --group build
  "$host/python" build_tools/ffi_headers.py "$folder/headers"
  debian_python "$pythons/$version-aarch64/python" arm64 "$version"
  aarch64_wheel "$host" "$version" "$work/source" "$pythons/$version-aarch64" "$folder/whl" \
    --config-settings=cmake.define.XLA_FFI_INCLUDE_DIR="$folder/headers/jaxlib/include"
  wheel=$(echo "$folder/whl"/*.whl)
  check "$wheel"
  for version in "$version" "${later[@]}"; do
    emulates=$pythons/$version-aarch64
    debian_python "$emulates/python" arm64 "$version" ||
      { echo "NOT TRIED with Python $version: $(basename "$wheel")"; continue; }
    rm -rf "$emulates/site"
    aarch64_install "$host" "$version" "$emulates" "$wheel"
    aarch64_python "$version" "$emulates"
    (cd / && "${emulated[@]}" "$OLDPWD/build_tools/try_wheel.py")
  done
  cp "$wheel" dist
}

for arch in "$@"; do
  build=build_here
  [[ $arch == "$(uname -m)" ]] || build=build_for_aarch64
  for version in 3.11 3.12; do $build "$version"; done
done
ls -l dist
