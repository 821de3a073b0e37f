#include "jit/device_group.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace jax_attn {
namespace {

struct Groups {
  std::mutex mutex;
  std::map<std::vector<int64_t>, std::unique_ptr<DeviceGroup>> of;
};
Groups& GetGroups() {
  static auto& groups = *new Groups;  // never destroyed: handlers may outlive static objects
  return groups;
}

std::string DeviceName(int64_t ordinal) { return "device " + std::to_string(ordinal); }

}  // namespace

Status DeviceGroup::Get(const std::vector<int64_t>& ordinals, DeviceGroup** group) {
  Groups& groups = GetGroups();
  std::lock_guard<std::mutex> lock(groups.mutex);
  std::unique_ptr<DeviceGroup>& slot = groups.of[ordinals];
  if (slot == nullptr) {
    std::unique_ptr<DeviceGroup> made(new DeviceGroup(ordinals));
    JAX_ATTN_RETURN_IF_ERROR(made->Make());
    slot = std::move(made);
  }
  *group = slot.get();
  return Status::Ok();
}

Status DeviceGroup::Make() {
  JAX_ATTN_RETURN_IF_ERROR(GetCudaDriver(&driver_));
  for (size_t rank = 0; rank < ordinals_.size(); ++rank) JAX_ATTN_RETURN_IF_ERROR(MakeOn(rank));
  for (size_t rank = 0; rank < ordinals_.size(); ++rank) {
    JAX_ATTN_RETURN_IF_ERROR(EnablePeers(rank));
  }
  const ScopedContext context(*driver_, contexts_[0]);
  void* faults = nullptr;
  const size_t bytes = sizeof(AllReduceFault) * kMaxReducers;
  if (CUresult r = driver_->cuMemHostAlloc(&faults, bytes,
                                           CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)) {
    return Status::Error("all_reduce: " + driver_->Describe("cuMemHostAlloc", r));
  }
  std::memset(faults, 0, bytes);
  faults_ = static_cast<AllReduceFault*>(faults);
  return Status::Ok();
}

// Retains the context of a device and makes its memory. An error leaves both as they are: it is
// rare and repeats.
Status DeviceGroup::MakeOn(size_t rank) {
  const CudaDriver& d = *driver_;
  const auto error = [&](const char* call, CUresult r) {
    return Status::Error("all_reduce: " + DeviceName(ordinals_[rank]) + ": " + d.Describe(call, r));
  };
  CUdevice device = 0;
  CUcontext own = nullptr;
  if (CUresult r = d.cuDeviceGet(&device, static_cast<int>(ordinals_[rank]))) {
    return error("cuDeviceGet", r);
  }
  if (CUresult r = d.cuDevicePrimaryCtxRetain(&own, device)) {
    return error("cuDevicePrimaryCtxRetain", r);
  }
  const ScopedContext context(d, own);
  const int num_devices = static_cast<int>(ordinals_.size());
  CUdeviceptr memory = 0;
  if (CUresult r = d.cuMemAlloc(&memory, AllReduceMemory::Bytes(num_devices))) {
    return error("cuMemAlloc", r);
  }
  CUstream stream = nullptr;
  if (CUresult r = d.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)) {
    return error("cuStreamCreate", r);
  }
  CUresult r = d.cuMemsetD32Async(memory, 0, AllReduceMemory::HeadBytes(num_devices) / 4, stream);
  if (r == CUDA_SUCCESS) r = d.cuStreamSynchronize(stream);
  d.cuStreamDestroy(stream);
  if (r != CUDA_SUCCESS) return error("cuMemsetD32Async", r);
  devices_.push_back(device);
  contexts_.push_back(own);
  memory_.push_back({reinterpret_cast<char*>(memory)});
  return Status::Ok();
}

