#include "jit/cuda_api.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace jax_attn {
namespace {

// The first driver whose graphs have edges of launches that overlap.
constexpr int kGraphsWithOverlap = 12030;

struct Libraries {
  std::mutex mutex;
  std::vector<std::string> nvrtc_candidates;
  std::vector<std::string> driver_candidates;
  const CudaDriver* driver = nullptr;
  const Nvrtc* nvrtc = nullptr;
};
Libraries& GetLibraries() {
  static auto& libraries = *new Libraries;  // never destroyed: handlers may outlive static objects
  // A fork waits until no library is being opened, so the child finds nothing half done.
  [[maybe_unused]] static const int at_fork =
      pthread_atfork([] { libraries.mutex.lock(); }, [] { libraries.mutex.unlock(); },
                     [] { libraries.mutex.unlock(); });
  return libraries;
}

// Opens a copy that is already in the process, or else the first candidate that opens. `tried`
// collects the reasons of the others.
void* Open(const std::vector<std::string>& sonames, const std::vector<std::string>& candidates,
           std::string* tried) {
  for (const std::string& name : sonames) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD)) return handle;
  }
  for (const std::string& name : candidates) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* reason = dlerror();
    *tried += (tried->empty() ? "" : "; ") + std::string(reason ? reason : name);
  }
  return nullptr;
}

template <typename Function>
Status Resolve(void* handle, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(handle, symbol));
  if (function != nullptr) return Status::Ok();
  return Status::Error(std::string("the loaded CUDA library has no function ") + symbol +
                       "; CUDA 12.0 or later is needed");
}

Status OpenDriver(const std::vector<std::string>& candidates, CudaDriver* d) {
  std::string tried;
  void* handle = Open({}, candidates, &tried);
  if (handle == nullptr) {
    return Status::Error("CUDA kernels need the NVIDIA driver, and it was not found (" + tried +
                         "): install the driver (580 or later for CUDA 13) or run on the CPU with "
                         "JAX_PLATFORMS=cpu");
  }
  const Status statuses[] = {
      Resolve(handle, "cuInit", d->cuInit),
      Resolve(handle, "cuDriverGetVersion", d->cuDriverGetVersion),
      Resolve(handle, "cuGetErrorName", d->cuGetErrorName),
      Resolve(handle, "cuGetErrorString", d->cuGetErrorString),
      Resolve(handle, "cuDeviceGet", d->cuDeviceGet),
      Resolve(handle, "cuDeviceGetAttribute", d->cuDeviceGetAttribute),
      Resolve(handle, "cuDevicePrimaryCtxRetain", d->cuDevicePrimaryCtxRetain),
      Resolve(handle, "cuDevicePrimaryCtxRelease_v2", d->cuDevicePrimaryCtxRelease),
      Resolve(handle, "cuCtxGetCurrent", d->cuCtxGetCurrent),
      Resolve(handle, "cuCtxPushCurrent_v2", d->cuCtxPushCurrent),
      Resolve(handle, "cuCtxPopCurrent_v2", d->cuCtxPopCurrent),
      Resolve(handle, "cuStreamGetCtx", d->cuStreamGetCtx),
      Resolve(handle, "cuModuleLoadData", d->cuModuleLoadData),
      Resolve(handle, "cuModuleUnload", d->cuModuleUnload),
      Resolve(handle, "cuModuleGetFunction", d->cuModuleGetFunction),
      Resolve(handle, "cuFuncSetAttribute", d->cuFuncSetAttribute),
      Resolve(handle, "cuMemAlloc_v2", d->cuMemAlloc),
      Resolve(handle, "cuMemFree_v2", d->cuMemFree),
      Resolve(handle, "cuMemHostAlloc", d->cuMemHostAlloc),
      Resolve(handle, "cuDeviceCanAccessPeer", d->cuDeviceCanAccessPeer),
      Resolve(handle, "cuCtxEnablePeerAccess", d->cuCtxEnablePeerAccess),
      Resolve(handle, "cuStreamCreate", d->cuStreamCreate),
      Resolve(handle, "cuStreamSynchronize", d->cuStreamSynchronize),
      Resolve(handle, "cuStreamDestroy_v2", d->cuStreamDestroy),
      Resolve(handle, "cuMemsetD8Async", d->cuMemsetD8Async),
      Resolve(handle, "cuMemcpyDtoDAsync_v2", d->cuMemcpyDtoDAsync),
      Resolve(handle, "cuMemsetD32Async", d->cuMemsetD32Async),
      Resolve(handle, "cuLaunchKernel", d->cuLaunchKernel),
      Resolve(handle, "cuTensorMapEncodeTiled", d->cuTensorMapEncodeTiled),
  };
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  (void)Resolve(handle, "cuFuncLoad", d->cuFuncLoad);
  int version = 0;
  if (d->cuDriverGetVersion(&version) == CUDA_SUCCESS && version >= kGraphsWithOverlap) {
    (void)Resolve(handle, "cuLaunchKernelEx", d->cuLaunchKernelEx);
  }
  const CUresult error = d->cuInit(0);
  if (error == CUDA_SUCCESS) return Status::Ok();
  return Status::Error("CUDA kernels need a working NVIDIA GPU: " + d->Describe("cuInit", error));
}

