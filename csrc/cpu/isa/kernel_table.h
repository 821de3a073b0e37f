// Makes the tables of an instruction set. Internal linkage: see kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/attend.h"
#include "cpu/kernels/backward_pass.h"
#include "cpu/kernels/lora_pass.h"
#include "cpu/kernels/reduce.h"

namespace jax_attn {
namespace {

// Everything is constexpr, so that loading the library runs no code of this instruction set.
template <class Isa, typename T, typename Kv>
constexpr CpuTypeKernels MakeTypeKernels() {
  CpuTypeKernels kernels{};
  kernels.scratch_bytes = Attend<Isa, T, Kv>::ScratchBytes;
  kernels.attend = Attend<Isa, T, Kv>::Run;
  kernels.merge_group = MergeGroupRows<Isa, T>;
  kernels.merge_rows = MergeStateRows<Isa, T>;
  return kernels;
}

template <class Isa, typename T>
constexpr CpuBackwardKernels kBackwardKernels = {BackwardScratchBytes<Isa, T>, RunBackward<Isa, T>};

template <class Isa, typename T>
constexpr CpuLoraKernels kLoraKernels = {Lora<Isa, T>::Shrink, Lora<Isa, T>::Expand};

template <class Isa, typename T, typename Kv = T>
constexpr CpuTypeKernels kTypeKernels = MakeTypeKernels<Isa, T, Kv>();

template <class Isa, typename T>
constexpr CpuTypeKernels kCodeKernels = {Attend<Isa, float, Int8>::ScratchBytes,
                                         AttendCodes<Isa, T>::Run, MergeGroupRows<Isa, T>,
                                         MergeStateRows<Isa, T>};

// products: by DType.
template <class Isa>
constexpr CpuKernels MakeKernels(const char* name, const CpuProductKernels* const (&products)[3]) {
  return {
      name,
      {{&kTypeKernels<Isa, Bf16>, &kTypeKernels<Isa, F16>, &kTypeKernels<Isa, float>},
       {&kTypeKernels<Isa, Bf16, E4m3>, &kTypeKernels<Isa, F16, E4m3>,
        &kTypeKernels<Isa, float, E4m3>}},
      {&kCodeKernels<Isa, Bf16>, &kCodeKernels<Isa, F16>, &kCodeKernels<Isa, float>},
      {&kBackwardKernels<Isa, Bf16>, &kBackwardKernels<Isa, F16>, &kBackwardKernels<Isa, float>},
      {products[0], products[1], products[2]},
      {&kLoraKernels<Isa, Bf16>, &kLoraKernels<Isa, F16>, &kLoraKernels<Isa, float>}};
}

}  // namespace
}  // namespace jax_attn
