#include "jit/registry.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jit/compile_log.h"
#include "jit/compiler.h"
#include "jit/cubin.h"
#include "jit/disk_cache.h"

namespace jax_attn {
namespace {

constexpr size_t kHashDigitsInName = 20;

// One specialisation. A second Prepare or Load of it waits at `mutex` for the first.
struct Kernel {
  std::mutex mutex;
  std::string entry;
  std::string cubin;  // empty: not prepared yet
  KernelInfo info;
};

struct DeviceKey {
  KernelKey kernel;
  int device;
  bool operator==(const DeviceKey& other) const {
    return device == other.device && kernel == other.kernel;
  }
};

struct KeyHash {
  size_t operator()(const KernelKey& key) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 32);
  }
  size_t operator()(const DeviceKey& key) const { return (*this)(key.kernel) + key.device; }
};

struct Device {
  bool is_retained = false;  // whether its primary context is retained, until the process ends
  std::unique_ptr<CounterPool> counters;
};

struct Registry {
  std::shared_mutex mutex;  // guards what follows; never held during a compile or a load
  std::unordered_map<KernelKey, std::unique_ptr<Kernel>, KeyHash> kernels;
  std::unordered_map<DeviceKey, std::unique_ptr<const LoadedKernel>, KeyHash> loaded;
  std::vector<KernelIdentity> identities;  // of kernels with a cubin
  std::string cache_dir;
  bool cache_trouble_told = false;

  std::mutex devices_mutex;
  std::unordered_map<int, Device> devices;  // devices with kernels

  std::mutex stats_mutex;
  JitStats stats;
};
// Never destroyed, because handlers may outlive static objects. A forked child begins with an empty
// registry: threads that the child does not have may hold locks of the parent's.
std::atomic<Registry*> current_registry{nullptr};

Registry& GetRegistry() {
  [[maybe_unused]] static const int made = [] {
    current_registry = new Registry;
    return pthread_atfork(nullptr, nullptr, [] {
      auto* registry = new Registry;
      registry->cache_dir = current_registry.load()->cache_dir;
      current_registry = registry;
    });
  }();
  return *current_registry.load(std::memory_order_acquire);
}

template <typename Update>
void UpdateStats(Update update) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.stats_mutex);
  update(registry.stats);
}

// Prints once why the cache folder cannot be used. That costs time in every process, but no result.
void TellCacheTrouble(const std::string& reason) {
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  if (std::exchange(registry.cache_trouble_told, true)) return;
  std::fprintf(
      stderr,
      "jax_attn: compiled kernels are kept in memory only: %s. Set JAX_ATTN_CACHE_DIR to a "
      "folder that you, and no other user, can write.\n",
      reason.c_str());
}

