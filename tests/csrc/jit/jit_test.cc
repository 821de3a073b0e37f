// The host side of the CUDA kernels against a fake driver and a fake NVRTC, both defined here and
// found by dlopen in this program. It needs no GPU and no CUDA library, and records every call that
// the real libraries would get.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "jit/compile_log.h"
#include "jit/compiler.h"
#include "jit/counter_pool.h"
#include "jit/cubin.h"
#include "jit/cuda_api.h"
#include "jit/device_group.h"
#include "jit/disk_cache.h"
#include "jit/kernels.h"
#include "jit/sha256.h"
#include "variant/variant_programs.h"

#define FAKE extern "C" __attribute__((visibility("default")))
#define CHECK(condition) \
  if (!(condition))      \
  (std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition), std::exit(1))
#define CHECK_OK(expression)                      \
  if (jax_attn::Status s = (expression); !s.ok()) \
  (std::printf("%s:%d: %s\n", __FILE__, __LINE__, s.message.c_str()), std::exit(1))
#define CHECK_ERROR(expression, text)                                                   \
  do {                                                                                  \
    const jax_attn::Status s = (expression);                                            \
    if (s.message.find(text) == std::string::npos) {                                    \
      std::printf("%s:%d: expected an error with '%s', got '%s'\n", __FILE__, __LINE__, \
                  std::string(text).c_str(), s.message.c_str());                        \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (false)

using namespace jax_attn;

// ---- a cubin with two ints in its data section ------------------------------------------------

constexpr int kSmemBytes = 101376;
constexpr int kNumThreads = 96;

std::string FakeCubin(const std::string& entry) {
  const std::string names[] = {entry + "_smem_bytes", entry + "_num_threads"};
  const int values[] = {kSmemBytes, kNumThreads};
  std::string strings(1, '\0');
  ElfSymbol symbols[3] = {};
  for (int i = 0; i < 2; ++i) {
    symbols[i + 1].name = static_cast<uint32_t>(strings.size());
    symbols[i + 1].section = 3;
    symbols[i + 1].value = sizeof(int) * i;
    strings += names[i] + '\0';
  }
  ElfHeader elf = {};
  std::memcpy(elf.ident, kElf64Magic, sizeof(kElf64Magic));
  elf.num_sections = 4;
  elf.section_offset = sizeof(elf);
  ElfSection sections[4] = {};
  const size_t data = sizeof(elf) + sizeof(sections);
  sections[1].type = kElfSymbolTable;
  sections[1].link = 2;
  sections[1].offset = data;
  sections[1].size = sizeof(symbols);
  sections[2].type = 3;
  sections[2].offset = data + sizeof(symbols);
  sections[2].size = strings.size();
  sections[3].type = 1;
  sections[3].offset = sections[2].offset + strings.size();
  sections[3].size = sizeof(values);
  std::string cubin;
  cubin.append(reinterpret_cast<const char*>(&elf), sizeof(elf));
  cubin.append(reinterpret_cast<const char*>(sections), sizeof(sections));
  cubin.append(reinterpret_cast<const char*>(symbols), sizeof(symbols));
  cubin += strings;
  cubin.append(reinterpret_cast<const char*>(values), sizeof(values));
  return cubin;
}

// ---- fake NVRTC -------------------------------------------------------------------------------

struct FakeProgram {
  std::string text, name, cubin;
  std::vector<std::string> include_names;
};
struct {
  std::mutex mutex;
  std::vector<std::string> options;  // of the last compile
  FakeProgram last;
  std::atomic<int> compiles{0};
  std::atomic<int> live_programs{0};
  std::atomic<bool> fail{false};
} fake_nvrtc;

FAKE int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 5, 0; }
FAKE const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
FAKE int nvrtcGetNumSupportedArchs(int* num) { return *num = 3, 0; }
FAKE int nvrtcGetSupportedArchs(int* archs) {
  return archs[0] = 80, archs[1] = 90, archs[2] = 100, 0;
}
FAKE int nvrtcCreateProgram(FakeProgram** program, const char* text, const char* name,
                            int num_headers, const char* const*, const char* const* include_names) {
  ++fake_nvrtc.live_programs;
  *program = new FakeProgram{text, name, "", {include_names, include_names + num_headers}};
  return 0;
}
FAKE int nvrtcDestroyProgram(FakeProgram** program) {
  --fake_nvrtc.live_programs;
  delete *program;
  return 0;
}
FAKE int nvrtcCompileProgram(FakeProgram* program, int num_options, const char* const* options) {
  const std::lock_guard<std::mutex> lock(fake_nvrtc.mutex);    // NVRTC has its own locks
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that racing threads overlap
  ++fake_nvrtc.compiles;
  fake_nvrtc.options.assign(options, options + num_options);
  fake_nvrtc.last = *program;
  if (fake_nvrtc.fail) return 6;
  for (const char* entry :
       {"attention_kernel", "append_kernel", "merge_kernel", "plan_kernel",
        "quantized_product_kernel", "grouped_product_kernel", "all_reduce_kernel",
        "linear_attention_kernel", "short_convolution_kernel"}) {
    if (program->text.find(entry) != std::string::npos) program->cubin = FakeCubin(entry);
  }
  return 0;
}
FAKE int nvrtcGetCUBINSize(FakeProgram* p, size_t* size) { return *size = p->cubin.size(), 0; }
FAKE int nvrtcGetCUBIN(FakeProgram* p, char* cubin) {
  return std::memcpy(cubin, p->cubin.data(), p->cubin.size()), 0;
}
FAKE int nvrtcGetProgramLogSize(FakeProgram*, size_t* size) { return *size = 12, 0; }
FAKE int nvrtcGetProgramLog(FakeProgram*, char* log) { return std::strcpy(log, "some output"), 0; }

// ---- fake driver: two devices, device d has context d + 1 -------------------------------------

struct Call {
  std::string name;
  uintptr_t context;
  const void* stream;
  unsigned long long address;
  size_t count;
  unsigned grid, block, smem;
  std::vector<char> params;  // of AttentionParams' size
};
struct {
  std::mutex mutex;
  std::vector<Call> calls;  // memsets and launches
  std::atomic<int> module_loads{0}, set_smem{0}, other_calls{0};
  std::atomic<int> live_modules{0}, retained[2] = {};  // contexts, by device
  std::atomic<int> load_error{0}, launch_error{0}, memory_error{0}, memset_error{0},
      live_allocations{0}, smem_limit{232448};
  std::atomic<bool> can_access_peers{true};
  std::atomic<const char*> failing{""};  // a function that returns an error
  std::atomic<size_t> param_bytes{0};
} fake_driver;
thread_local std::vector<uintptr_t> context_stack = {0};

int Fails(const char* function) {
  return std::strcmp(fake_driver.failing, function) == 0 ? 209 : 0;
}

uintptr_t StreamContext(const void* stream) { return reinterpret_cast<uintptr_t>(stream) >> 8; }

void Record(Call call) {
  const std::lock_guard<std::mutex> lock(fake_driver.mutex);
  fake_driver.calls.push_back(std::move(call));
}
std::vector<Call> TakeCalls() {
  const std::lock_guard<std::mutex> lock(fake_driver.mutex);
  return std::exchange(fake_driver.calls, {});
}

FAKE int cuInit(unsigned) { return 0; }
FAKE int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
FAKE int cuGetErrorName(int error, const char** name) {
  return *name = error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_OTHER", 0;
}
FAKE int cuGetErrorString(int, const char** text) { return *text = "its description", 0; }
FAKE int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal >= 0 && ordinal < 2 ? 0 : 101;
}
FAKE int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ++fake_driver.other_calls;
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT       ? 10 + device
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
               ? fake_driver.smem_limit.load()
               : -1;
  return 0;
}
FAKE int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  return ++fake_driver.other_calls, ++fake_driver.retained[device], *context = device + 1, 0;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int device) { return --fake_driver.retained[device], 0; }
FAKE int cuCtxGetCurrent(uintptr_t* context) { return *context = context_stack.back(), 0; }
FAKE int cuCtxPushCurrent_v2(uintptr_t context) {
  if (const int error = Fails("cuCtxPushCurrent")) return error;
  return context_stack.push_back(context), 0;
}
FAKE int cuCtxPopCurrent_v2(uintptr_t* context) {
  return *context = context_stack.back(), context_stack.pop_back(), 0;
}
FAKE int cuStreamGetCtx(const void* stream, uintptr_t* context) {
  return *context = StreamContext(stream), 0;
}
FAKE int cuModuleLoadData(uintptr_t* module, const void*) {
  ++fake_driver.other_calls;
  ++fake_driver.module_loads;
  *module = context_stack.back() << 16;  // a module belongs to the context it was loaded in
  fake_driver.live_modules += fake_driver.load_error == 0;
  return fake_driver.load_error;
}
FAKE int cuModuleUnload(uintptr_t) { return --fake_driver.live_modules, 0; }
FAKE int cuModuleGetFunction(uintptr_t* function, uintptr_t module, const char* name) {
  const std::string entry = name;
  const int op = entry == "attention_kernel" ? 1 : entry == "append_kernel" ? 2 : 3;
  return *function = module + op, Fails("cuModuleGetFunction");
}
FAKE int cuFuncSetAttribute(uintptr_t, int attribute, int value) {
  ++fake_driver.other_calls;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) fake_driver.set_smem = value;
  return Fails("cuFuncSetAttribute");
}
FAKE int cuFuncLoad(uintptr_t) { return ++fake_driver.other_calls, Fails("cuFuncLoad"); }
FAKE int cuMemAlloc_v2(unsigned long long* address, size_t) {
  ++fake_driver.other_calls;
  if (fake_driver.memory_error != 0) return fake_driver.memory_error;
  ++fake_driver.live_allocations;
  return *address = context_stack.back() << 32, 0;
}
FAKE int cuMemFree_v2(unsigned long long) { return --fake_driver.live_allocations, 0; }
FAKE int cuMemHostAlloc(void** address, size_t num_bytes, unsigned flags) {
  ++fake_driver.other_calls;
  return *address = std::malloc(num_bytes), flags == 3 ? 0 : 1;
}
FAKE int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = device != peer && fake_driver.can_access_peers, 0;
}
FAKE int cuCtxEnablePeerAccess(uintptr_t peer, unsigned) {
  Record({"peer " + std::to_string(peer), context_stack.back(), nullptr, 0, 0});
  return 704;  // XLA has enabled it before
}
FAKE int cuStreamCreate(const void** stream, unsigned flags) {
  ++fake_driver.other_calls;
  return *stream = nullptr, flags == 1 ? 0 : 1;
}
FAKE int cuStreamSynchronize(const void*) { return ++fake_driver.other_calls, 0; }
FAKE int cuStreamDestroy_v2(const void*) { return ++fake_driver.other_calls, 0; }
FAKE int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t count,
                         const void* stream) {
  Record({"memset8 " + std::to_string(value),
          context_stack.back(),
          stream,
          address,
          count,
          0,
          0,
          0,
          {}});
  return 0;
}
FAKE int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t count,
                              const void* stream) {
  Record({"copy " + std::to_string(from), context_stack.back(), stream, to, count, 0, 0, 0, {}});
  return 0;
}
FAKE int cuMemsetD32Async(unsigned long long address, unsigned value, size_t count,
                          const void* stream) {
  Record({"memset32 " + std::to_string(value),
          context_stack.back(),
          stream,
          address,
          count,
          0,
          0,
          0,
          {}});
  return fake_driver.memset_error;
}
// Writes only dimensions and tile sizes; a real driver uses its own bits.
FAKE int cuTensorMapEncodeTiled(void* map, int, unsigned rank, void* address,
                                const unsigned long long* dims, const unsigned long long* strides,
                                const unsigned* box, const unsigned*, int, int, int, int) {
  auto* words = static_cast<unsigned long long*>(map);
  words[0] = reinterpret_cast<uintptr_t>(address);
  for (unsigned i = 0; i < rank; ++i) words[1 + i] = dims[i];
  for (unsigned i = 0; i + 1 < rank; ++i) words[5 + i] = strides[i];
  for (unsigned i = 0; i < rank; ++i) words[8 + i] = box[i];
  return 0;
}
int RecordLaunch(const char* how, uintptr_t function, unsigned grid, unsigned block, unsigned smem,
                 const void* stream, void** params) {
  if (function >> 16 != context_stack.back())
    return 201;  // as in CUDA: a function of another context fails
  const char* bytes = static_cast<const char*>(params[0]);
  Record({how + std::to_string(function & 15),
          context_stack.back(),
          stream,
          0,
          0,
          grid,
          block,
          smem,
          {bytes, bytes + fake_driver.param_bytes}});
  return fake_driver.launch_error;
}
FAKE int cuLaunchKernel(uintptr_t function, unsigned grid, unsigned, unsigned, unsigned block,
                        unsigned, unsigned, unsigned smem, const void* stream, void** params,
                        void**) {
  return RecordLaunch("launch ", function, grid, block, smem, stream, params);
}
FAKE int cuLaunchKernelEx(const unsigned* config, uintptr_t function, void** params, void**) {
  // CUlaunchConfig: seven numbers, the stream, the attributes and their number. An attribute is its
  // id and, 8 bytes from there, its value; programmatic stream serialization is 6.
  const void* stream;
  const int* attribute;
  std::memcpy(&stream, config + 8, sizeof(stream));
  std::memcpy(&attribute, config + 10, sizeof(attribute));
  const bool overlaps = config[12] == 1 && attribute[0] == 6 && attribute[2] == 1;
  return RecordLaunch(overlaps ? "overlapping launch " : "another launch ", function, config[0],
                      config[3], config[6], stream, params);
}

