// Facts of a batch that the backward pass needs before it begins: where a request's queries are,
// and which page table entries name the same page. All threads of the grid compute it in phases 0
// and 1, which are launches of their own. Maxima of integers do not depend on the order.
#pragma once

#include "cuda/common/work.cuh"

namespace jax_attn {

// P is 2^(logit - lse). lse as far from 0 as this is the largest logit, rounded to a multiple of 8:
// it says nothing of the sum, and its difference to a logit that was rounded in another way is
// anything. So P of several largest keys of such a row is 1 for each of them, not their share.
inline constexpr float kFarLseLog2 = 0x1p27f;

// A request, as units need it.
struct BackwardSource {
  int qo_begin, qo_len;  // rows of q
  int q_begin;           // kv position of its first query token
  int kv_begin, kv_len;  // kv_indptr, tokens

  BackwardSource() = default;
  __device__ __forceinline__ BackwardSource(const BackwardCudaParams& p, int request)
      : qo_begin(LoadConstant(p.forward.qo_indptr + request)),
        qo_len(LoadConstant(p.forward.qo_indptr + request + 1) - qo_begin),
        q_begin(LoadConstant(p.q_begins + request)),
        kv_begin(LoadConstant(p.kv_indptr + request)),
        kv_len(LoadConstant(p.forward.kv_lens + request)) {}
};

// Takes the next number of a counter, by one warp.
__device__ __forceinline__ u32 TakeNumber(i32* counter) {
  u32 number = 0;
  if (threadIdx.x % kWarpSize == 0) number = static_cast<u32>(AddRelaxed(counter, 1));
  return __shfl_sync(kFullWarp, number, 0);
}

// Finds units by their numbers, which ascend from call to call.
struct UnitSearch {
  int request;  // the next request to look at
  u32 units;    // units of the requests before it

  // Called by a warp; all lanes have the same search. Returns the request of unit `number`, and the
  // unit's index within the request; -1: there is none. units_of: units of a request.
  template <class UnitsOf>
  __device__ __forceinline__ int Find(u32 number, int batch_size, u32& unit_index,
                                      const UnitsOf& units_of) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll 1
    for (; request < batch_size; request += kWarpSize) {
      const u32 mine = request + lane < batch_size ? units_of(request + lane) : 0;
      u32 sum = mine;
#pragma unroll
      for (int i = 1; i < kWarpSize; i *= 2) {
        const u32 other = __shfl_up_sync(kFullWarp, sum, i);
        if (lane >= i) sum += other;
      }
      const u32 found = __ballot_sync(kFullWarp, units + sum > number);
      if (found != 0) {
        const int who = __ffs(found) - 1;
        unit_index = __shfl_sync(kFullWarp, number - (units + sum - mine), who);
        return request + who;
      }
      units += __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    }
    return -1;
  }
};

template <class Traits>
class BackwardIndex {
 public:
  __device__ __forceinline__ explicit BackwardIndex(const BackwardCudaParams& p, int batch_size)
      : p_(p), batch_size_(batch_size) {}

  // kBackwardReadPlan: what each item and each entry tells alone.
  __device__ __forceinline__ void ReadPlan(int num_items, int thread, int num_threads) const {
    const AttentionParams& f = p_.forward;
#pragma unroll 1
    for (int i = thread; i < num_items; i += num_threads) {
      const ItemRecord item(f, i);
      // A shared item's position is no request's. All other items of a request agree.
      if (item.is_shared()) continue;
      const int request = item.request();
      p_.q_begins[request] =
          item.q_pos() - (item.first_token() - LoadConstant(f.qo_indptr + request));
      if constexpr (Traits::kStepKeys > 0) PutList(item);
    }
    if constexpr (Traits::kPageSize > 0) {
#pragma unroll 1
      for (int e = FirstEntry() + thread; e < EndOfEntries(); e += num_threads) {
        const int request = RequestOf(e);
        const int slot = e - LoadConstant(p_.kv_indptr + request);
        if (slot >= CeilDiv(LoadConstant(f.kv_lens + request), Traits::kPageSize)) continue;
        const int page = LoadConstant(f.page_indices + e);
        const int len = LoadConstant(f.kv_lens + request) - slot * Traits::kPageSize;
        p_.is_read[e] = 1;
        MaxRelaxed(p_.first_entries + page, static_cast<u32>(p_.max_entries - e));
        MaxRelaxed(p_.last_entries + page, static_cast<u32>(e + 1));
        if (p_.page_lens != nullptr) {
          MaxRelaxed(p_.page_lens + page, static_cast<u32>(Min(len, Traits::kPageSize)));
        }
      }
    }
  }