double MillisecondsSince(std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

void AddIdentity(KernelIdentity identity) {
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  registry.identities.push_back(std::move(identity));
}

Kernel* FindOrAddKernel(const KernelKey& key) {
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  std::unique_ptr<Kernel>& slot = registry.kernels[key];
  if (slot == nullptr) slot = std::make_unique<Kernel>();
  return slot.get();
}

Kernel* FindKernel(const KernelKey& key) {
  Registry& registry = GetRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  const auto it = registry.kernels.find(key);
  return it == registry.kernels.end() ? nullptr : it->second.get();
}

// Why a kernel is compiled: what the disk cache said, and how the kernel differs from those that
// are known.
std::string WhyCompiled(const KernelIdentity& identity, CacheLookup lookup) {
  if (lookup == CacheLookup::kCorrupt) return "disk cache: damaged entry, replaced";
  std::vector<KernelIdentity> cached;
  std::string cache_dir;
  {
    Registry& registry = GetRegistry();
    std::shared_lock<std::shared_mutex> lock(registry.mutex);
    cached = registry.identities;
    cache_dir = registry.cache_dir;
  }
  if (!cache_dir.empty()) {
    for (const std::string& description : ReadDescriptions(cache_dir, identity.op + "-")) {
      cached.push_back(ParseIdentity(description));
    }
  }
  return (cache_dir.empty() ? "disk cache: none; " : "disk cache: miss; ") +
         DescribeNearest(identity, cached);
}

// Compiles and publishes. A cache that cannot be written is reported on stderr and is no error.
Status CompileAndPublish(const KernelSource& source, CacheEntry* entry, KernelInfo* info) {
  const auto start = std::chrono::steady_clock::now();
  std::string log;
  JAX_ATTN_RETURN_IF_ERROR(Compile(source, &entry->cubin, &log));
  entry->compile_ms = MillisecondsSince(start);
  UpdateStats([&](JitStats& stats) {
    ++stats.compiled;
    stats.compile_ms += entry->compile_ms;
  });
  info->origin = KernelOrigin::kCompiled;
  if (info->cache_path.empty()) return Status::Ok();
  entry->source = source.text;
  for (const std::string& option : source.options) entry->options += option + " ";
  if (Status status = WriteCacheEntry(info->cache_path, *entry); !status.ok()) {
    TellCacheTrouble(status.message);
    info->cache_path.clear();
  }
  return Status::Ok();
}

// Fills `cubin` and `info` from the disk cache or by a compile.
Status ObtainCubin(const KernelSource& source, std::string* cubin, KernelInfo* info) {
  KernelIdentity identity;
  JAX_ATTN_RETURN_IF_ERROR(Identify(source, &identity));
  const std::string hash = CacheKey(identity);
  info->name = source.name + "-" + hash.substr(0, kHashDigitsInName);
  {
    Registry& registry = GetRegistry();
    std::shared_lock<std::shared_mutex> lock(registry.mutex);
    if (!registry.cache_dir.empty()) info->cache_path = registry.cache_dir + "/" + info->name;
  }
  CacheEntry entry;
  entry.key = hash;
  CacheLookup lookup = CacheLookup::kMiss;
  const auto start = std::chrono::steady_clock::now();
  if (!info->cache_path.empty()) lookup = ReadCacheEntry(info->cache_path, &entry);
  if (lookup == CacheLookup::kHit) {
    info->origin = KernelOrigin::kDisk;
    UpdateStats([](JitStats& stats) { ++stats.disk_hits; });
    if (CompileLogIsOn()) LogDiskHit(info->name, MillisecondsSince(start));
  } else {
    if (lookup == CacheLookup::kCorrupt) UpdateStats([](JitStats& stats) { ++stats.corrupt; });
    std::string why;  // before it is published: then the cache has it
    if (CompileLogIsOn()) why = WhyCompiled(identity, lookup);
    entry.description = DescribeIdentity(identity);
    JAX_ATTN_RETURN_IF_ERROR(CompileAndPublish(source, &entry, info));
    if (!why.empty()) LogCompiled(info->name, entry.compile_ms, why);
  }
  AddIdentity(std::move(identity));
  *cubin = std::move(entry.cubin);
  return Status::Ok();
}

// Reads from the cubin what the launch needs.
Status ReadLaunchNumbers(const std::string& cubin, const std::string& entry, KernelInfo* info) {
  int smem_bytes = 0, num_threads = 0;
  JAX_ATTN_RETURN_IF_ERROR(ReadCubinInt(cubin, entry + "_smem_bytes", &smem_bytes));
  JAX_ATTN_RETURN_IF_ERROR(ReadCubinInt(cubin, entry + "_num_threads", &num_threads));
  info->cubin_bytes = static_cast<int64_t>(cubin.size());
  info->smem_bytes = smem_bytes;
  info->num_threads = num_threads;
  return Status::Ok();
}

// Gets the module's function and makes it ready to launch. On an error, `call` is the driver call
// that failed.
CUresult SetUpFunction(const Kernel& kernel, CUmodule module, LoadedKernel* loaded,
                       const char** call) {
  const CudaDriver& d = *loaded->driver;
  *call = "cuModuleGetFunction";
  CUresult r = d.cuModuleGetFunction(&loaded->function, module, kernel.entry.c_str());
  // Lazy loading would copy the code to the device at the first launch, which may be captured.
  if (r == CUDA_SUCCESS && d.cuFuncLoad != nullptr) {
    *call = "cuFuncLoad";
    r = d.cuFuncLoad(loaded->function);
  }
  const auto set = [&](int attribute, int64_t value) {
    if (r != CUDA_SUCCESS) return;
    *call = "cuFuncSetAttribute";
    r = d.cuFuncSetAttribute(loaded->function, attribute, static_cast<int>(value));
  };
  set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.info.smem_bytes);
  // A kernel with shared memory is sized so that its CTAs fill an SM.
  if (kernel.info.smem_bytes > 0) set(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);
  return r;
}

// Loads `kernel` into the current context of `device`. After an error nothing is loaded.
Status LoadHere(const Kernel& kernel, CUdevice device, LoadedKernel* loaded) {
  const CudaDriver& d = *loaded->driver;
  auto error = [&](const char* call, CUresult result) {
    int version = 0;
    d.cuDriverGetVersion(&version);
    return Status::Error("cannot load " + kernel.info.name + ": " + d.Describe(call, result) +
                         "; the driver supports CUDA " + std::to_string(version / 1000) + "." +
                         std::to_string(version % 1000 / 10));
  };
  int smem_limit = 0;
  d.cuDeviceGetAttribute(&smem_limit, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                         device);
  d.cuDeviceGetAttribute(&loaded->num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  if (kernel.info.smem_bytes > smem_limit) {
    return Status::Error("cannot load " + kernel.info.name + ": it needs " +
                         std::to_string(kernel.info.smem_bytes) +
                         " bytes of shared memory, the device has " + std::to_string(smem_limit));
  }
  CUmodule module = nullptr;
  if (CUresult r = d.cuModuleLoadData(&module, kernel.cubin.data())) {
    return error("cuModuleLoadData", r);
  }
  const char* call = "";
  if (CUresult r = SetUpFunction(kernel, module, loaded, &call)) {
    d.cuModuleUnload(module);
    return error(call, r);
  }
  loaded->smem_bytes = static_cast<unsigned>(kernel.info.smem_bytes);
  loaded->num_threads = static_cast<unsigned>(kernel.info.num_threads);
  return Status::Ok();
}

// Releases the device's primary context at the end of the scope, unless Keep was called.
class RetainedContext {
 public:
  RetainedContext(const CudaDriver& driver, CUdevice device) : driver_(driver), device_(device) {}
  ~RetainedContext() {
    if (is_retained_) driver_.cuDevicePrimaryCtxRelease(device_);
  }
  RetainedContext(const RetainedContext&) = delete;
  RetainedContext& operator=(const RetainedContext&) = delete;

  CUresult Retain(CUcontext* context) {
    const CUresult r = driver_.cuDevicePrimaryCtxRetain(context, device_);
    is_retained_ = r == CUDA_SUCCESS;
    return r;
  }
  void Keep() { is_retained_ = false; }

 private:
  const CudaDriver& driver_;
  CUdevice device_;
  bool is_retained_ = false;
};

// Called with the device's context current, after a kernel was loaded into it. The first call keeps
// the context retained and makes the counters.
CounterPool* KeepDevice(const CudaDriver& driver, int device_ordinal, RetainedContext* context) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.devices_mutex);
  Device& device = registry.devices[device_ordinal];
  if (!std::exchange(device.is_retained, true)) context->Keep();
  if (device.counters == nullptr) device.counters = CounterPool::Make(driver);
  return device.counters.get();
}

