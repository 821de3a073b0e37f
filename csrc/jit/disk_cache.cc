#include "jit/disk_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>
#include <sstream>
#include <system_error>

#include "jit/sha256.h"

namespace jax_attn {
namespace {

namespace fs = std::filesystem;

constexpr char kCubinFile[] = "kernel.cubin";
constexpr char kSourceFile[] = "kernel.cu";
constexpr char kMetaFile[] = "meta";
constexpr char kMetaTitle[] = "jax_attn kernel 2";
constexpr char kTemporary[] = ".tmp-";
constexpr char kTrash[] = ".trash-";
constexpr int kMaxPublishAttempts = 20;
constexpr off_t kMaxFileBytes = off_t{1} << 28;  // many times the largest cubin
constexpr time_t kDeadAfterSeconds = 3600;       // a living writer takes milliseconds
// Others may read: root fills the cache of an image. The umask may take bits away.
constexpr mode_t kFolderMode = 0755, kFileMode = 0644;
constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH, kOthersEnter = S_IXGRP | S_IXOTH;

Status Errno(const std::string& what, const fs::path& path) {
  return Status::Error("cannot " + what + " " + path.string() + ": " + std::strerror(errno));
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  bool ok() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  int fd_;
};

// ---- who is trusted ----------------------------------------------------------------------------

// The owner of the file system's root can do everything anyway. In a user namespace that maps no
// root, that owner is not user 0.
bool IsTrusted(uid_t owner) {
  struct stat root;
  return owner == geteuid() || owner == 0 || (stat("/", &root) == 0 && owner == root.st_uid);
}

bool OnlyOursToWrite(const struct stat& s) {
  return IsTrusted(s.st_uid) && (s.st_mode & kOthersWrite) == 0;
}

// Refuses a folder if other users can write it or a folder above it, as sshd does with homes. Two
// exceptions: a folder above may be sticky like /tmp, where users rename only what is theirs, and
// nothing below a folder that others cannot enter matters.
Status CheckFolder(const fs::path& folder) {
  if (!folder.is_absolute()) {
    return Status::Error(folder.string() + " is no absolute path (is HOME set?)");
  }
  std::error_code error;
  const fs::path resolved = fs::canonical(folder, error);
  if (error) return Status::Error("cannot open " + folder.string() + ": " + error.message());
  std::string others_write;
  for (fs::path at = resolved;; at = at.parent_path()) {
    struct stat s;
    if (stat(at.c_str(), &s) != 0) return Errno("open", at);
    if (!S_ISDIR(s.st_mode)) return Status::Error(at.string() + " is not a folder");
    if (!IsTrusted(s.st_uid)) {
      return Status::Error(at.string() + " belongs to user " + std::to_string(s.st_uid) +
                           ", neither to root nor to user " + std::to_string(geteuid()) +
                           ", who runs this");
    }
    const bool is_sticky = at != resolved && (s.st_mode & S_ISVTX) != 0;
    if ((s.st_mode & kOthersWrite) != 0 && !is_sticky) {
      char mode[8];
      std::snprintf(mode, sizeof(mode), "%o", static_cast<unsigned>(s.st_mode & 07777));
      others_write = at.string() + " can be written by other users (its mode is " + mode + ")";
    }
    if ((s.st_mode & kOthersEnter) == 0) others_write.clear();
    if (at == at.root_path()) break;
  }
  return others_write.empty() ? Status::Ok() : Status::Error(others_write);
}

// mkdir -p. Other users cannot write the new folders, whatever the umask is.
Status MakeFolders(const fs::path& folder) {
  fs::path made;
  for (const fs::path& part : folder) {
    made /= part;
    std::error_code ignored;
    if (mkdir(made.c_str(), kFolderMode) == 0 || errno == EEXIST) continue;
    const Status status = Errno("create", made);
    if (!fs::is_directory(made, ignored)) return status;
  }
  return Status::Ok();
}

// ---- reading ----------------------------------------------------------------------------------

// The folder of an entry; not ok() if it is a link or other users can write it.
Fd OpenEntry(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat s;
  if (fd < 0 || (fstat(fd, &s) == 0 && OnlyOursToWrite(s))) return Fd(fd);
  close(fd);
  return Fd(-1);
}

// Reads a regular file in an open folder. Follows no link and does not wait at a pipe.
bool ReadFile(const Fd& folder, const char* name, std::string* contents) {
  const Fd file(openat(folder.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat s;
  if (!file.ok() || fstat(file.get(), &s) != 0 || !S_ISREG(s.st_mode) || !OnlyOursToWrite(s) ||
      s.st_size > kMaxFileBytes) {
    return false;
  }
  contents->resize(static_cast<size_t>(s.st_size));
  size_t done = 0;
  while (done < contents->size()) {
    const ssize_t n = read(file.get(), &(*contents)[done], contents->size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

std::string KeyLines(const std::string& key) {
  return std::string(kMetaTitle) + "\nkey_sha256 " + key + "\n";
}

std::string CubinLines(const std::string& cubin) {
  return "cubin_bytes " + std::to_string(cubin.size()) + "\ncubin_sha256 " + Sha256Hex(cubin) +
         "\n";
}

// ---- writing ----------------------------------------------------------------------------------

// A name in the same folder that no other process uses, also on machines that share the folder.
fs::path RandomSibling(const fs::path& path, const char* prefix) {
  std::random_device random;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%08x%08x", random(), random());
  return path.parent_path() / (prefix + std::string(digits));
}

Status WriteFile(const fs::path& path, const std::string& contents) {
  const Fd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kFileMode));
  if (!file.ok()) return Errno("create", path);
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t n = write(file.get(), &contents[done], contents.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Errno("write to", path);
    done += static_cast<size_t>(n);
  }
  return Status::Ok();
}

Status WriteFiles(const fs::path& folder, const CacheEntry& entry) {
  std::ostringstream meta;
  meta << KeyLines(entry.key) << CubinLines(entry.cubin) << "options " << entry.options
       << "\ncompile_ms " << entry.compile_ms << "\n"
       << entry.description;
  JAX_ATTN_RETURN_IF_ERROR(WriteFile(folder / kCubinFile, entry.cubin));
  JAX_ATTN_RETURN_IF_ERROR(WriteFile(folder / kSourceFile, entry.source));
  return WriteFile(folder / kMetaFile, meta.str());
}

// Renames a finished folder into place.
Status Publish(const fs::path& finished, const fs::path& path, const std::string& key) {
  std::error_code error;
  // Each writer that replaces the same corrupt entry meanwhile can cost one more round.
  for (int attempt = 0; attempt < kMaxPublishAttempts; ++attempt) {
    fs::rename(finished, path, error);
    if (!error) return Status::Ok();
    CacheEntry other;
    other.key = key;
    if (ReadCacheEntry(path.string(), &other) == CacheLookup::kHit) return Status::Ok();
    std::error_code ignored;
    const fs::path trash = RandomSibling(path, kTrash);
    fs::rename(path, trash, ignored);
    fs::remove_all(trash, ignored);
  }
  return Status::Error("cannot publish " + path.string() + ": " + error.message());
}

// Locks a writer's folder, which tells others that the writer lives.
Fd LockFolder(const fs::path& folder, bool* is_taken) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  *is_taken = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  return Fd(fd);
}

// Removes what killed writers left: folders that are old and not locked. If the file system has no
// locks, only the age decides.
void SweepDead(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind(kTemporary, 0) != 0 && name.rfind(kTrash, 0) != 0) continue;
    struct stat s;
    if (lstat(it->path().c_str(), &s) != 0) continue;
    if (std::time(nullptr) - s.st_mtime < kDeadAfterSeconds) continue;
    bool is_taken = false;
    const Fd lock = LockFolder(it->path(), &is_taken);
    std::error_code ignored;
    if (!is_taken) fs::remove_all(it->path(), ignored);
  }
}

}  // namespace

CacheLookup ReadCacheEntry(const std::string& path, CacheEntry* entry) {
  const fs::path folder(path);
  if (!CheckFolder(folder.parent_path()).ok()) return CacheLookup::kMiss;
  std::error_code error;
  if (!fs::exists(fs::symlink_status(folder, error))) return CacheLookup::kMiss;
  const Fd fd = OpenEntry(folder);
  std::string meta, cubin;
  if (!fd.ok() || !ReadFile(fd, kMetaFile, &meta) || !ReadFile(fd, kCubinFile, &cubin) ||
      cubin.empty()) {
    return CacheLookup::kCorrupt;
  }
  // All keys have the same length.
  const std::string key_lines = KeyLines(entry->key), cubin_lines = CubinLines(cubin);
  if (meta.size() < key_lines.size() ||
      meta.compare(key_lines.size(), cubin_lines.size(), cubin_lines) != 0) {
    return CacheLookup::kCorrupt;
  }
  if (meta.compare(0, key_lines.size(), key_lines) != 0) return CacheLookup::kMiss;
  entry->cubin = std::move(cubin);
  return CacheLookup::kHit;
}

std::vector<std::string> ReadDescriptions(const std::string& cache, const std::string& prefix) {
  std::vector<std::string> descriptions;
  if (!CheckFolder(cache).ok()) return descriptions;
  std::error_code error;
  for (fs::directory_iterator it(cache, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().rfind(prefix, 0) != 0) continue;
    const Fd fd = OpenEntry(it->path());
    std::string meta;
    if (fd.ok() && ReadFile(fd, kMetaFile, &meta)) descriptions.push_back(std::move(meta));
  }
  return descriptions;
}

Status WriteCacheEntry(const std::string& path, const CacheEntry& entry) {
  const fs::path cache = fs::path(path).parent_path();
  if (cache.is_absolute()) JAX_ATTN_RETURN_IF_ERROR(MakeFolders(cache));
  JAX_ATTN_RETURN_IF_ERROR(CheckFolder(cache));
  SweepDead(cache);
  const fs::path folder = RandomSibling(path, kTemporary);
  if (mkdir(folder.c_str(), kFolderMode) != 0) return Errno("create", folder);
  bool is_taken = false;
  const Fd lock = LockFolder(folder, &is_taken);
  Status status = WriteFiles(folder, entry);
  if (status.ok()) status = Publish(folder, path, entry.key);
  std::error_code ignored;
  fs::remove_all(folder, ignored);  // already renamed if it was published
  return status;
}

}  // namespace jax_attn
