// The memory through which devices of this process reduce (cuda/any/all_reduce.cuh).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cuda/any/all_reduce_params.h"
#include "jit/cuda_api.h"
#include "status.h"

namespace jax_attn {

// Made when a call of the group first initializes, mapped into all of its devices, and kept until
// the process ends: a captured graph may use it at any time.
class DeviceGroup {
 public:
  // The group of these devices, in the order of their ranks. The first call makes it: it allocates
  // on all devices, so it must not be called while the thread captures.
  static Status Get(const std::vector<int64_t>& ordinals, DeviceGroup** group);

  // Called on the stream of a device before it runs an executable: pieces of different runs differ
  // in their tags, so that devices that run executables in different orders find out. Returns the
  // group's fault if it has one.
  Status BeginRun(int rank, int64_t run, void* stream);

  // "all_reduce: ...", in one sentence, or Ok.
  Status Fault() const;

  void Fill(int rank, AllReduceParams* params) const;

 private:
  explicit DeviceGroup(std::vector<int64_t> ordinals) : ordinals_(std::move(ordinals)) {}
  Status Make();
  Status MakeOn(size_t rank);
  Status EnablePeers(size_t rank) const;

  const CudaDriver* driver_ = nullptr;
  std::vector<int64_t> ordinals_;
  std::vector<CUdevice> devices_;
  std::vector<CUcontext> contexts_;
  std::vector<AllReduceMemory> memory_;
  AllReduceFault* faults_ = nullptr;  // [kMaxReducers], in host memory that kernels write
  std::atomic<int64_t> runs_[kMaxReducers] = {};  // the last of BeginRun
};

// The first fault of any group, or Ok.
Status AnyGroupFault();

// Whether each of these devices can map the memory of each other. False without a driver.
bool CanAccessPeers(const std::vector<int64_t>& ordinals);

}  // namespace jax_attn
