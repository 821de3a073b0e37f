// Makes the kernels of products of an instruction set. Internal linkage: see kernels.h.
#pragma once

#include "cpu/kernels/product_pass.h"
#include "cpu/product_kernels.h"

namespace jax_attn {
namespace {

template <class Isa, typename T>
constexpr CpuProductKernels kProductKernels = {Product<Isa, T>::RowBytes, Product<Isa, T>::WidenRow,
                                               Product<Isa, T>::Run};

}  // namespace
}  // namespace jax_attn
