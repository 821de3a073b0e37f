// Makes the tables of recurrent states of an instruction set. Internal linkage: see kernels.h.
#pragma once

#include "cpu/kernels/convolution_pass.h"
#include "cpu/kernels/linear_backward_pass.h"
#include "cpu/kernels/linear_pass.h"
#include "cpu/linear_kernels.h"

namespace jax_attn {
namespace {

template <class Isa, typename T>
constexpr CpuLinearKernels kLinearKernels = {LinearPass<Isa, T>::ScratchBytes,
                                             LinearPass<Isa, T>::Run};

template <class Isa, typename T>
constexpr CpuLinearBackwardKernels kLinearBackwardKernels = {LinearBackward<Isa, T>::ScratchBytes,
                                                             LinearBackward<Isa, T>::Run};

template <class Isa>
constexpr CpuLinearTable MakeLinearTable() {
  return {{kLinearKernels<Isa, Bf16>, kLinearKernels<Isa, F16>, kLinearKernels<Isa, float>},
          {ConvolutionPass<Isa, Bf16>::Run, ConvolutionPass<Isa, F16>::Run,
           ConvolutionPass<Isa, float>::Run},
          {kLinearBackwardKernels<Isa, Bf16>, kLinearBackwardKernels<Isa, F16>,
           kLinearBackwardKernels<Isa, float>}};
}

}  // namespace
}  // namespace jax_attn