Status DeviceGroup::EnablePeers(size_t rank) const {
  const CudaDriver& d = *driver_;
  const ScopedContext context(d, contexts_[rank]);
  for (size_t peer = 0; peer < contexts_.size(); ++peer) {
    if (peer == rank) continue;
    int can = 0;
    if (d.cuDeviceCanAccessPeer(&can, devices_[rank], devices_[peer]) != CUDA_SUCCESS || can == 0) {
      return Status::Error(
          "all_reduce: mesh: expected GPUs that can map each other's memory, got " +
          DeviceName(ordinals_[rank]) + " and " + DeviceName(ordinals_[peer]) +
          "; leave mesh out to use XLA's all-reduce.");
    }
    const CUresult r = d.cuCtxEnablePeerAccess(contexts_[peer], 0);
    if (r != CUDA_SUCCESS && r != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
      return Status::Error("all_reduce: " + d.Describe("cuCtxEnablePeerAccess", r));
    }
  }
  return Status::Ok();
}

Status DeviceGroup::BeginRun(int rank, int64_t run, void* stream) {
  JAX_ATTN_RETURN_IF_ERROR(Fault());
  if (runs_[rank].exchange(run) == run) return Status::Ok();
  auto* head = reinterpret_cast<AllReduceHead*>(memory_[rank].begin);
  const ScopedContext context(*driver_, contexts_[rank]);
  const CUresult r =
      driver_->cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(&head->run),
                                static_cast<unsigned>(run), 1, static_cast<CUstream>(stream));
  if (r != CUDA_SUCCESS) {
    return Status::Error("all_reduce: " + driver_->Describe("cuMemsetD32Async", r));
  }
  return Status::Ok();
}

Status DeviceGroup::Fault() const {
  for (size_t rank = 0; rank < ordinals_.size(); ++rank) {
    const uint64_t word = __atomic_load_n(&faults_[rank].code_and_peer, __ATOMIC_ACQUIRE);
    const auto code = static_cast<int>(word & 0xffffffff);
    if (code == kAllReduceFine) continue;
    const std::string own = DeviceName(ordinals_[rank]);
    const std::string peer = DeviceName(ordinals_[(word >> 32) % ordinals_.size()]);
    const std::string again = "; results since then are NaN, restart the process.";
    if (code == kAllReduceOther) {
      return Status::Error(
          "all_reduce: expected all devices to run executables in one order, got " + own + " and " +
          peer + " in different calls at the same time: launch from one thread" + again);
    }
    if (code == kAllReduceBusy) {
      return Status::Error("all_reduce: " + own + " waited too long for its own call before" +
                           again);
    }
    return Status::Error("all_reduce: " + own + " waited too long for " + peer +
                         ", which is late or gone" + again);
  }
  return Status::Ok();
}

void DeviceGroup::Fill(int rank, AllReduceParams* params) const {
  for (size_t i = 0; i < memory_.size(); ++i) params->memory[i] = memory_[i];
  params->fault = &faults_[rank];
  params->rank = rank;
}

Status AnyGroupFault() {
  Groups& groups = GetGroups();
  std::lock_guard<std::mutex> lock(groups.mutex);
  for (const auto& [ordinals, group] : groups.of) {
    if (group != nullptr) JAX_ATTN_RETURN_IF_ERROR(group->Fault());
  }
  return Status::Ok();
}

bool CanAccessPeers(const std::vector<int64_t>& ordinals) {
  const CudaDriver* d = nullptr;
  if (!GetCudaDriver(&d).ok()) return false;
  for (const int64_t a : ordinals) {
    for (const int64_t b : ordinals) {
      CUdevice device = 0, peer = 0;
      int can = 0;
      if (a == b) continue;
      if (d->cuDeviceGet(&device, static_cast<int>(a)) != CUDA_SUCCESS ||
          d->cuDeviceGet(&peer, static_cast<int>(b)) != CUDA_SUCCESS ||
          d->cuDeviceCanAccessPeer(&can, device, peer) != CUDA_SUCCESS || can == 0) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace jax_attn
