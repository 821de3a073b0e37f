#include "jit/compiler.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "jit/cuda_api.h"
#include "jit/embedded_sources.h"
#include "jit/sha256.h"

namespace jax_attn {
namespace {

constexpr size_t kMaxLogInError = 4000;

// Writes the length before the contents, so that different lists never give the same text.
void AddField(std::string* all, const std::string& field) {
  *all += std::to_string(field.size()) + ":" + field;
}

const std::string& EmbeddedDigest() {
  static const std::string& digest = *new std::string([] {
    std::string all;
    for (size_t i = 0; i < kNumEmbeddedSources; ++i) {
      AddField(&all, kEmbeddedSources[i].name);
      AddField(&all, kEmbeddedSources[i].text);
    }
    return Sha256Hex(all);
  }());
  return digest;
}

// Compiles share this lock, and a fork takes it alone, so a fork waits for running compiles.
// Otherwise threads that the child does not have could hold NVRTC's own locks. The child gets a new
// mutex, which no thread of the parent waits for.
std::shared_mutex& CompilesOrForks() {
  static std::atomic<std::shared_mutex*> mutex{new std::shared_mutex};
  [[maybe_unused]] static const int at_fork =
      pthread_atfork([] { mutex.load()->lock(); }, [] { mutex.load()->unlock(); },
                     [] { mutex = new std::shared_mutex; });
  return *mutex.load(std::memory_order_acquire);
}

// An NVRTC program, destroyed at the end of the scope.
class Program {
 public:
  Program(const Nvrtc& nvrtc, const KernelSource& source) : nvrtc_(nvrtc) {
    std::vector<const char*> names, texts;
    for (size_t i = 0; i < kNumEmbeddedSources; ++i) {
      names.push_back(kEmbeddedSources[i].name);
      texts.push_back(kEmbeddedSources[i].text);
    }
    const std::string name = source.name + ".cu";
    created_ = nvrtc.nvrtcCreateProgram(&program_, source.text.c_str(), name.c_str(),
                                        static_cast<int>(names.size()), texts.data(), names.data());
  }
  ~Program() {
    if (program_ != nullptr) nvrtc_.nvrtcDestroyProgram(&program_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcResult Compile(const std::vector<std::string>& options) {
    if (created_ != NVRTC_SUCCESS) return created_;
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return nvrtc_.nvrtcCompileProgram(program_, static_cast<int>(pointers.size()), pointers.data());
  }
  std::string Log() const {
    size_t size = 0;
    if (program_ == nullptr || nvrtc_.nvrtcGetProgramLogSize(program_, &size) != NVRTC_SUCCESS) {
      return "";
    }
    std::string log(size, '\0');
    nvrtc_.nvrtcGetProgramLog(program_, log.data());
    while (!log.empty() && log.back() == '\0') log.pop_back();
    return log;
  }
  nvrtcResult Cubin(std::string* cubin) const {
    size_t size = 0;
    if (nvrtcResult error = nvrtc_.nvrtcGetCUBINSize(program_, &size)) return error;
    cubin->resize(size);
    return nvrtc_.nvrtcGetCUBIN(program_, cubin->data());
  }

 private:
  const Nvrtc& nvrtc_;
  nvrtcProgram program_ = nullptr;
  nvrtcResult created_;
};

// Refuses if this NVRTC cannot compile for the architecture in the options.
Status CheckArch(const Nvrtc& nvrtc, const KernelSource& source) {
  const std::string prefix = "--gpu-architecture=sm_";
  int num_archs = 0;
  if (nvrtc.nvrtcGetNumSupportedArchs(&num_archs) != NVRTC_SUCCESS) return Status::Ok();
  std::vector<int> archs(num_archs);
  if (nvrtc.nvrtcGetSupportedArchs(archs.data()) != NVRTC_SUCCESS) return Status::Ok();
  for (const std::string& option : source.options) {
    if (option.rfind(prefix, 0) != 0) continue;
    const int arch = std::atoi(option.c_str() + prefix.size());
    if (std::find(archs.begin(), archs.end(), arch) != archs.end()) continue;
    return Status::Error("NVRTC " + nvrtc.version + " cannot compile for sm_" +
                         std::to_string(arch) +
                         "; install a newer one with pip install 'jax-attn[cuda13]'");
  }
  return Status::Ok();
}

}  // namespace

KernelIdentity IdentityFor(const KernelSource& source, const std::string& nvrtc) {
  std::string all;
  AddField(&all, EmbeddedDigest());
  AddField(&all, source.text);
  for (const std::string& option : source.options) AddField(&all, option);
  return {source.name.substr(0, source.name.find('-')), source.fields, Sha256Hex(all), nvrtc};
}

Status Identify(const KernelSource& source, KernelIdentity* identity) {
  const Nvrtc* nvrtc = nullptr;
  JAX_ATTN_RETURN_IF_ERROR(GetNvrtc(&nvrtc));
  *identity = IdentityFor(source, nvrtc->version + " " + nvrtc->build);
  return Status::Ok();
}

std::string CacheKey(const KernelIdentity& identity) {
  std::string all;
  AddField(&all, identity.sources);
  AddField(&all, identity.nvrtc);
  return Sha256Hex(all);
}

Status Compile(const KernelSource& source, std::string* cubin, std::string* log) {
  const Nvrtc* nvrtc = nullptr;
  JAX_ATTN_RETURN_IF_ERROR(GetNvrtc(&nvrtc));
  JAX_ATTN_RETURN_IF_ERROR(CheckArch(*nvrtc, source));
  const std::shared_lock<std::shared_mutex> lock(CompilesOrForks());
  Program program(*nvrtc, source);
  nvrtcResult error = program.Compile(source.options);
  *log = program.Log();
  if (error == NVRTC_SUCCESS) error = program.Cubin(cubin);
  if (error == NVRTC_SUCCESS) return Status::Ok();
  return Status::Error("NVRTC " + nvrtc->version + " did not compile " + source.name + ": " +
                       nvrtc->nvrtcGetErrorString(error) + "\n" + log->substr(0, kMaxLogInError));
}

}  // namespace jax_attn
