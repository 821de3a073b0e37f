// The kernels of this process. Each specialisation is compiled once and loaded once per device.
#pragma once

#include <functional>
#include <string>

#include "jit/counter_pool.h"
#include "jit/cuda_api.h"
#include "jit/kernel_source.h"
#include "jit/kernels.h"
#include "status.h"

namespace jax_attn {

// A function on one device. It is never unloaded, because executables that launch it may live as
// long as the process.
struct LoadedKernel {
  const CudaDriver* driver = nullptr;
  CUcontext context = nullptr;
  CUfunction function = nullptr;
  unsigned num_threads = 0;
  unsigned smem_bytes = 0;
  int num_sms = 0;                  // SMs of the device
  CounterPool* counters = nullptr;  // the device's pool; null: the device had no memory left
};

void SetCacheDir(const std::string& cache_dir);

// Brings the cubin into memory. Calls `make_source` only if no Prepare of this key has succeeded.
Status PrepareKernel(const KernelKey& key, const std::function<KernelSource()>& make_source,
                     KernelInfo* info);

// Loads a prepared kernel into the primary context of the device, which is the one that XLA uses.
Status LoadKernel(const KernelKey& key, int device_ordinal);

// Null if the kernel is not loaded there. The pointer stays valid. Costs about 0.1 us.
const LoadedKernel* FindLoadedKernel(const KernelKey& key, int device_ordinal);

// Counts everything but launches, which stay 0.
JitStats GetRegistryStats();

}  // namespace jax_attn
