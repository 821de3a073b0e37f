// Replacements for the glibc functions newer than 2.28 that the extension calls, made from
// functions of 2.28, so that a wheel built on a current machine runs on older ones. They are
// hidden: only the extension and the libstdc++ linked into it call them. The list is complete for
// GCC 12 and glibc 2.36; check_wheel.py fails if other versions need more.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// glibc 2.34 moved these from libdl and libpthread into libc under a new version, and kept the old
// one, which is named here. A jump needs no prototype and lets exceptions of pthread_once pass.
#ifdef __aarch64__
#define JUMP "b "
#define OLD(x86_64) "GLIBC_2.17"  // glibc's first release for aarch64
#else
#define JUMP "jmp "
#define OLD(x86_64) "GLIBC_" x86_64
#endif
#define MOVED(name, x86_64) \
  __asm__( \
      ".pushsection .text\n" \
      ".symver old_" #name "," #name "@" OLD(x86_64) "\n" \
      ".globl " #name "\n.hidden " #name "\n.type " #name ",%function\n" \
      #name ": " JUMP "old_" #name "\n" \
      ".popsection\n")

MOVED(dladdr, "2.2.5");
MOVED(dlerror, "2.2.5");
MOVED(dlopen, "2.2.5");
MOVED(dlsym, "2.2.5");
MOVED(pthread_create, "2.2.5");
MOVED(pthread_detach, "2.2.5");
MOVED(pthread_once, "2.2.5");
MOVED(pthread_rwlock_rdlock, "2.2.5");
MOVED(pthread_rwlock_unlock, "2.2.5");
MOVED(pthread_rwlock_wrlock, "2.2.5");
MOVED(pthread_setname_np, "2.12");

extern "C" {

// Before 2.33 these were inline functions of <sys/stat.h>. On 64-bit machines the kernel's struct
// is glibc's.
int stat(const char* path, struct stat* result) noexcept {
  return syscall(SYS_newfstatat, AT_FDCWD, path, result, 0);
}
int lstat(const char* path, struct stat* result) noexcept {
  return syscall(SYS_newfstatat, AT_FDCWD, path, result, AT_SYMLINK_NOFOLLOW);
}
int fstat(int file, struct stat* result) noexcept { return syscall(SYS_fstat, file, result); }
int fstat64(int file, struct stat64* result) noexcept { return syscall(SYS_fstat, file, result); }

// std::random_device calls this. New in 2.36.
uint32_t arc4random() noexcept {
  uint32_t value;
  if (getentropy(&value, sizeof value) != 0) abort();
  return value;
}

// While this is true, libstdc++ counts references without atomics. A process that has loaded XLA
// always has several threads. New in 2.32.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;

}  // extern "C"
