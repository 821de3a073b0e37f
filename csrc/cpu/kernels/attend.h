// Partial attention states of work items. Internal linkage: see kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/decode_pass.h"
#include "cpu/kernels/prefill_pass.h"

namespace jax_attn {
namespace {

template <class Isa, typename T>
constexpr ElementRows kElementRows = {
    sizeof(T),
    [](const void* row, i64 n, float* to) {
      StoreElements<Isa>(static_cast<const T*>(row), n, to);
    },
    [](const void* row, i64 n, char* codes) { EncodeInt8(static_cast<const T*>(row), n, codes); },
    StoreRow<Isa, T>,
};

template <class Isa, typename T, typename Kv>
struct Attend {
  static size_t ScratchBytes(const AttentionParams& params, const CpuGeometry& g) {
    const size_t decode = Buffers<Isa, T, Kv, true>(params, g, nullptr).bytes;
    const size_t prefill = Buffers<Isa, T, Kv, false>(params, g, nullptr).bytes;
    return decode > prefill ? decode : prefill;
  }

  // See CpuTypeKernels::attend.
  static void Run(const AttentionParams& params, const CpuGeometry& g, const WorkItem* items,
                  i64 num_items, void* scratch) {
    RunOf(nullptr, params, g, items, num_items, scratch);
  }

  // Kernels for Int8: `elements` describes q and o.
  static void RunOf(const ElementRows* elements, const AttentionParams& params,
                    const CpuGeometry& g, const WorkItem* items, i64 num_items, void* scratch) {
    const i64 rows = i64{items[0].qo_len} * params.group_size;
    if (rows == 0) return;
    if (rows > kMaxLowRows) {
      PrefillPass<Isa, T, Kv>(params, g, items, num_items, scratch, elements).Run();
    } else {
      const i64 heads_per_pass = kMaxLowPassRows / rows;
      for (i64 i = 0; i < num_items; i += heads_per_pass) {
        const i64 heads = Min(heads_per_pass, num_items - i);
        DecodePass<Isa, T, Kv>(params, g, items + i, heads, scratch, elements).Run();
      }
    }
    ReleaseTiles<Isa>();
  }
};

// int8 dot products; T: the type of q and o.
template <class Isa, typename T>
struct AttendCodes {
  static void Run(const AttentionParams& params, const CpuGeometry& g, const WorkItem* items,
                  i64 num_items, void* scratch) {
    Attend<Isa, float, Int8>::RunOf(&kElementRows<Isa, T>, params, g, items, num_items, scratch);
  }
};

}  // namespace
}  // namespace jax_attn
