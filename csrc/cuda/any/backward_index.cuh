// What the backward pass has to know of a batch before it begins: where a request's queries are,
// and which entries of page tables name the same page. By all threads of the grid, in phases 0 and
// 1, which are launches of their own. Maxima of integers do not depend on who is first.
#pragma once

#include "cuda/common/work.cuh"

namespace jax_attn {

template <class Traits>
class BackwardIndex {
 public:
  __device__ __forceinline__ explicit BackwardIndex(const BackwardCudaParams& p, int batch_size)
      : p_(p), batch_size_(batch_size) {}

  // Phase 0: what each item and each entry knows by itself.
  __device__ __forceinline__ void ReadPlan(int thread, int num_threads) const {
    const AttentionParams& f = p_.forward;
    const int num_items = LoadConstant(&f.header->num_items);
#pragma unroll 1
    for (int i = thread; i < num_items; i += num_threads) {
      const ItemRecord item(f, i);
      // A shared item's position is no request's. All others of a request agree.
      if (item.num_groups() > 1) continue;
      const int request = item.request();
      p_.q_begins[request] = item.q_pos() - (item.qo_begin() - LoadConstant(f.qo_indptr + request));
    }
    if constexpr (Traits::kPageSize > 0) {
#pragma unroll 1
      for (int e = FirstEntry() + thread; e < EndOfEntries(); e += num_threads) {
        const int request = RequestOf(e);
        const int slot = e - LoadConstant(p_.kv_indptr + request);
        if (slot >= CeilDiv(LoadConstant(f.kv_lens + request), Traits::kPageSize)) continue;
        const int page = LoadConstant(f.page_indices + e);
        p_.is_read[e] = 1;
        MaxRelaxed(p_.first_entries + page, static_cast<u32>(p_.max_entries - e));
        MaxRelaxed(p_.last_entries + page, static_cast<u32>(e + 1));
      }
    }
  }

  // Phase 1: chains of the entries with one page. What is shared is shared by neighbours, mostly,
  // so the next entry is about a page table away.
  __device__ __forceinline__ void LinkPages(int thread, int num_threads) const {
    const AttentionParams& f = p_.forward;
#pragma unroll 1
    for (int e = FirstEntry() + thread; e < EndOfEntries(); e += num_threads) {
      if (LoadConstant(p_.is_read + e) == 0) continue;
      const int page = LoadConstant(f.page_indices + e);
      const int last = LoadConstant(p_.last_entries + page) - 1;
      if (e == last) continue;
      int next = e + 1;
      while (LoadConstant(f.page_indices + next) != page || LoadConstant(p_.is_read + next) == 0) {
        ++next;
      }
      p_.next_entries[e] = next + 1;
    }
  }

  // The request that entry e of page_indices is of.
  __device__ __forceinline__ int RequestOf(int e) const {
    int low = 0, high = batch_size_ - 1;  // the last one that begins at e or before
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (LoadConstant(p_.kv_indptr + middle) <= e) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 private:
  __device__ int FirstEntry() const { return batch_size_ > 0 ? LoadConstant(p_.kv_indptr) : 0; }
  __device__ int EndOfEntries() const {
    return batch_size_ > 0 ? LoadConstant(p_.kv_indptr + batch_size_) : 0;
  }

  const BackwardCudaParams& p_;
  const int batch_size_;
};

}  // namespace jax_attn