  // kBackwardLinkPages: chains the entries with the same page. Mostly neighbours share pages, so
  // the next entry is about a page table away.
  __device__ __forceinline__ void LinkPages(int thread, int num_threads) const {
    const AttentionParams& f = p_.forward;
#pragma unroll 1
    for (int e = FirstEntry() + thread; e < EndOfEntries(); e += num_threads) {
      if (LoadConstant(p_.is_read + e) == 0) continue;
      const int page = LoadConstant(f.page_indices + e);
      if (p_.run_ends != nullptr) FindOwner(e);
      const int last = LoadConstant(p_.last_entries + page) - 1;
      if (e == last) continue;
      int next = e + 1;
      while (LoadConstant(f.page_indices + next) != page || LoadConstant(p_.is_read + next) == 0) {
        ++next;
      }
      p_.next_entries[e] = next + 1;
    }
  }

  // The request whose page table has entry e of page_indices.
  __device__ __forceinline__ int RequestOf(int e) const {
    int low = 0, high = batch_size_ - 1;  // the last request that begins at e or before
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
  // Adds the item's part of its tile's list, which all heads share. Items of a tile divide its
  // list.
  __device__ __forceinline__ void PutList(const ItemRecord& item) const {
    const int begin = item.kv_begin() / Traits::kStepKeys, end = item.kv_end() / Traits::kStepKeys;
    if (item.kv_head() != 0 || begin >= end) return;
    const int row_end = item.first_token() + item.qo_len();
#pragma unroll 1
    for (int row = item.first_token(); row < row_end; ++row) {
      MaxRelaxed(p_.list_begins + row, static_cast<u32>(p_.forward.max_steps - begin));
      MaxRelaxed(p_.list_ends + row, static_cast<u32>(end));
      MaxRelaxed(p_.tile_ends + row, static_cast<u32>(row_end));
    }
  }

  // The first entry with the page of entry e.
  __device__ __forceinline__ int FirstWithPageOf(int e) const {
    const int page = LoadConstant(p_.forward.page_indices + e);
    return p_.max_entries - LoadConstant(p_.first_entries + page);
  }

  // For the Hopper kernel: the owner of an entry's page is the first request with it. A request
  // shares pages with an owner from its first page on, at the same offsets; otherwise the portable
  // kernel is needed. Then owners ascend along every table, and each owns one run of it.
  __device__ __forceinline__ void FindOwner(int e) const {
    const AttentionParams& f = p_.forward;
    const int request = RequestOf(e), begin = LoadConstant(p_.kv_indptr + request);
    const int slot = e - begin, first = FirstWithPageOf(e);
    const int kv_len = LoadConstant(f.kv_lens + request);
    int low = slot, high = CeilDiv(kv_len, Traits::kPageSize);
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (FirstWithPageOf(begin + middle) - first == middle - slot) {
        low = middle;
      } else {
        high = middle;
      }
    }
    p_.readers[e] = request;
    p_.run_ends[e] = Min(high * Traits::kPageSize, kv_len);
    if (first == e) return;
    MaxRelaxed(p_.own_begins + request, static_cast<u32>((slot + 1) * Traits::kPageSize));
    bool is_prefix = first - LoadConstant(p_.kv_indptr + RequestOf(first)) == slot;
    if (is_prefix && slot > 0) {
      is_prefix = LoadConstant(f.page_indices + e - 1) == LoadConstant(f.page_indices + first - 1);
    }
    if (!is_prefix) MaxRelaxed(p_.needs_portable, 1);
  }

  __device__ int FirstEntry() const { return batch_size_ > 0 ? LoadConstant(p_.kv_indptr) : 0; }
  __device__ int EndOfEntries() const {
    return batch_size_ > 0 ? LoadConstant(p_.kv_indptr + batch_size_) : 0;
  }

  const BackwardCudaParams& p_;
  const int batch_size_;
};

}  // namespace jax_attn