// ---- the tests --------------------------------------------------------------------------------

void* Stream(int device) { return reinterpret_cast<void*>(((device + 1) << 8) + 0x10); }

AttentionProblem MakeProblem(int64_t head_dim) {
  AttentionProblem p;
  p.spec.num_qo_heads = 32;
  p.spec.num_kv_heads = 8;
  p.spec.head_dim_qk = p.spec.head_dim_vo = head_dim;
  p.spec.sm_scale = 0.125;
  p.spec.window_right = 0;
  p.spec.page_size = 16;
  p.spec.arch = 90;
  p.config.num_tiles = 2;
  p.config.tile_q[0] = 16;
  p.config.tile_q[1] = 128;
  p.config.tile_kv = 64;
  p.config.num_warps = 3;
  p.config.num_stages = 2;
  p.config.num_ctas = 264;
  p.config.max_merge_groups = 777;
  p.config.max_partial_rows = 5000;
  return p;
}

std::filesystem::path TemporaryFolder() {
  char name[] = "/tmp/jax_attn_jit_test_XXXXXX";
  CHECK(mkdtemp(name) != nullptr);
  return name;
}

void TestMissingLibraries() {
  JitPaths paths;
  paths.nvrtc = {"/nonexistent/libnvrtc.so"};
  paths.driver = {"/nonexistent/libcuda.so"};
  SetJitPaths(paths);
  CHECK_ERROR(PrepareAttention(MakeProblem(128)), "pip install 'jax-attn[cuda13]'");
  CHECK_ERROR(PrepareAttention(MakeProblem(128)), "/nonexistent/libnvrtc.so");
  int arch = 0, num_sms = 0;
  CHECK_ERROR(QueryDevice(0, &arch, &num_sms), "install the driver");
  CHECK_ERROR(PrepareMerge({0, kBF16}), "install the driver");
}

