#include "jit/disk_cache.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "jit/sha256.h"

namespace jax_attn {
namespace {

namespace fs = std::filesystem;

constexpr char kCubinFile[] = "kernel.cubin";
constexpr char kSourceFile[] = "kernel.cu";
constexpr char kMetaFile[] = "meta";
constexpr int kMaxPublishAttempts = 20;
constexpr char kMetaTitle[] = "jax_attn kernel 1";

bool ReadFile(const fs::path& path, std::string* contents) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream buffer;
  if (!file || !(buffer << file.rdbuf())) return false;
  *contents = buffer.str();
  return true;
}

bool WriteFile(const fs::path& path, const std::string& contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  return file.good();
}

// The lines of `meta` that a reader checks.
std::string MetaHead(const std::string& cubin) {
  return std::string(kMetaTitle) + "\ncubin_bytes " + std::to_string(cubin.size()) +
         "\ncubin_sha256 " + Sha256Hex(cubin) + "\n";
}

// A name in the same folder that no other process or thread uses.
fs::path UniqueSibling(const fs::path& path, const char* purpose) {
  static std::atomic<unsigned> counter{0};
  char host[64] = "";
  gethostname(host, sizeof(host) - 1);  // the folder may be shared over a network
  std::ostringstream name;
  name << "." << purpose << "-" << host << "-" << getpid() << "-" << counter++;
  return path.parent_path() / name.str();
}

Status WriteFiles(const fs::path& folder, const CacheEntry& entry) {
  std::ostringstream meta;
  meta << MetaHead(entry.cubin) << "options " << entry.options << "\ncompile_ms "
       << entry.compile_ms << "\n";
  if (WriteFile(folder / kCubinFile, entry.cubin) &&
      WriteFile(folder / kSourceFile, entry.source) && WriteFile(folder / kMetaFile, meta.str())) {
    return Status::Ok();
  }
  return Status::Error("cannot write to " + folder.string());
}

// Renames a finished folder into place.
Status Publish(const fs::path& finished, const fs::path& path) {
  std::error_code error;
  // One round more than needed for each other writer that replaces the same corrupt entry
  // meanwhile.
  for (int attempt = 0; attempt < kMaxPublishAttempts; ++attempt) {
    fs::rename(finished, path, error);
    if (!error) return Status::Ok();
    CacheEntry other;
    if (ReadCacheEntry(path.string(), &other) == CacheLookup::kHit) return Status::Ok();
    std::error_code ignored;
    const fs::path trash = UniqueSibling(path, "trash");
    fs::rename(path, trash, ignored);
    fs::remove_all(trash, ignored);
  }
  return Status::Error("cannot publish " + path.string() + ": " + error.message());
}

}  // namespace

CacheLookup ReadCacheEntry(const std::string& path, CacheEntry* entry) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return CacheLookup::kMiss;
  std::string meta, cubin;
  if (!ReadFile(fs::path(path) / kMetaFile, &meta) ||
      !ReadFile(fs::path(path) / kCubinFile, &cubin) || cubin.empty()) {
    return CacheLookup::kCorrupt;
  }
  if (meta.rfind(MetaHead(cubin), 0) != 0) return CacheLookup::kCorrupt;
  entry->cubin = std::move(cubin);
  return CacheLookup::kHit;
}

Status WriteCacheEntry(const std::string& path, const CacheEntry& entry) {
  const fs::path folder = UniqueSibling(path, "tmp");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return Status::Error("cannot create " + folder.string() + ": " + error.message());
  Status status = WriteFiles(folder, entry);
  if (status.ok()) status = Publish(folder, path);
  std::error_code ignored;
  fs::remove_all(folder, ignored);  // gone already if it was published
  return status;
}

}  // namespace jax_attn