// NVRTC opens its library of built-ins by name alone, and the wheel of CUDA 13.0 does not tell the
// linker to look in NVRTC's own folder. This opens it from that folder first, so that NVRTC finds
// it in the process.
void OpenNvrtcBuiltins(void* nvrtc_version, int major, int minor) {
  Dl_info info;
  if (dladdr(nvrtc_version, &info) == 0 || info.dli_fname == nullptr) return;
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return;
  const std::string name =
      "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
  dlopen((path.substr(0, slash + 1) + name).c_str(), RTLD_NOW | RTLD_GLOBAL);
}

// The linker's build ID of a loaded file. If the file has none, its name and its length in memory.
std::string BuildId(const dl_phdr_info& file) {
  std::string id;
  size_t end = 0;
  for (int i = 0; i < file.dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = file.dlpi_phdr[i];
    if (segment.p_type == PT_LOAD) end = segment.p_vaddr + segment.p_memsz;
    if (segment.p_type != PT_NOTE) continue;
    const char* note = reinterpret_cast<const char*>(file.dlpi_addr + segment.p_vaddr);
    const char* notes_end = note + segment.p_memsz;
    ElfW(Nhdr) header;
    while (note + sizeof(header) <= notes_end) {
      std::memcpy(&header, note, sizeof(header));
      const char* name = note + sizeof(header);
      const char* contents = name + (header.n_namesz + 3) / 4 * 4;
      note = contents + (header.n_descsz + 3) / 4 * 4;
      if (note > notes_end) break;
      if (header.n_type != NT_GNU_BUILD_ID || header.n_namesz != 4 ||
          std::memcmp(name, "GNU", 4) != 0) {
        continue;
      }
      for (size_t byte = 0; byte < header.n_descsz; ++byte) {
        for (int shift : {4, 0}) id += "0123456789abcdef"[contents[byte] >> shift & 15];
      }
    }
  }
  return !id.empty() ? id : std::string(file.dlpi_name) + ":" + std::to_string(end);
}

// The build IDs of the file that contains `function` and of NVRTC's library of built-ins, if that
// is loaded. Both change cubins, and wheels of one minor version have several of each.
std::string NvrtcBuild(void* function) {
  struct Search {
    const void* base;
    std::string builds;
  } search = {nullptr, ""};
  Dl_info info;
  if (dladdr(function, &info) != 0) search.base = info.dli_fbase;
  dl_iterate_phdr(
      [](dl_phdr_info* file, size_t, void* data) {
        auto* search = static_cast<Search*>(data);
        bool is_nvrtc = std::strstr(file->dlpi_name, "libnvrtc-builtins") != nullptr;
        for (int i = 0; i < file->dlpi_phnum; ++i) {
          const ElfW(Phdr) & segment = file->dlpi_phdr[i];
          const auto* begin = reinterpret_cast<const char*>(file->dlpi_addr + segment.p_vaddr);
          const auto* base = static_cast<const char*>(search->base);
          is_nvrtc |= segment.p_type == PT_LOAD && begin <= base && base < begin + segment.p_memsz;
        }
        if (is_nvrtc) search->builds += (search->builds.empty() ? "" : " ") + BuildId(*file);
        return 0;
      },
      &search);
  return search.builds;
}

