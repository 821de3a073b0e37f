// The few types, values and functions of the CUDA driver and of NVRTC that this library uses. They
// are declared here and looked up at run time, so one build runs with and without CUDA.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "status.h"

namespace jax_attn {

// cuda.h. Names and values are CUDA's.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;
inline constexpr CUresult CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704;

inline constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
inline constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;

inline constexpr int CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6;
inline constexpr int CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9;
inline constexpr int CU_TENSOR_MAP_INTERLEAVE_NONE = 0;
inline constexpr int CU_TENSOR_MAP_SWIZZLE_128B = 3;
inline constexpr int CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3;
inline constexpr int CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0;

inline constexpr int CU_STREAM_NON_BLOCKING = 1;

inline constexpr int CU_MEMHOSTALLOC_PORTABLE = 1;
inline constexpr int CU_MEMHOSTALLOC_DEVICEMAP = 2;

inline constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
inline constexpr int CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9;

inline constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct CUlaunchAttribute {
  int id;
  alignas(8) int value;  // of this attribute; other ones fill the union
  char rest_of_union[60];
};
struct CUlaunchConfig {
  unsigned int gridDimX, gridDimY, gridDimZ;
  unsigned int blockDimX, blockDimY, blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned int numAttrs;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56, "as in cuda.h");

struct CudaDriver {
  CUresult (*cuInit)(unsigned int flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext* context);
  CUresult (*cuModuleLoadData)(CUmodule* module, const void* image);
  CUresult (*cuModuleUnload)(CUmodule module);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuFuncLoad)(CUfunction function);  // null before driver 12.4
  CUresult (*cuTensorMapEncodeTiled)(void* map, int data_type, unsigned int rank, void* address,
                                     const unsigned long long* dims,
                                     const unsigned long long* strides, const unsigned int* box,
                                     const unsigned int* element_strides, int interleave,
                                     int swizzle, int l2_promotion, int oob_fill);
  CUresult (*cuMemAlloc)(CUdeviceptr* address, size_t num_bytes);
  CUresult (*cuMemFree)(CUdeviceptr address);
  CUresult (*cuMemHostAlloc)(void** address, size_t num_bytes, unsigned int flags);
  CUresult (*cuDeviceCanAccessPeer)(int* can, CUdevice device, CUdevice peer);
  CUresult (*cuCtxEnablePeerAccess)(CUcontext peer, unsigned int flags);
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned int flags);
  CUresult (*cuStreamSynchronize)(CUstream stream);
  CUresult (*cuStreamDestroy)(CUstream stream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr address, unsigned char value, size_t count,
                              CUstream stream);
  CUresult (*cuMemcpyDtoDAsync)(CUdeviceptr to, CUdeviceptr from, size_t num_bytes,
                                CUstream stream);
  CUresult (*cuMemsetD32Async)(CUdeviceptr address, unsigned int value, size_t count,
                               CUstream stream);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                             void** params, void** extra);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params,
                               void** extra);  // null before driver 12.3

  // "cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE (device kernel image is invalid)".
  std::string Describe(const char* call, CUresult error) const;
};

// Makes `context` current in its scope. Free if it is current already, which is usual under XLA.
class ScopedContext {
 public:
  ScopedContext(const CudaDriver& driver, CUcontext context) : driver_(driver) {
    CUcontext current = nullptr;
    driver.cuCtxGetCurrent(&current);
    pushed_ = current != context && driver.cuCtxPushCurrent(context) == CUDA_SUCCESS;
  }
  ~ScopedContext() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const CudaDriver& driver_;
  bool pushed_;
};

// nvrtc.h.
using nvrtcResult = int;
using nvrtcProgram = struct _nvrtcProgram*;
inline constexpr nvrtcResult NVRTC_SUCCESS = 0;

struct Nvrtc {
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult result);
  nvrtcResult (*nvrtcGetNumSupportedArchs)(int* num_archs);
  nvrtcResult (*nvrtcGetSupportedArchs)(int* archs);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram* program, const char* text, const char* name,
                                    int num_headers, const char* const* headers,
                                    const char* const* include_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram* program);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram program, int num_options,
                                     const char* const* options);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram program, char* cubin);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram program, size_t* size);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram program, char* log);

  std::string version;  // "13.5"
  std::string build;    // the build IDs of its files, which tell libraries of one version apart
};

// Sets the files to try, in order. Has no effect on a library that is already in use.
void SetCudaLibraries(std::vector<std::string> nvrtc, std::vector<std::string> driver);

// Open and check the library on first use. A failure is not remembered, so it helps to install or
// configure the library while the process runs. The driver is initialised (cuInit).
Status GetCudaDriver(const CudaDriver** driver);
Status GetNvrtc(const Nvrtc** nvrtc);

}  // namespace jax_attn
