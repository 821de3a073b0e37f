# Functions that unpack Debian's packages, including Pythons, into folders. To be sourced. Nothing is
# installed on this machine.

# debian_apt FOLDER ARCH COMMAND...: apt-get with package lists of its own, in FOLDER.
debian_apt() {
  local folder=$1 arch=$2
  shift 2
  apt-get -q -oAPT::Architecture="$arch" -oAPT::Architectures="$arch" -oDir::State::status=/dev/null \
    -oDir::State::Lists="$folder/lists" -oDir::Etc::sourcelist="$folder/sources.list" \
    -oDir::Etc::sourceparts=/dev/null "$@" >/dev/null 2>&1
}

# debian_lists FOLDER ARCH RELEASE [deb-src]. Fails, and says why, if the lists are not available.
debian_lists() {
  mkdir -p "$1/lists/partial" "$1/debs/partial" "$1/root"
  echo "${4:-deb} [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
    "http://deb.debian.org/debian $3 main" >"$1/sources.list"
  debian_apt "$1" "$2" update || { echo "no package lists of Debian $3 for $2"; return 1; }
}

# debian_unpack FOLDER ARCH RELEASE PACKAGE...: into FOLDER/root, without dependencies.
debian_unpack() {
  local folder=$1 arch=$2 release=$3 package
  shift 3
  debian_lists "$folder" "$arch" "$release" || return 1
  (cd "$folder/debs" && debian_apt "$folder" "$arch" download "$@") ||
    { echo "not all in Debian $release for $arch: $*"; return 1; }
  for package in "$folder"/debs/*.deb; do
    dpkg -x "$package" "$folder/root" || return 1
  done
  find "$folder/root" -type l -lname '/*' -printf '%l\n%p\n' |
    while read -r target && read -r link; do ln -sfn "$folder/root$target" "$link"; done
  # From Debian 13 on base-files makes these links.
  for package in lib lib64; do
    [[ -e $folder/root/$package || ! -e $folder/root/usr/$package ]] ||
      ln -s "usr/$package" "$folder/root/$package"
  done
}

# debian_python FOLDER ARCH VERSION: FOLDER/root/usr/bin/pythonVERSION of the first release that has it.
debian_python() {
  local folder=$1 arch=$2 version=$3 release ssl=libssl3t64
  [[ ! -e $folder/python.stamp ]] || return 0
  case $version in
    3.11) release=bookworm ssl=libssl3 ;;
    3.13) release=trixie ;;
    *) release=forky ;;
  esac
  debian_unpack "$folder" "$arch" "$release" "python$version-minimal" "libpython$version-minimal" \
    "libpython$version-stdlib" "libpython$version-dev" libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 \
    "$ssl" libffi8 libbz2-1.0 liblzma5 libzstd1 || return 1
  cp "$folder/root/usr/include"/*-linux-gnu/"python$version/pyconfig.h" \
    "$folder/root/usr/include/python$version/"
  touch "$folder/python.stamp"
}

root_libraries() { echo "$1/lib/x86_64-linux-gnu:$1/usr/lib/x86_64-linux-gnu"; }

# old_python FOLDER VERSION: FOLDER/root/usr/bin/pythonVERSION, which runs on glibc 2.31 of Debian 11, the
# oldest release on Debian's mirrors. Debian 11 has Python 3.9, so this machine's compiler builds the
# source of a later release.
old_python() {
  local folder=$1 root=$1/root version=$2 release=bookworm
  [[ ! -e $folder/python.stamp ]] || return 0
  [[ $version == 3.11 ]] || release=trixie
  debian_unpack "$folder" amd64 bullseye libc6 libc6-dev linux-libc-dev libcrypt1 libcrypt-dev \
    libgcc-s1 libstdc++6 zlib1g zlib1g-dev libffi7 libffi-dev libssl1.1 libssl-dev || return 1
  debian_lists "$folder" amd64 "$release" deb-src || return 1
  (cd "$folder/debs" && debian_apt "$folder" amd64 source --download-only "python$version") ||
    { echo "no source of Python $version in Debian $release"; return 1; }
  rm -rf "$folder/source"
  mkdir "$folder/source"
  tar -xf "$folder/debs/python${version}_"*.orig.tar.?z -C "$folder/source" --strip-components=1 || return 1
  # Up to 3.11 the script that builds the modules names this machine's folders.
  [[ ! -e $folder/source/setup.py ]] || sed -i "s|'/usr/|'$root/usr/|g" "$folder/source/setup.py"
  # -B, because GCC otherwise takes this machine's libc before that of --sysroot.
  (cd "$folder/source" && ./configure --prefix=/usr --without-ensurepip --disable-test-modules \
    --with-openssl="$root/usr" OPT='-O1 -DNDEBUG' PKG_CONFIG=false LIBFFI_CFLAGS= LIBFFI_LIBS=-lffi \
    ZLIB_CFLAGS= ZLIB_LIBS=-lz CC="gcc --sysroot=$root -B$root/usr/lib/x86_64-linux-gnu" \
    LDFLAGS="-Wl,--dynamic-linker=$root/lib64/ld-linux-x86-64.so.2 \
      -Wl,--disable-new-dtags,-rpath,$(root_libraries "$root")" &&
    make -j "$(getconf _NPROCESSORS_ONLN)" && make install DESTDIR="$root") >"$folder/build.log" 2>&1 ||
    { tail -n 20 "$folder/build.log"; return 1; }
  rm -rf "$folder/source"
  touch "$folder/python.stamp"
}

# run_from_root FOLDER VERSION PATCHELF: makes that x86-64 Python and its children run on FOLDER's libc.
run_from_root() {
  "$3" --set-interpreter "$1/root/lib64/ld-linux-x86-64.so.2" --force-rpath \
    --set-rpath "$(root_libraries "$1/root")" "$1/root/usr/bin/python$2"
}