Status OpenNvrtc(const std::vector<std::string>& candidates, Nvrtc* n) {
  std::string tried;
  void* handle = Open({"libnvrtc.so.13", "libnvrtc.so.12"}, candidates, &tried);
  if (handle == nullptr) {
    return Status::Error("CUDA kernels are compiled by NVRTC, and it was not found (" + tried +
                         "): pip install 'jax-attn[cuda13]', or set CUDA_HOME to a CUDA toolkit");
  }
  const Status statuses[] = {
      Resolve(handle, "nvrtcVersion", n->nvrtcVersion),
      Resolve(handle, "nvrtcGetErrorString", n->nvrtcGetErrorString),
      Resolve(handle, "nvrtcGetNumSupportedArchs", n->nvrtcGetNumSupportedArchs),
      Resolve(handle, "nvrtcGetSupportedArchs", n->nvrtcGetSupportedArchs),
      Resolve(handle, "nvrtcCreateProgram", n->nvrtcCreateProgram),
      Resolve(handle, "nvrtcDestroyProgram", n->nvrtcDestroyProgram),
      Resolve(handle, "nvrtcCompileProgram", n->nvrtcCompileProgram),
      Resolve(handle, "nvrtcGetCUBINSize", n->nvrtcGetCUBINSize),
      Resolve(handle, "nvrtcGetCUBIN", n->nvrtcGetCUBIN),
      Resolve(handle, "nvrtcGetProgramLogSize", n->nvrtcGetProgramLogSize),
      Resolve(handle, "nvrtcGetProgramLog", n->nvrtcGetProgramLog),
  };
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  int major = 0, minor = 0;
  const nvrtcResult error = n->nvrtcVersion(&major, &minor);
  if (error != NVRTC_SUCCESS) {
    return Status::Error(std::string("nvrtcVersion: ") + n->nvrtcGetErrorString(error));
  }
  OpenNvrtcBuiltins(reinterpret_cast<void*>(n->nvrtcVersion), major, minor);
  n->version = std::to_string(major) + "." + std::to_string(minor);
  n->build = NvrtcBuild(reinterpret_cast<void*>(n->nvrtcVersion));
  return Status::Ok();
}

// Opens `Library` once and never closes it.
template <typename Library, typename OpenFunction>
Status GetOnce(const Library*& slot, OpenFunction open, const std::vector<std::string>& candidates,
               const Library** library) {
  if (slot == nullptr) {
    Library opened{};
    JAX_ATTN_RETURN_IF_ERROR(open(candidates, &opened));
    slot = new Library(std::move(opened));
  }
  *library = slot;
  return Status::Ok();
}

}  // namespace

std::string CudaDriver::Describe(const char* call, CUresult error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(error, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  if (cuGetErrorString(error, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
  return std::string(call) + ": " + name + " (" + text + ")";
}

void SetCudaLibraries(std::vector<std::string> nvrtc, std::vector<std::string> driver) {
  Libraries& libraries = GetLibraries();
  std::lock_guard<std::mutex> lock(libraries.mutex);
  libraries.nvrtc_candidates = std::move(nvrtc);
  libraries.driver_candidates = std::move(driver);
}

Status GetCudaDriver(const CudaDriver** driver) {
  Libraries& libraries = GetLibraries();
  std::lock_guard<std::mutex> lock(libraries.mutex);
  std::vector<std::string> candidates = libraries.driver_candidates;
  if (candidates.empty()) candidates = {"libcuda.so.1"};
  return GetOnce(libraries.driver, OpenDriver, candidates, driver);
}

Status GetNvrtc(const Nvrtc** nvrtc) {
  Libraries& libraries = GetLibraries();
  std::lock_guard<std::mutex> lock(libraries.mutex);
  std::vector<std::string> candidates = libraries.nvrtc_candidates;
  if (candidates.empty()) candidates = {"libnvrtc.so.13", "libnvrtc.so.12"};
  return GetOnce(libraries.nvrtc, OpenNvrtc, candidates, nvrtc);
}

}  // namespace jax_attn
