#!/usr/bin/env bash
# Prints the path of a Python that can build and run jax_attn, or says on stderr why there is none.
#
#   find_python.sh              python3 if its version is supported, else the newest found that is
#   find_python.sh 3.12         that version
#   find_python.sh PATH         that interpreter
#
# A version is searched on PATH and among pyenv's. It must start (a pyenv shim may not), and have the
# venv module and the header Python.h.
set -u

supported=(3.15 3.14 3.13 3.12 3.11)
case "${1:-}" in
  "") versions=("${supported[@]}"); candidates=(python3) ;;
  3.1[1-5]) versions=("$1"); candidates=() ;;
  *) versions=("${supported[@]}"); candidates=("$1") ;;
esac
if [[ -z "${1:-}" || "$1" == 3.1[1-5] ]]; then
  for version in "${versions[@]}"; do
    candidates+=("python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python)
  done
fi

for candidate in "${candidates[@]}"; do
  "$candidate" -c '
import os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
version = "%d.%d" % sys.version_info[:2]
if version not in sys.argv[1].split() or not os.path.exists(header):
    sys.exit(1)
print(sys.executable)' "${versions[*]}" 2>/dev/null && exit 0
done

echo "no usable Python ${versions[*]} (tried: ${candidates[*]}): it needs the venv module and Python.h" \
  "(Debian: apt install python3-venv python3-dev)" >&2
exit 1