Status LoadOnDevice(const Kernel& kernel, int device_ordinal, LoadedKernel* loaded) {
  JAX_ATTN_RETURN_IF_ERROR(GetCudaDriver(&loaded->driver));
  const CudaDriver& d = *loaded->driver;
  CUdevice device = 0;
  if (CUresult r = d.cuDeviceGet(&device, device_ordinal)) {
    return Status::Error("device " + std::to_string(device_ordinal) + ": " +
                         d.Describe("cuDeviceGet", r));
  }
  RetainedContext context(d, device);
  if (CUresult r = context.Retain(&loaded->context)) {
    return Status::Error(d.Describe("cuDevicePrimaryCtxRetain", r));
  }
  if (CUresult r = d.cuCtxPushCurrent(loaded->context)) {
    return Status::Error(d.Describe("cuCtxPushCurrent", r));
  }
  const Status status = LoadHere(kernel, device, loaded);
  if (status.ok()) loaded->counters = KeepDevice(d, device_ordinal, &context);
  CUcontext popped = nullptr;
  d.cuCtxPopCurrent(&popped);
  return status;
}

}  // namespace

void SetCacheDir(const std::string& cache_dir) {
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  registry.cache_dir = cache_dir;
  registry.cache_trouble_told = false;
}

Status PrepareKernel(const KernelKey& key, const std::function<KernelSource()>& make_source,
                     KernelInfo* info) {
  const auto start = std::chrono::steady_clock::now();
  Kernel* kernel = FindOrAddKernel(key);
  std::lock_guard<std::mutex> lock(kernel->mutex);
  if (kernel->cubin.empty()) {
    const KernelSource source = make_source();
    std::string cubin;
    KernelInfo fresh;
    JAX_ATTN_RETURN_IF_ERROR(ObtainCubin(source, &cubin, &fresh));
    JAX_ATTN_RETURN_IF_ERROR(ReadLaunchNumbers(cubin, source.entry, &fresh));
    kernel->entry = source.entry;
    kernel->info = fresh;
    kernel->cubin = std::move(cubin);
    if (info != nullptr) *info = fresh;
  } else {
    UpdateStats([](JitStats& stats) { ++stats.memory_hits; });
    if (info != nullptr) {
      *info = kernel->info;
      info->origin = KernelOrigin::kMemory;
    }
  }
  if (info != nullptr) info->milliseconds = MillisecondsSince(start);
  return Status::Ok();
}

Status LoadKernel(const KernelKey& key, int device_ordinal) {
  Kernel* kernel = FindKernel(key);
  if (kernel == nullptr) return Status::Error("LoadKernel: the kernel was not prepared");
  std::lock_guard<std::mutex> kernel_lock(kernel->mutex);
  if (kernel->cubin.empty()) return Status::Error("LoadKernel: the kernel was not prepared");
  if (FindLoadedKernel(key, device_ordinal) != nullptr) return Status::Ok();
  auto loaded = std::make_unique<LoadedKernel>();
  JAX_ATTN_RETURN_IF_ERROR(LoadOnDevice(*kernel, device_ordinal, loaded.get()));
  Registry& registry = GetRegistry();
  std::unique_lock<std::shared_mutex> lock(registry.mutex);
  registry.loaded[{key, device_ordinal}] = std::move(loaded);
  UpdateStats([](JitStats& stats) { ++stats.loaded; });
  return Status::Ok();
}

const LoadedKernel* FindLoadedKernel(const KernelKey& key, int device_ordinal) {
  Registry& registry = GetRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  const auto it = registry.loaded.find({key, device_ordinal});
  return it == registry.loaded.end() ? nullptr : it->second.get();
}

JitStats GetRegistryStats() {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.stats_mutex);
  return registry.stats;
}

}  // namespace jax_attn
