// Step lists in the backward pass, which works on rows of q and positions
// of keys instead of items: see WorkItem and BackwardIndex.
#pragma once

#include "cuda/common/work.cuh"

namespace jax_attn {

// A step in a list: hidden, as the list does not have it; shown in full; or masked.
enum StepClass : u32 { kStepHidden = 0, kStepShown = 1, kStepMasked = 3 };

template <class Traits>
class BackwardLists {
 public:
  static constexpr int kStepKeys = Traits::kStepKeys;
  static constexpr bool kHasMask = Traits::Variant::kHasMask;
  static constexpr int kMaxSteps = 16;  // the classes that ClassesOf can hold

  __device__ __forceinline__ explicit BackwardLists(const BackwardCudaParams& p) : p_(p) {}

  // Two bits for each of num_steps steps from `first` on: the StepClass of the step for a row of q.
  __device__ __forceinline__ u32 ClassesOf(int row, int first, int num_steps) const {
    const List list = ListOf(row);
    u32 classes = 0;
#pragma unroll 1
    for (int e = FirstFrom(list, first); e < list.end; ++e) {
      const int entry = LoadConstant(p_.forward.steps + e), step = (entry >> 1) - first;
      if (step >= num_steps) break;
      const bool is_masked = kHasMask && (entry & 1) != 0;
      classes |= (is_masked ? kStepMasked : kStepShown) << (2 * step);
    }
    return classes;
  }

  // Whether any of the rows [begin, end) of q has one of the steps [first, end_of_steps).
  __device__ __forceinline__ bool ShowAny(int begin, int end, int first, int end_of_steps) const {
#pragma unroll 1
    for (int row = begin; row < end; row = Max(row + 1, LoadConstant(p_.tile_ends + row))) {
      const List list = ListOf(row);
      const int e = FirstFrom(list, first);
      if (e < list.end && LoadConstant(p_.forward.steps + e) >> 1 < end_of_steps) return true;
    }
    return false;
  }

 private:
  struct List {
    int begin, end;  // entries of steps
  };
  __device__ __forceinline__ List ListOf(int row) const {
    const int end = LoadConstant(p_.list_ends + row);
    return {end == 0 ? 0 : p_.forward.max_steps - LoadConstant(p_.list_begins + row), end};
  }

  // The first entry of a step at `step` or behind.
  __device__ __forceinline__ int FirstFrom(const List& list, int step) const {
    int low = list.begin, high = list.end;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (LoadConstant(p_.forward.steps + middle) >> 1 < step) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  const BackwardCudaParams& p_;
};

}  // namespace jax_attn
