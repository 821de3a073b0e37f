// The kernels of this process: each specialisation is compiled once and loaded once a device.
#pragma once

#include <functional>
#include <string>

#include "jit/counter_pool.h"
#include "jit/cuda_api.h"
#include "jit/kernel_source.h"
#include "jit/kernels.h"
#include "status.h"

namespace jax_attn {

// A function on one device. Never unloaded: executables that launch it may live as long as the
// process.
struct LoadedKernel {
  const CudaDriver* driver = nullptr;
  CUcontext context = nullptr;
  CUfunction function = nullptr;
  unsigned num_threads = 0;
  unsigned smem_bytes = 0;
  int num_sms = 0;                  // of the device
  CounterPool* counters = nullptr;  // of the device; null: it had no memory left
};

void SetCacheDir(const std::string& cache_dir);

// Puts the cubin in memory. `make_source` runs only if no Prepare of this key succeeded before.
Status PrepareKernel(const KernelKey& key, const std::function<KernelSource()>& make_source,
                     KernelInfo* info);

// Loads a prepared kernel on the device, into its primary context, which is the one XLA uses.
Status LoadKernel(const KernelKey& key, int device_ordinal);

// Null if it is not loaded there. The pointer stays valid. Costs about 0.1 us.
const LoadedKernel* FindLoadedKernel(const KernelKey& key, int device_ordinal);

// The fields of JitStats that this file counts; launches stay zero.
JitStats GetRegistryStats();

}  // namespace jax_attn