void TestSha256() {
  CHECK(Sha256Hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(Sha256Hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(Sha256Hex(std::string(1000000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // Every padding length: different lengths, different digests.
  std::vector<std::string> seen;
  for (int n = 0; n < 130; ++n) {
    const std::string digest = Sha256Hex(std::string(n, 'x'));
    for (const std::string& other : seen) CHECK(digest != other);
    seen.push_back(digest);
  }
}

void TestCubin() {
  const std::string cubin = FakeCubin("attention_kernel");
  int value = 0;
  CHECK_OK(ReadCubinInt(cubin, "attention_kernel_smem_bytes", &value));
  CHECK(value == kSmemBytes);
  CHECK_OK(ReadCubinInt(cubin, "attention_kernel_num_threads", &value));
  CHECK(value == kNumThreads);
  CHECK_ERROR(ReadCubinInt(cubin, "attention_kernel_smem", &value), "does not define");
  for (size_t size = 0; size < cubin.size(); ++size) {  // never outside the file, never a success
    CHECK(!ReadCubinInt(cubin.substr(0, size), "attention_kernel_num_threads", &value).ok());
  }
  for (size_t i = 0; i < cubin.size(); ++i) {  // any contents: no crash
    for (unsigned char byte : {0x00, 0x7f, 0xff}) {
      std::string broken = cubin;
      broken[i] = static_cast<char>(byte);
      (void)ReadCubinInt(broken, "attention_kernel_num_threads", &value);
    }
  }
}

void TestDiskCache() {
  namespace fs = std::filesystem;
  const fs::path folder = TemporaryFolder();
  const std::string path = (folder / "deeper" / "entry").string();
  const CacheEntry entry{Sha256Hex("the key"), "the cubin", "the source", "-O9", 1.5};
  CacheEntry read;
  read.key = entry.key;
  CHECK(ReadCacheEntry(path, &read) == CacheLookup::kMiss);
  CHECK_OK(WriteCacheEntry(path, entry));
  CHECK(ReadCacheEntry(path, &read) == CacheLookup::kHit && read.cubin == entry.cubin);

  const auto damage = [&](auto&& how) {
    CHECK(ReadCacheEntry(path, &read) == CacheLookup::kHit);
    how();
    CHECK(ReadCacheEntry(path, &read) == CacheLookup::kCorrupt);
    CHECK_OK(WriteCacheEntry(path, entry));
    CHECK(ReadCacheEntry(path, &read) == CacheLookup::kHit && read.cubin == entry.cubin);
  };
  damage([&] { fs::resize_file(path + "/kernel.cubin", 4); });
  damage([&] { fs::resize_file(path + "/kernel.cubin", 0); });
  damage([&] { std::ofstream(path + "/kernel.cubin") << "The cubin"; });
  damage([&] { fs::remove(path + "/kernel.cubin"); });
  damage([&] { fs::remove(path + "/meta"); });
  damage([&] { fs::resize_file(path + "/meta", 20); });
  damage([&] { fs::remove_all(path), fs::create_directory(path); });
  damage([&] { fs::remove_all(path), std::ofstream(path) << "a file in its place"; });
  damage([&] { fs::remove_all(path), fs::create_symlink("/nonexistent", path); });
  damage([&] { fs::rename(path, path + "2"), fs::create_symlink(path + "2", path); });
  const auto link = [&](const std::string& file) {
    fs::rename(path + file, path + "2" + file), fs::create_symlink(path + "2" + file, path + file);
  };
  damage([&] { link("/meta"); });
  damage([&] { link("/kernel.cubin"); });
  damage([&] { fs::remove(path + "/meta"), mkfifo((path + "/meta").c_str(), 0600); });
  fs::remove_all(path + "2");
  // Files that other users may write.
  damage([&] { CHECK(chmod((path + "/meta").c_str(), 0664) == 0); });
  damage([&] { CHECK(chmod((path + "/kernel.cubin").c_str(), 0646) == 0); });
  damage([&] { CHECK(chmod(path.c_str(), 0777) == 0); });
  if (geteuid() == 0) {
    for (const char* file : {"", "/meta", "/kernel.cubin"}) {
      damage([&] { CHECK(chown((path + file).c_str(), 12345, 0) == 0); });
    }
  } else {
    std::printf("not tested, only root can: files of another user\n");
  }

  // Many writers and readers at once, one of them damaging: a reader sees a whole entry or none.
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        CacheEntry seen;
        seen.key = entry.key;
        if (t == 0) fs::remove(path + "/meta");
        CHECK_OK(WriteCacheEntry(path, entry));
        if (ReadCacheEntry(path, &seen) == CacheLookup::kHit) CHECK(seen.cubin == entry.cubin);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_OK(WriteCacheEntry(path, entry));
  CHECK(ReadCacheEntry(path, &read) == CacheLookup::kHit);
  size_t num_left = 0;
  for (const auto& file : fs::directory_iterator(folder / "deeper")) num_left += file.exists();
  CHECK(num_left == 1);  // no temporary folders stay

  CHECK_ERROR(WriteCacheEntry("/proc/nowhere/entry", entry), "cannot create /proc/nowhere");
  CHECK_ERROR(WriteCacheEntry("~/.cache/jax_attn/entry", entry), "is no absolute path");
  fs::remove_all(folder);
}

// An entry belongs to its key, whatever its name is.
void TestCacheBindsKeys() {
  namespace fs = std::filesystem;
  const fs::path folder = TemporaryFolder();
  const std::string one = folder / "one", other = folder / "other";
  const CacheEntry entry{Sha256Hex("one"), "the cubin", "the source", "-O9", 1.5};
  CacheEntry wanted{Sha256Hex("other"), "another cubin", "", "", 2.5}, read;
  CHECK_OK(WriteCacheEntry(one, entry));
  fs::copy(one, other, fs::copy_options::recursive);
  read.key = wanted.key;
  CHECK(ReadCacheEntry(other, &read) == CacheLookup::kMiss);
  CHECK_OK(WriteCacheEntry(other, wanted));
  CHECK(ReadCacheEntry(other, &read) == CacheLookup::kHit && read.cubin == "another cubin");
  CHECK(ReadCacheEntry(one, &read) == CacheLookup::kMiss);
  read.key = entry.key;
  CHECK(ReadCacheEntry(one, &read) == CacheLookup::kHit && read.cubin == "the cubin");
  fs::remove_all(folder);
}

// Folders that other users may write are not used as a cache.
void TestCacheFolders() {
  namespace fs = std::filesystem;
  const fs::path home = TemporaryFolder(), above = home / "above", cache = above / "cache";
  const CacheEntry entry{Sha256Hex("the key"), "the cubin", "the source", "-O9", 1.5};
  const mode_t umask_before = umask(0);
  CHECK_OK(WriteCacheEntry(cache / "entry", entry));
  umask(umask_before);
  for (const fs::path& made : {above, cache, cache / "entry"}) {  // readable for all
    CHECK((fs::status(made).permissions() & fs::perms::all) == fs::perms(0755));
  }
  const auto set = [](const fs::path& folder, mode_t mode) {
    CHECK(chmod(folder.c_str(), mode) == 0);
  };
  const auto is_hit = [&] {
    CacheEntry read;
    read.key = entry.key;
    return ReadCacheEntry(cache / "entry", &read) == CacheLookup::kHit;
  };
  const auto is_cache = [&] {
    const Status status = WriteCacheEntry(cache / "another", entry);
    CHECK(status.ok() == is_hit());
    if (!status.ok())
      CHECK(status.message.find("can be written by other users") != std::string::npos);
    return status.ok();
  };
  set(home, 0755);
  for (const mode_t open : {0775, 0757, 0777}) {
    for (const fs::path& folder : {cache, above, home}) {
      set(folder, open);
      CHECK(!is_cache());
      set(folder, open | S_ISVTX);
      CHECK(is_cache() == (folder != cache));
      set(folder, 0755);
      CHECK(is_cache());
    }
  }
  set(cache, 0777);
  CHECK_ERROR(WriteCacheEntry(cache / "another", entry),
              cache.string() + " can be written by other users (its mode is 777)");
  set(home, 0700);  // which no other user can enter
  CHECK(is_cache());
  set(home, 0711);
  CHECK(!is_cache());
  set(cache, 0755);

  fs::create_directory_symlink(cache, home / "link");  // to a folder that is one
  CHECK_OK(WriteCacheEntry(home / "link" / "entry", entry));
  set(above, 0777);
  CHECK_ERROR(WriteCacheEntry(home / "link" / "entry", entry), above.string() + " can be written");
  set(above, 0755);
  if (geteuid() == 0) {
    for (const fs::path& folder : {cache, above, home}) {
      CHECK(chown(folder.c_str(), 12345, 0) == 0);
      CHECK(!is_hit());
      CHECK_ERROR(WriteCacheEntry(cache / "entry", entry),
                  folder.string() + " belongs to user 12345, neither to root nor to user 0");
      CHECK(chown(folder.c_str(), 0, 0) == 0);
      CHECK(is_hit());
    }
  } else {
    std::printf("not tested, only root can: folders of another user\n");
  }
  CHECK_ERROR(WriteCacheEntry(cache / "entry" / "meta" / "entry", entry), "meta is not a folder");
  CHECK_ERROR(WriteCacheEntry(cache / "entry" / "meta" / "x" / "entry", entry), "cannot create");
  fs::remove_all(home);
}

// A full disk, and leftovers of a killed writer.
void TestCacheLeftovers() {
  namespace fs = std::filesystem;
  const fs::path cache = TemporaryFolder();
  const CacheEntry entry{Sha256Hex("the key"), "the cubin", "the source", "-O9", 1.5};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit small = {5, before.rlim_max};
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const Status status = WriteCacheEntry(cache / "entry", entry);
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, old_handler);
  CHECK_ERROR(status, "cannot write to " + cache.string());
  CHECK(fs::is_empty(cache));

  const auto leave = [&](const char* name, bool is_old) {
    fs::create_directory(cache / name);
    std::ofstream(cache / name / "kernel.cubin") << "half of";
    const auto now = fs::file_time_type::clock::now();
    if (is_old) fs::last_write_time(cache / name, now - std::chrono::hours(2));
  };
  leave(".tmp-old", true);
  leave(".tmp-young", false);
  leave(".tmp-locked", true);
  leave(".trash-old", true);
  leave("old", true);  // not a temporary folder: an entry
  const int living = open((cache / ".tmp-locked").c_str(), O_RDONLY | O_DIRECTORY);
  CHECK(living >= 0 && flock(living, LOCK_EX) == 0);
  CHECK_OK(WriteCacheEntry(cache / "entry", entry));
  for (const char* name : {".tmp-young", ".tmp-locked", "old", "entry"}) {
    CHECK(fs::exists(cache / name));
  }
  for (const char* name : {".tmp-old", ".trash-old"}) CHECK(!fs::exists(cache / name));
  close(living);
  CHECK_OK(WriteCacheEntry(cache / "entry2", entry));
  CHECK(!fs::exists(cache / ".tmp-locked"));
  fs::remove_all(cache);
}

// A forked child compiles, even if threads of its parent were compiling.
void TestFork() {
#ifdef __SANITIZE_ADDRESS__
  std::printf(
      "not tested: fork, for which that sanitizer's allocator leaves its locks as they are\n");
  return;
#endif
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t dim = 8; !stop; dim += 8) {
        CHECK_OK(PrepareAttention(MakeProblem(1000 * t + dim)));
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(60);  // a deadlock ends in a signal
      KernelInfo info;
      if (!PrepareAttention(MakeProblem(100000 + 8 * i), &info).ok()) _exit(1);
      if (info.origin != KernelOrigin::kCompiled) _exit(2);
      if (!PrepareAttention(MakeProblem(8), &info).ok()) _exit(3);
      if (info.origin != KernelOrigin::kDisk) _exit(4);  // nothing inherited from the parent
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

void TestPrepare(const std::string& cache_dir) {
  AttentionProblem problem = MakeProblem(128);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) threads.emplace_back([&] { CHECK_OK(PrepareAttention(problem)); });
  for (std::thread& thread : threads) thread.join();
  CHECK(fake_nvrtc.compiles == 1);
  CHECK(GetJitStats().compiled == 1 && GetJitStats().memory_hits == 7);
  CHECK((fake_nvrtc.options == std::vector<std::string>{"--gpu-architecture=sm_90a", "-std=c++17",
                                                        "--device-as-default-execution-space"}));
  CHECK(fake_nvrtc.last.include_names.at(0) == "params.h");
  CHECK(fake_nvrtc.last.text.find("kHeadDimQk = 128;") != std::string::npos);
  CHECK(fake_nvrtc.last.text == AttentionKernelSource(problem).text);

  KernelInfo info;
  CHECK_OK(PrepareAttention(problem, &info));
  CHECK(info.origin == KernelOrigin::kMemory && info.smem_bytes == kSmemBytes);
  CHECK(info.num_threads == kNumThreads && info.cache_path == cache_dir + "/" + info.name);
  CHECK(std::filesystem::exists(info.cache_path + "/kernel.cu"));

  // Capacities, head counts, scales and schedules are data: they give the same kernel.
  problem.spec.num_qo_heads *= 2, problem.spec.num_kv_heads *= 2;
  problem.spec.max_batch = 99, problem.spec.max_kv_pages = 99, problem.spec.max_qo_tokens = 99;
  problem.spec.sm_scale = 0.5, problem.spec.schedule = kNoSplit, problem.spec.num_processors = 7;
  problem.config.num_ctas = 3, problem.config.max_items = 99, problem.config.max_partial_rows = 0;
  problem.config.kv_cost[1] = 99, problem.config.item_cost = 99, problem.config.min_chunk = 99;
  CHECK_OK(PrepareAttention(problem));
  CHECK(fake_nvrtc.compiles == 1);

  // Every other change gives another kernel, with another name and another source.
  const KernelSource base = AttentionKernelSource(problem);
  using Change = void (*)(AttentionProblem*);
  const Change changes[] = {
      [](AttentionProblem* p) { p->spec.arch = 80; },
      [](AttentionProblem* p) { p->spec.dtype = kF16; },
      [](AttentionProblem* p) { p->spec.head_dim_qk = 192; },
      [](AttentionProblem* p) { p->spec.head_dim_vo = 64; },
      [](AttentionProblem* p) { p->spec.num_kv_heads /= 2; },
      [](AttentionProblem* p) { p->spec.window_left = 100; },
      [](AttentionProblem* p) { p->spec.window_right = -1; },
      [](AttentionProblem* p) { p->spec.logits_soft_cap = 30; },
      [](AttentionProblem* p) { p->config.num_tiles = 1; },
      [](AttentionProblem* p) { p->config.tile_q[1] = 64; },
      [](AttentionProblem* p) { p->config.tile_kv = 32; },
      [](AttentionProblem* p) { p->config.num_warps = 8; },
      [](AttentionProblem* p) { p->config.num_stages = 3; },
      [](AttentionProblem* p) { p->spec.sm_scale = -0.125; },
      [](AttentionProblem* p) { p->config.main_loop = kHopper; },
      [](AttentionProblem* p) { p->program = Alibi(); },
      [](AttentionProblem* p) { p->program = Documents(); },
  };
  for (const Change change : changes) {
    AttentionProblem other = problem;
    change(&other);
    const KernelSource source = AttentionKernelSource(other);
    CHECK(source.name != base.name);
    CHECK(source.text != base.text || source.options != base.options);
    CHECK(MakeKey(MakeAttentionKernel(other)) != MakeKey(MakeAttentionKernel(problem)));
  }
  AttentionProblem alibi = problem, cap = problem;
  alibi.program = Alibi(), cap.program = Cap();
  const KernelSource source = AttentionKernelSource(alibi);
  CHECK(source.name != AttentionKernelSource(cap).name);
  CHECK(source.text != AttentionKernelSource(cap).text);
  CHECK(MakeKey(MakeAttentionKernel(alibi)) != MakeKey(MakeAttentionKernel(cap)));
  CHECK(source.text.find("using Variant = variant::Given;") != std::string::npos);
  CHECK(base.text.find("using Variant = NoVariant;") != std::string::npos);
  // A slope is loaded once per row; so is the f32 distance of its first key.
  CHECK(source.text.find("row.distance") < source.text.find("struct Key"));
  CHECK(source.text.find("Load<") < source.text.find("struct Key"));
  CHECK(source.text.find("Load<", source.text.find("struct Key")) == std::string::npos);
  CHECK(ArchName(80) == "sm_80" && ArchName(89) == "sm_89" && ArchName(120) == "sm_120a");
}

void TestCacheKey() {
  const KernelSource source = MergeKernelSource({90, kBF16});
  const auto key_of = [](const KernelSource& of) {
    KernelIdentity identity;
    CHECK_OK(Identify(of, &identity));
    return CacheKey(identity);
  };
  const std::string key = key_of(source);
  CHECK(key == key_of(source));
  KernelSource changed = source;
  changed.text += " ";
  CHECK(key != key_of(changed));
  changed = source;
  changed.options.push_back("-lineinfo");
  CHECK(key != key_of(changed));
  changed = source;  // the same bytes in different fields
  changed.options = {source.options[0] + source.options[1], source.options[2]};
  CHECK(key != key_of(changed));
  const Nvrtc* nvrtc = nullptr;
  CHECK_OK(GetNvrtc(&nvrtc));
  CHECK(nvrtc->version == "13.5" && !nvrtc->build.empty());
  const auto key_with = [&](const std::string& of) { return CacheKey(IdentityFor(source, of)); };
  CHECK(key_with("13.5 " + nvrtc->build) == key);
  CHECK(key_with("13.5 " + nvrtc->build + "0") != key);  // another build of NVRTC
  CHECK(key_with("13.6 " + nvrtc->build) != key);
  CHECK(key != key_of(MergeKernelSource({80, kBF16})));  // the architecture is an option
}

// ---- the log of compiles ----------------------------------------------------------------------

// Returns the stderr output of `function`.
template <typename Function>
std::string CaptureStderr(const Function& function) {
  char name[] = "/tmp/jax_attn_jit_test_XXXXXX";
  const int file = mkstemp(name), saved = dup(STDERR_FILENO);
  CHECK(file >= 0 && saved >= 0 && dup2(file, STDERR_FILENO) >= 0);
  function();
  CHECK(dup2(saved, STDERR_FILENO) >= 0);
  close(file), close(saved);
  std::ifstream in(name);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  std::filesystem::remove(name);
  return text;
}

// Replaces the number before " s (" or " ms (" by N.
std::string WithoutTime(std::string line) {
  size_t end = line.find(" ms (");
  if (end == std::string::npos) end = line.find(" s (");
  CHECK(end != std::string::npos);
  const size_t begin = line.rfind(' ', end - 1) + 1;
  CHECK(line.find_first_not_of("0123456789.", begin) == end);
  return line.replace(begin, end - begin, "N");
}

void TestNearestKernel() {
  const auto identity = [](const KernelSource& source) { return IdentityFor(source, "13.5 abc"); };
  const KernelIdentity merge = identity(MergeKernelSource({90, kBF16}));
  CHECK(DescribeNearest(merge, {}) == "no other merge kernel is known");
  const AttentionProblem problem = MakeProblem(128);
  const KernelIdentity attention = identity(AttentionKernelSource(problem));
  CHECK(DescribeNearest(merge, {attention}) == "no other merge kernel is known");

  AttentionProblem near = problem, far = problem, farther = problem;
  near.spec.window_left = 100, near.config.tile_q[1] = 64;
  far.spec.dtype = kF16, far.spec.kv_format = kE4m3Format, far.spec.page_size = 0;
  farther.spec.arch = 80, farther.program = Alibi();
  farther.config = {kHopper, 3, {1, 2, 3}, 4, 5, 6};
  const KernelIdentity others[] = {identity(AttentionKernelSource(farther)),
                                   identity(AttentionKernelSource(near)),
                                   identity(AttentionKernelSource(far)), merge};
  CHECK(DescribeNearest(attention, {others[0], others[1], others[2], others[3]}) ==
        "nearest key differs in: has_window_left true -> false, tile_q1 64 -> 128");
  CHECK(DescribeNearest(attention, {others[0], others[2]}) ==
        "nearest key differs in: dtype f16 -> bf16, kv_format e4m3 -> plain, page_size 0 -> 16");
  const std::string many = DescribeNearest(attention, {others[0]});
  CHECK(many.find("differs in: arch 80 -> 90, main_loop cuda/sm90 -> cuda/sm80, ") !=
        std::string::npos);
  CHECK(many.find(" and 2 more fields") != std::string::npos);

  // Equal fields: only the build differs.
  KernelIdentity sources = attention, nvrtc = attention, build = attention, both = attention;
  sources.sources = "other";
  nvrtc.nvrtc = "13.4 abc";
  build.nvrtc = "13.5 def";
  both.sources = "other", both.nvrtc = "12.9 abc";
  const std::string cached = "the same fields are cached, ";
  CHECK(DescribeNearest(attention, {sources}) == cached + "but the kernel sources changed");
  CHECK(DescribeNearest(attention, {both, nvrtc}) == cached + "but NVRTC changed: 13.4 -> 13.5");
  CHECK(DescribeNearest(attention, {build}) == cached + "but NVRTC changed: another build of 13.5");
  CHECK(DescribeNearest(attention, {both, others[1]}) ==
        cached + "but the kernel sources changed, and NVRTC changed: 12.9 -> 13.5");
  // Another process has just cached it.
  CHECK(DescribeNearest(attention, {attention}) == "no other attention kernel is known");

  const KernelIdentity read =
      ParseIdentity("title 2\noptions -a -b \n\n" + DescribeIdentity(attention) + "field broken\n");
  CHECK(read.op == "attention" && read.sources == attention.sources && read.nvrtc == "13.5 abc");
  CHECK(read.fields.size() == attention.fields.size());
  CHECK(DescribeNearest(read, {attention}) == "no other attention kernel is known");
  KernelIdentity old = attention;  // of a version that has another field
  old.fields[2] = {"left_out", "7"};
  CHECK(DescribeNearest(attention, {old}) ==
        "nearest key differs in: q_format absent -> plain, left_out 7 -> absent");
}

void TestCompileLog(const std::string& cache_dir) {
  const auto prepare = [](const MergeKernel& kernel) { CHECK_OK(PrepareMerge(kernel)); };
  // Runs in a child that knows only the kernels in the disk cache.
  const auto prepare_in_child = [&](const MergeKernel& kernel) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(60);
      prepare(kernel);
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  };
  const MergeKernel first = {100, kBF16}, second = {100, kF16};
  CHECK(CaptureStderr([&] { prepare(first); }) == "");  // off by default
  SetCompileLog(true);
  CHECK(CaptureStderr([&] { prepare(first); }) == "");  // in memory
  KernelInfo info;
  const std::string compiled = CaptureStderr([&] { CHECK_OK(PrepareMerge(second, &info)); });
  CHECK(WithoutTime(compiled) == "jax_attn: compiled " + info.name +
                                     " in N s (disk cache: miss; nearest key differs in: dtype "
                                     "bf16 -> f16)\n");
  const std::string loaded = CaptureStderr([&] { prepare_in_child(second); });
  CHECK(WithoutTime(loaded) == "jax_attn: loaded " + info.name + " in N ms (disk cache: hit)\n");

  // Changes the entry as if it came from other sources or another NVRTC.
  const std::string folder = cache_dir + "/" + info.name, meta_file = folder + "/meta";
  const auto after_change = [&](const std::string& line_begin, const std::string& value) {
    std::ifstream in(meta_file);
    std::string meta((std::istreambuf_iterator<char>(in)), {});
    for (const std::string& begin : {std::string("key_sha256 "), line_begin}) {
      const size_t at = meta.find("\n" + begin) + 1 + begin.size();
      meta.replace(at, value.size(), value);
    }
    std::ofstream(meta_file) << meta;
    return WithoutTime(CaptureStderr([&] { prepare_in_child(second); }));
  };
  const std::string begin = "jax_attn: compiled " + info.name + " in N s (disk cache: miss; ";
  CHECK(after_change("sources_sha256 ", "0123") ==
        begin + "the same fields are cached, but the kernel sources changed)\n");
  CHECK(after_change("nvrtc ", "12.0") ==
        begin + "the same fields are cached, but NVRTC changed: 12.0 -> 13.5)\n");
  std::filesystem::resize_file(folder + "/kernel.cubin", 4);
  CHECK(WithoutTime(CaptureStderr([&] { prepare_in_child(second); })) ==
        "jax_attn: compiled " + info.name + " in N s (disk cache: damaged entry, replaced)\n");

  JitPaths paths;
  SetJitPaths(paths);  // without a disk cache, the kernels of this process are known
  const std::string in_memory = CaptureStderr([&] { prepare({100, kF32}); });
  CHECK(in_memory.find(" s (disk cache: none; nearest key differs in: dtype bf16 -> f32)\n") !=
        std::string::npos);
  paths.nvrtc = {""};
  paths.driver = {""};
  paths.cache_dir = cache_dir;
  SetJitPaths(paths);

  // Lines of several threads stay whole.
  constexpr int kThreads = 8, kLines = 500;
  const std::string lines = CaptureStderr([] {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([] {
        for (int i = 0; i < kLines; ++i) LogCompiled("a kernel", 1500, "a reason");
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  std::istringstream in(lines);
  int num_lines = 0;
  for (std::string line; std::getline(in, line); ++num_lines) {
    CHECK(line == "jax_attn: compiled a kernel in 1.50 s (a reason)");
  }
  CHECK(num_lines == kThreads * kLines);
  SetCompileLog(false);
}

void TestPrepareFailures() {
  fake_nvrtc.fail = true;
  const AttentionProblem problem = MakeProblem(96);
  CHECK_ERROR(PrepareAttention(problem), "did not compile attention-sm_90a-bf16-d96");
  CHECK_ERROR(PrepareAttention(problem), "some output");  // NVRTC's log
  fake_nvrtc.fail = false;
  CHECK_OK(PrepareAttention(problem));  // a failure is not remembered
  AttentionProblem unknown = problem;
  unknown.spec.arch = 120;
  CHECK_ERROR(PrepareAttention(unknown), "NVRTC 13.5 cannot compile for sm_120");
  CHECK(fake_nvrtc.live_programs == 0);
}

void TestAttentionLaunch() {
  constexpr int64_t kPool = CounterPool::kNumCounters;
  AttentionProblem problem = MakeProblem(128);
  const int64_t num_counters =
      kPool / 4 - 200;  // and queue counters for 264 CTAs: half of the pool in total
  problem.config.max_merge_groups = num_counters;
  AttentionParams params = {};
  std::vector<i32> workspaces(3);
  params.merge_counters = workspaces.data();
  params.max_qo_tokens = 4711;
  fake_driver.param_bytes = sizeof(AttentionParams);

  CHECK_ERROR(LaunchAttention(problem, params, Stream(1), 1), "not loaded on device 1");
  CHECK_OK(LoadAttention(problem, 1));
  CHECK(fake_driver.set_smem == kSmemBytes && context_stack.size() == 1);
  CHECK_ERROR(LaunchAttention(problem, params, Stream(0), 0), "not loaded on device 0");
  CHECK_OK(LoadAttention(problem, 0));
  CHECK_OK(LoadAttention(problem, 0));
  CHECK(fake_driver.module_loads == 2);
  CHECK_ERROR(LoadAttention(problem, 2), "device 2: cuDeviceGet");
  const std::vector<Call> zeroed = TakeCalls();  // the counters of each device
  CHECK(zeroed.size() == 2 && zeroed[0].context == 2 && zeroed[1].context == 1);
  for (const Call& call : zeroed) CHECK(call.name == "memset32 0" && call.count == kPool);

  const int64_t before = GetJitStats().attention_launches;
  const int other_calls = fake_driver.other_calls;
  // Each workspace and device has its own counters, always the same, until the pool is used up.
  for (int device : {0, 1, 0}) {
    for (int workspace : {0, 1, 0, 2}) {
      params.merge_counters = workspaces.data() + workspace;
      CHECK_OK(LaunchAttention(problem, params, Stream(device), device));
      const std::vector<Call> calls = TakeCalls();
      for (const Call& call : calls) {
        CHECK(call.stream == Stream(device) && call.context == static_cast<uintptr_t>(device) + 1);
      }
      const Call& launch = calls.back();
      CHECK(launch.name == "launch 1" && launch.grid == 264);
      CHECK(launch.block == kNumThreads && launch.smem == kSmemBytes);
      AttentionParams got;
      std::memcpy(&got, launch.params.data(), sizeof(got));
      const auto counters =
          reinterpret_cast<uintptr_t>(std::exchange(got.merge_counters, params.merge_counters));
      const auto turns = reinterpret_cast<uintptr_t>(std::exchange(got.counter_parity, nullptr));
      CHECK(std::memcmp(&got, &params, sizeof(params)) == 0);
      if (workspace == 2) {
        CHECK((calls.size() == 2 && counters == reinterpret_cast<uintptr_t>(&workspaces[2])));
        CHECK((calls[0].name == "memset32 0" && calls[0].address == counters));
        CHECK(calls[0].count == num_counters && turns == 0);
      } else {
        const int64_t words = (2 * num_counters + 264 + 31) / 32 * 32;
        CHECK(calls.size() == 1);
        CHECK(counters == (uintptr_t{device + 1u} << 32) + workspace * words * sizeof(i32));
        CHECK(turns == counters + 2 * num_counters * sizeof(i32));
      }
    }
  }
  CHECK(fake_driver.other_calls == other_calls);  // a captured execute may only memset and launch
  const CudaDriver* driver = nullptr;
  CHECK_OK(GetCudaDriver(&driver));
  fake_driver.memory_error = 2;  // then there is no pool, which is not an error
  CHECK(CounterPool::Make(*driver) == nullptr);
  fake_driver.memory_error = 0;
  const int live_allocations = fake_driver.live_allocations;
  fake_driver.memset_error = 1;
  CHECK(CounterPool::Make(*driver) == nullptr && TakeCalls().size() == 1);
  CHECK(fake_driver.live_allocations == live_allocations);
  fake_driver.memset_error = 0;
  CHECK(GetJitStats().attention_launches == before + 12);
  CHECK(context_stack.size() == 1);

  problem.config.max_partial_rows = 0;  // a schedule that never splits has no counters
  CHECK_OK(LaunchAttention(problem, params, Stream(0), 0));
  CHECK(TakeCalls().size() == 1);

  fake_driver.launch_error = 701;
  CHECK_ERROR(LaunchAttention(problem, params, Stream(0), 0),
              "attention: cuLaunchKernel: CUDA_ERROR_OTHER (its description)");
  fake_driver.launch_error = 0;
  TakeCalls();
}

// The tensor maps of k and v, if TMA tiles divide the pages, and of o.
void TestTensorMaps() {
  AttentionProblem problem = MakeProblem(128);
  problem.config.main_loop = kHopper;
  problem.config.tile_kv = 128;
  problem.config.num_ctas = 132;
  fake_driver.param_bytes = sizeof(AttentionParams);
  auto launch = [&](int64_t page_size, AttentionParams params) {
    problem.spec.page_size = page_size;
    CHECK_OK(LoadAttention(problem, 0));
    CHECK_OK(LaunchAttention(problem, params, Stream(0), 0));
    AttentionParams got;
    std::memcpy(&got, TakeCalls().back().params.data(), sizeof(got));
    return got;
  };
  AttentionParams params = {};
  char k[1], v[1], o[1];
  params.k = k;
  params.v = v;
  params.o = o;
  params.max_qo_tokens = 77;
  params.num_layers = 3;
  params.num_pages = 100;
  const AttentionParams paged = launch(16, params);
  CHECK(paged.has_tensor_maps == 1);
  const unsigned long long dims[] = {128, 8, 1600, 3}, strides[] = {256, 2048, 2048 * 1600};
  const unsigned long long box[] = {64, 1, 16, 1};
  for (const TensorMap* map : {&paged.k_map, &paged.v_map}) {
    CHECK(map->words[0] == reinterpret_cast<uintptr_t>(map == &paged.k_map ? k : v));
    CHECK(std::memcmp(map->words + 1, dims, sizeof(dims)) == 0);
    CHECK(std::memcmp(map->words + 5, strides, sizeof(strides)) == 0);
    CHECK(std::memcmp(map->words + 8, box, sizeof(box)) == 0);
  }
  const unsigned long long o_dims[] = {128, 32, 77, 1}, o_box[] = {64, 4, 4, 1};
  CHECK(paged.has_o_map == 1);
  CHECK(paged.o_map.words[0] == reinterpret_cast<uintptr_t>(o));
  CHECK(std::memcmp(paged.o_map.words + 1, o_dims, sizeof(o_dims)) == 0);
  CHECK(std::memcmp(paged.o_map.words + 8, o_box, sizeof(o_box)) == 0);
  CHECK(launch(64, params).k_map.words[10] == 32);  // rows of a step that one warp copies
  CHECK(launch(48, params).has_tensor_maps == 0);
  CHECK(launch(1, params).has_tensor_maps == 0 && launch(1, params).has_o_map == 1);
  params.num_pages = int64_t{1} << 27;  // rows of a layer beyond 32-bit coordinates
  CHECK(launch(16, params).has_tensor_maps == 0);
  problem.spec.max_kv_tokens = 5000;
  params.num_layers = params.num_pages = 1;
  const AttentionParams ragged = launch(0, params);
  CHECK(ragged.has_tensor_maps == 1 && ragged.k_map.words[3] == 5000);
  problem.spec.num_qo_heads = 3 * problem.spec.num_kv_heads;  // 16 rows are not whole tokens
  CHECK(launch(0, params).has_o_map == 0);
}

void TestLoadFailures() {
  fake_driver.load_error = 209;
  CHECK_ERROR(LoadAttention(MakeProblem(64), 0),
              "cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (its description); the driver "
              "supports CUDA 13.0");
  fake_driver.load_error = 0;
  fake_driver.smem_limit = 101000;
  CHECK_ERROR(LoadAttention(MakeProblem(64), 0), "the device has 101000");
  fake_driver.smem_limit = 232448;

  // A failure releases everything acquired before it.
  const int modules = fake_driver.live_modules;
  CHECK(fake_driver.retained[0] == 1 && fake_driver.retained[1] == 1);  // of the tests above
  for (const char* function :
       {"cuCtxPushCurrent", "cuModuleGetFunction", "cuFuncLoad", "cuFuncSetAttribute"}) {
    fake_driver.failing = function;
    CHECK_ERROR(LoadAttention(MakeProblem(64), 0), std::string(function) + ": CUDA_ERROR");
    CHECK(fake_driver.live_modules == modules && fake_driver.retained[0] == 1);
    CHECK(context_stack.size() == 1);
  }
  fake_driver.failing = "";
  CHECK_OK(LoadAttention(MakeProblem(64), 0));
  CHECK(fake_driver.live_modules == modules + 1 && fake_driver.retained[0] == 1);
  CHECK(context_stack.size() == 1);
}

void TestAppendAndMerge() {
  AppendParams append = {};
  append.max_qo_tokens = 5;
  fake_driver.param_bytes = sizeof(append);
  CHECK_OK(PrepareAppend({0}));  // 0: the capability of device 0
  CHECK_OK(LoadAppend({90}, 1));
  CHECK_OK(LaunchAppend({0}, append, Stream(1), 1));
  append.max_qo_tokens = 1 << 20;
  CHECK_OK(LaunchAppend({90}, append, Stream(1), 1));
  append.max_qo_tokens = 0;
  CHECK_OK(LaunchAppend({90}, append, Stream(1), 1));
  std::vector<Call> calls = TakeCalls();
  CHECK(calls.size() == 2 && calls[0].name == "launch 2" && calls[0].block == kNumThreads);
  CHECK(calls[0].grid == 4);  // 10 rows, 3 warps per CTA
  CHECK(calls[1].grid == 8 * 11);

  MergeParams merge = {};
  merge.num_rows = int64_t{1} << 40;  // 64-bit arithmetic
  merge.head_dim_vo = 128;
  fake_driver.param_bytes = sizeof(merge);
  CHECK_OK(PrepareMerge({90, kF32}));
  CHECK_OK(LoadMerge({90, kF32}, 0));
  CHECK_OK(LaunchMerge({90, kF32}, merge, Stream(0), 0));
  CHECK_ERROR(LaunchMerge({90, kBF16}, merge, Stream(0), 0), "merge_states: its kernel is not");
  merge.num_rows = 7;
  for (const int32_t num_states : {2, 3}) {
    merge.num_states = num_states;
    CHECK_OK(LaunchMerge({90, kF32}, merge, Stream(0), 0));
  }
  calls = TakeCalls();
  CHECK(calls.size() == 3 && calls[0].name == "launch 3" && calls[0].grid == INT32_MAX);
  // A row takes 32 threads: 3 rows of 96 at a time, or 6 if each thread has two rows.
  CHECK(calls[1].grid == 2 && calls[2].grid == 3);

  CHECK_OK(FillBytes(reinterpret_cast<void*>(0x1234), 0xff, 99, Stream(1)));
  CHECK_OK(FillBytes(nullptr, 0xff, 0, Stream(1)));
  calls = TakeCalls();
  CHECK(calls.size() == 1 && calls[0].name == "memset8 255" && calls[0].context == 2);
  CHECK(calls[0].address == 0x1234 && calls[0].count == 99);

  auto* memory = reinterpret_cast<void*>(0x1234);
  CHECK_OK(CopyBytes(memory, reinterpret_cast<void*>(0x99), 7, Stream(1)));
  CHECK_OK(CopyBytes(memory, memory, 7, Stream(1)));
  CHECK_OK(CopyBytes(nullptr, memory, 0, Stream(1)));
  calls = TakeCalls();
  CHECK(calls.size() == 1 && calls[0].name == "copy 153" && calls[0].context == 2);
  CHECK(calls[0].address == 0x1234 && calls[0].count == 7);
  const JitStats stats = GetJitStats();
  CHECK(stats.append_launches == 3 && stats.merge_launches == 4);
}

void TestAllReduce() {
  TakeCalls();
  fake_driver.can_access_peers = false;
  DeviceGroup* group = nullptr;
  CHECK(!CanAccessPeers({0, 1}));
  CHECK_ERROR(DeviceGroup::Get({0, 1}, &group), "all_reduce: mesh: expected GPUs that can map");
  fake_driver.can_access_peers = true;
  CHECK(CanAccessPeers({0, 1}) && !CanAccessPeers({0, 7}));
  TakeCalls();
  CHECK_OK(DeviceGroup::Get({1, 0}, &group));
  std::vector<Call> calls = TakeCalls();
  CHECK(calls.size() == 4 && calls[0].name == "memset32 0" && calls[0].context == 2);
  CHECK(static_cast<i64>(calls[0].count) * 4 == AllReduceMemory::HeadBytes(2));
  CHECK(calls[2].name == "peer 1" && calls[2].context == 2 && calls[3].name == "peer 2");
  DeviceGroup* same = nullptr;
  CHECK_OK(DeviceGroup::Get({1, 0}, &same));
  CHECK(same == group && TakeCalls().empty());

  AllReduceParams params = {};
  group->Fill(1, &params);
  CHECK(params.rank == 1 && params.memory[0].begin != params.memory[1].begin);
  for (int i = 0; i < 2; ++i) CHECK_OK(group->BeginRun(1, 42, Stream(0)));  // written once a run
  calls = TakeCalls();
  CHECK(calls.size() == 1 && calls[0].name == "memset32 42" && calls[0].stream == Stream(0));
  params.num_rows = 3;
  fake_driver.param_bytes = sizeof(params);
  const AllReduceKernel kernel = {90, kBF16, 2, 512, 1, false, true, false};
  CHECK_OK(PrepareAllReduce(kernel));
  CHECK_OK(LoadAllReduce(kernel, 0));
  CHECK_OK(LaunchAllReduce(kernel, params, 3, Stream(0), 0));
  calls = TakeCalls();
  CHECK(calls.size() == 1 && calls[0].grid == 3);

  CHECK_OK(AnyGroupFault());
  params.fault->code_and_peer = kAllReduceLate;  // device 0 waited for rank 0, which is device 1
  CHECK_ERROR(group->BeginRun(0, 43, Stream(1)),
              "all_reduce: device 0 waited too long for device 1, which is late or gone");
  CHECK_ERROR(AnyGroupFault(), "late or gone");
  params.fault->code_and_peer = kAllReduceOther;
  CHECK_ERROR(AnyGroupFault(), "device 0 and device 1 in different calls at the same time");
  params.fault->code_and_peer = 0;
  CHECK(TakeCalls().empty());
}

void TestQuantizedProduct() {
  QuantizedProductParams product = {};
  product.columns = 1000, product.num_splits = 3;
  fake_driver.param_bytes = sizeof(product);
  const QuantizedProductKernel kernel = {90, kBF16, kInt4Weights, 64, 256, 1};
  CHECK_OK(PrepareQuantizedProduct(kernel));
  CHECK_OK(LoadQuantizedProduct(kernel, 1));
  for (const auto& [rows, grid] : {std::pair<i32, unsigned>{0, 0}, {1, 12}, {64, 12}, {65, 24}}) {
    product.num_rows = rows;
    CHECK_OK(LaunchQuantizedProduct(kernel, product, Stream(1), 1));
    const std::vector<Call> calls = TakeCalls();
    CHECK(calls.size() == (grid > 0) && (grid == 0 || calls[0].grid == grid));
  }
  QuantizedProductKernel other = kernel;
  other.scale_rows = 2;  // another kernel
  CHECK_ERROR(LaunchQuantizedProduct(other, product, Stream(1), 1),
              "quantized_product: its kernel is not loaded on device 1");
  CHECK(GetJitStats().quantized_product_launches == 5);
}

void TestGroupedProduct() {
  GroupedProductParams product = {};
  char x[1], weights[1];
  product.x = x, product.weights = weights;
  product.depth = 72, product.columns = 264, product.num_groups = 5;
  fake_driver.param_bytes = sizeof(product);
  for (const bool transposed : {false, true}) {
    const GroupedProductKernel kernel = {90, kBF16, transposed, 64, 128};
    CHECK_ERROR(LaunchGroupedProduct(kernel, product, Stream(1), 1),
                "grouped_product: its kernel is not loaded on device 1");
    CHECK_OK(PrepareGroupedProduct(kernel));
    CHECK_OK(LoadGroupedProduct(kernel, 1));
    product.num_rows = 0;
    CHECK_OK(LaunchGroupedProduct(kernel, product, Stream(1), 1));
    CHECK(TakeCalls().empty());
    product.num_rows = 100;
    CHECK_OK(LaunchGroupedProduct(kernel, product, Stream(1), 1));
    const std::vector<Call> calls = TakeCalls();
    CHECK(calls.size() == 1 && calls[0].grid == 11);  // multiprocessors; there are up to 21 tiles
    GroupedProductParams got;
    std::memcpy(&got, calls[0].params.data(), sizeof(got));
    const unsigned long long x_dims[] = {72, 1, 100, 1}, x_box[] = {64, 1, 64, 1};
    CHECK(got.x_map.words[0] == reinterpret_cast<uintptr_t>(x));
    CHECK(std::memcmp(got.x_map.words + 1, x_dims, sizeof(x_dims)) == 0);
    CHECK(std::memcmp(got.x_map.words + 8, x_box, sizeof(x_box)) == 0);
    const unsigned long long dims[] = {264, 1, 72, 5}, box[] = {64, 1, 64, 1};
    const unsigned long long other_dims[] = {72, 1, 264, 5}, other_box[] = {64, 1, 128, 1};
    CHECK(got.weights_map.words[0] == reinterpret_cast<uintptr_t>(weights));
    CHECK(std::memcmp(got.weights_map.words + 1, transposed ? other_dims : dims, 32) == 0);
    CHECK(std::memcmp(got.weights_map.words + 8, transposed ? other_box : box, 32) == 0);
  }
}

void TestShortConvolution() {
  ShortConvolutionParams convolution = {};
  convolution.plan.max_chunks = 10;
  fake_driver.param_bytes = sizeof(convolution);
  const ShortConvolutionKernel kernel = {90, kBF16, 4, true};
  CHECK_OK(PrepareShortConvolution(kernel));
  CHECK_OK(LoadShortConvolution(kernel, 1));
  struct Case {
    i32 channels;
    int64_t max_qo_len;
    unsigned grid;
  };
  // A CTA has 96 vectors of 8 channels, or 96 channels; a chunk is one tile of rows, or four; two
  // where 3 CTAs for each of 11 multiprocessors remain.
  for (const auto& [channels, max_qo_len, grid] : {Case{0, 1, 0},
                                                   {768, 1, 10},
                                                   {776, 8, 20},
                                                   {97, 1, 20},
                                                   {768, 4096, 40},
                                                   {1536, 4096, 40},
                                                   {8, 17, 20}}) {
    convolution.num_channels = channels;
    CHECK_OK(LaunchShortConvolution(kernel, convolution, max_qo_len, Stream(1), 1));
    const std::vector<Call> calls = TakeCalls();
    CHECK(calls.size() == (grid > 0) && (grid == 0 || calls[0].grid == grid));
  }
  convolution.num_channels = 1 << 30, convolution.plan.max_chunks = 1 << 20;
  CHECK_ERROR(LaunchShortConvolution(kernel, convolution, 1, Stream(1), 1),
              "short_convolution: plan: expected at most 2^31 - 1 CTAs");
  CHECK(GetJitStats().short_convolution_launches == 8);
}

// The grid of the recurrence: one CTA for each unit of long requests, and those that fit the device
// for a decode.
void TestRecurrenceGrid() {
  LinearAttentionProblem problem;
  problem.kernel = {90, kF32, 128, 128, kHeadDecay, true, true, true};
  problem.num_processors = 132;
  problem.num_qk_heads = 16, problem.num_v_heads = 32;
  problem.max_tokens = 64, problem.max_qo_len = 1, problem.max_chunks = 129;
  CHECK(SelectLinearAttention(problem).main_loop == kRecurrence);
  CHECK(SizeLinearAttention(problem).num_ctas == 4 * 132);  // 128 threads each
  problem.max_chunks = 3;
  CHECK(SizeLinearAttention(problem).num_ctas == 3 * 32 * 2);
  problem.kernel.decay = kChannelDecay;
  problem.kernel.head_dim_v = 256;
  problem.max_tokens = problem.max_qo_len = 4096, problem.max_chunks = 66;
  CHECK(SizeLinearAttention(problem).num_ctas == 66 * 32 * 4);
}

// Long prompts of bf16 are chunks: split if they are longer than a segment.
void TestLinearChunks() {
  LinearAttentionProblem problem;
  problem.kernel = {90, kBF16, 128, 128, kHeadDecay, true, true, false};
  problem.num_processors = 132;
  problem.num_qk_heads = 2, problem.num_v_heads = 8;
  problem.max_tokens = problem.max_qo_len = 65536, problem.max_chunks = 1026;
  CHECK(SelectLinearAttention(problem).main_loop == kHopperChunks);
  CHECK(SizeLinearAttention(problem).segment_chunks == 64);  // 16 segments x 8 heads: 128 CTAs
  const auto num_kernels = [&] { return LinearAttentionKernels(problem).size(); };
  CHECK(SelectLinearAttention(problem).tile_columns == 128);
  CHECK(num_kernels() == 4);
  problem.kernel.arch = 80;
  CHECK(SelectLinearAttention(problem).main_loop == kPortableChunks);

  LinearAttentionParams params = {};
  fake_driver.param_bytes = sizeof(params);
  params.workspace = reinterpret_cast<void*>(0x8000);
  problem.kernel.arch = 90;
  CHECK_OK(PrepareLinearAttention(problem));
  CHECK_OK(LoadLinearAttention(problem, 1));
  CHECK_OK(LaunchLinearAttention(problem, params, Stream(1), 1));
  std::vector<Call> calls = TakeCalls();
  CHECK(calls.size() == 4 && calls[0].name == "launch 3");
  CHECK(calls[0].grid == 1026 * 2 + 1);  // for each chunk a CTA for each q and k head
  for (int i = 1; i < 4; ++i) CHECK(calls[i].grid == 11 && calls[i].name == "overlapping launch 3");
  CHECK(calls[3].stream == Stream(1) && calls[3].block > 0);

  problem.max_qo_len = 4096;  // no longer than a segment
  CHECK(SizeLinearAttention(problem).segment_chunks == 0 && num_kernels() == 2);
  problem.max_tokens = 64, problem.max_qo_len = 64, problem.max_chunks = 2;
  CHECK_OK(PrepareLinearAttention(problem));
  CHECK_OK(LoadLinearAttention(problem, 1));
  CHECK_OK(LaunchLinearAttention(problem, params, Stream(1), 1));
  calls = TakeCalls();
  CHECK(calls.size() == 2 && calls[0].grid == 2 * 8 + 1 && calls[1].grid == 11);  // a CTA a v head

  // Chunks of one token: no cut of a prompt changes bits.
  problem.max_chunks = 66;
  CHECK(SelectLinearAttention(problem).main_loop == kRecurrence && num_kernels() == 1);

  // Few tokens of few heads: narrower tiles fill more of the device.
  problem.max_tokens = problem.max_qo_len = 2048, problem.max_chunks = 34;
  CHECK(SelectLinearAttention(problem).tile_columns == 64);
  CHECK(SizeLinearAttention(problem).segment_chunks == 4);

  const auto is_recurrence = [&] {
    return SelectLinearAttention(problem).main_loop == kRecurrence;
  };
  problem.max_qo_len = 16;
  CHECK(is_recurrence());
  problem.max_qo_len = 64;
  CHECK(!is_recurrence());
  problem.kernel.dtype = kF32;
  CHECK(is_recurrence());
  problem.kernel.dtype = kF16;  // in chunks if the states are bounded
  problem.kernel.delta_rule = problem.kernel.l2_norm = true;
  CHECK(!is_recurrence());
  problem.kernel.l2_norm = false;
  CHECK(is_recurrence());
  problem.kernel.l2_norm = true;
  problem.kernel.delta_rule = false;
  CHECK(is_recurrence());
  problem.kernel.dtype = kBF16;
  problem.kernel.decay = kChannelDecay;
  CHECK(!is_recurrence());
  problem.kernel.decay = kNoDecay;
  problem.kernel.head_dim_k = 136;
  CHECK(is_recurrence());
}

void TestPlan() {
  PlanParams plan = {};
  plan.header = reinterpret_cast<PlanHeader*>(0x4000);
  plan.rules.page_size = 16;
  plan.rules.max_kv = 1 << 20;
  fake_driver.param_bytes = sizeof(plan);
  CHECK_OK(PreparePlan({90}));
  CHECK_OK(LoadPlan({90}, 1));
  for (const auto& [pages, grid] : {std::pair<i64, unsigned>{0, 1}, {1, 2}, {1 << 28, 11}}) {
    plan.inputs.num_page_indices = pages;
    CHECK_OK(LaunchPlan({90}, plan, 500, Stream(1), 1));
    const std::vector<Call> calls = TakeCalls();
    CHECK(calls.size() == 2 && calls[0].name == "memset32 0");
    CHECK(calls[0].address == 0x4000 && calls[0].count == 500);
    CHECK(calls[1].grid == grid);  // one CTA schedules, the others check page ids
  }
  CHECK_ERROR(LaunchPlan({90}, plan, 500, Stream(0), 0), "plan: its kernel is not");
  CHECK(GetJitStats().plan_launches == 4);
}

// One host thread per device, as in XLA, loading and launching kernels that are not there yet.
void TestConcurrentDevices() {
  fake_driver.param_bytes = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t] {
      const int device = t % 2;
      for (int64_t head_dim = 8; head_dim <= 48; head_dim += 8) {
        const AttentionProblem problem = MakeProblem(head_dim);
        CHECK_OK(PrepareAttention(problem));
        CHECK_OK(LoadAttention(problem, device));
        for (int i = 0; i < 20; ++i) CHECK_OK(LaunchAttention(problem, {}, Stream(device), device));
      }
      CHECK(context_stack.size() == 1);
    });
  }
  const int compiles = fake_nvrtc.compiles;
  const int loads = fake_driver.module_loads;
  for (std::thread& thread : threads) thread.join();
  CHECK(fake_nvrtc.compiles - compiles <= 6 && fake_driver.module_loads - loads <= 12);
  size_t num_launches = 0;
  for (const Call& call : TakeCalls()) num_launches += call.name == "launch 1";
  CHECK(num_launches == 8 * 6 * 20);
}

void TestLookupCost() {
  const AttentionProblem problem = MakeProblem(128);
  const KernelKey key = MakeKey(MakeAttentionKernel(problem));
  CHECK(key == MakeKey(MakeAttentionKernel(problem)));
  constexpr int kRepeats = 20000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRepeats; ++i) CHECK_OK(LoadAttention(problem, 1));  // one lookup each
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  std::printf("lookup: %.0f ns\n", elapsed.count() / kRepeats);
}

int main() {
  TestMissingLibraries();  // first: libraries that were found stay
  TestSha256();
  TestCubin();
  TestDiskCache();
  TestCacheBindsKeys();
  TestCacheFolders();
  TestCacheLeftovers();

  const std::filesystem::path cache_dir = TemporaryFolder();
  JitPaths paths;
  paths.nvrtc = {""};  // dlopen's name for this program
  paths.driver = {""};
  paths.cache_dir = cache_dir.string();
  SetJitPaths(paths);
  int arch = 0, num_sms = 0;
  CHECK_OK(QueryDevice(1, &arch, &num_sms));
  CHECK(arch == 90 && num_sms == 11);
  TestPrepare(paths.cache_dir);
  TestCacheKey();
  TestNearestKernel();
  TestCompileLog(paths.cache_dir);
  TestPrepareFailures();
  TestAttentionLaunch();
  TestTensorMaps();
  TestLoadFailures();
  TestAppendAndMerge();
  TestQuantizedProduct();
  TestGroupedProduct();
  TestAllReduce();
  TestShortConvolution();
  TestRecurrenceGrid();
  TestLinearChunks();
  TestPlan();
  TestConcurrentDevices();
  TestFork();
  TestLookupCost();
  std::filesystem::remove_all(cache_dir);
  std::printf("jit_test: ok\n");
}
