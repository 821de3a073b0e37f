// Stream-K in the device planner: all tiles in one line, cut into equal ranges, one a queue.
#pragma once

#include "cuda/any/plan_deal.cuh"

namespace jax_attn {

template <class Traits, bool kGeneral>
class PlanRanges : public PlanDealer<Traits, kGeneral> {
  using Base = PlanDealer<Traits, kGeneral>;

 public:
  using Base::Base;

 protected:
  using Base::chosen_, Base::kNumThreads, Base::makespan_, Base::MostOf, Base::num_chunks_,
      Base::num_tiles_, Base::Prefix, Base::rules_, Base::Sum, Base::TakeChunks, Base::TakeTiles,
      Base::thread_, Base::TileOfChunk, Base::tiles_;

  // Stream-K. Replaces the chosen schedule if its fullest queue has less than `makespan`.
  __device__ void TryRanges(i64 makespan) {
    PlanTrial trial = TakeTiles();
    i64* places = this->template Take<i64>(num_tiles_ + 1);
    const i64 line = Prefix(num_tiles_, places, [&](i32 i) {
      const QueryTile& t = tiles_[i];
      return ItemCost(rules_, t, t.kv_end - t.kv_begin, false);
    });
    const RangeCut ranges = MakeRangeCut(rules_, tiles_[0], line);
    // Borders, 1 to num_ranges - 1, are entries 0 to n - 1 here.
    const i32 n = ranges.num_ranges - 1;
    i32* tiles = this->template Take<i32>(n + 1);
    i32* positions = this->template Take<i32>(n + 1);
    i32* cut_tiles = this->template Take<i32>(n + 1);
    i32* num_inner = this->template Take<i32>(n + 1);
    inner_ = this->template Take<i32>(n + 1);

    // First guess: every border in a tile of its own. Then with the tiles of the first guess.
#pragma unroll 1
    for (i32 b = thread_; b <= n; b += kNumThreads) cut_tiles[b] = b;
    __syncthreads();
#pragma unroll 1
    for (int guess = 0; guess < 2; ++guess) {
      const i32 all_cut_tiles = cut_tiles[n];
#pragma unroll 1
      for (i32 b = thread_; b < n; b += kNumThreads) {
        const i64 place = BorderPlace(ranges, b + 1, cut_tiles[b + 1], all_cut_tiles);
        tiles[b] = LastAtMost(places, num_tiles_, place);
        positions[b] = BorderPosition(rules_, tiles_[tiles[b]], places[tiles[b]], place);
      }
      __syncthreads();
      if (guess > 0) break;
      Prefix(n, cut_tiles,
             [&](i32 b) { return static_cast<i64>(b == 0 || tiles[b] != tiles[b - 1]); });
    }
    // Those that cut a tile, each once.
    auto is_inner = [&](i32 b) {
      const QueryTile& t = tiles_[tiles[b]];
      if (positions[b] <= t.kv_begin || positions[b] >= t.kv_end) return false;
      return b == 0 || tiles[b] != tiles[b - 1] || positions[b] != positions[b - 1];
    };
    Prefix(n, num_inner, [&](i32 b) { return static_cast<i64>(is_inner(b)); });
#pragma unroll 1
    for (i32 b = thread_; b < n; b += kNumThreads) {
      if (num_inner[b + 1] > num_inner[b]) inner_[num_inner[b]] = positions[b];
    }
    // Entries of `tiles` below i.
    auto borders_before = [&](i32 i) {
      return n == 0 || tiles[0] >= i ? 0 : LastAtMost(tiles, n, i - 1) + 1;
    };
#pragma unroll 1
    for (i32 i = thread_; i <= num_tiles_; i += kNumThreads) {
      trial.chunk_base[i] = i + num_inner[borders_before(i)];
    }
    __syncthreads();
    const i32 num_chunks = trial.chunk_base[num_tiles_];
    TakeChunks(&trial, num_chunks);

    // Queue of a chunk: the borders at or before its begin.
    const i64 num_split = Sum(num_chunks, [&](i32 c) {
      const i32 i = TileOfChunk(trial, num_chunks, c);
      const i32 split = c - trial.chunk_base[i];
      const i32 splits = trial.chunk_base[i + 1] - trial.chunk_base[i];
      const QueryTile& t = tiles_[i];
      const i32 begin = RangeBegin(trial, t, i, split);
      i32 queue = borders_before(i);
#pragma unroll 1
      while (queue < n && tiles[queue] == i && positions[queue] <= begin) ++queue;
      trial.slots[c].queue = queue;
      const i64 kv_tokens = RangeEnd(trial, t, i, split, splits) - begin;
      trial.keys[c] = ChunkKey(0, c);
      trial.costs[c] = ItemCost(rules_, t, kv_tokens, splits > 1);
      return static_cast<i64>(splits > 1);
    });
#pragma unroll 1
    for (i32 q = thread_; q < rules_.num_queues; q += kNumThreads) trial.filled[q] = 0;
    __syncthreads();
    // The first chunk of a queue, kept in `loads` for the others.
#pragma unroll 1
    for (i32 c = thread_; c < num_chunks; c += kNumThreads) {
      const i32 queue = trial.slots[c].queue;
      if (c == 0 || trial.slots[c - 1].queue != queue) trial.loads[queue] = c;
    }
    __syncthreads();
#pragma unroll 1
    for (i32 c = thread_; c < num_chunks; c += kNumThreads) {
      const i32 queue = trial.slots[c].queue;
      trial.slots[c].place = c - static_cast<i32>(trial.loads[queue]);
      const bool last = c == num_chunks - 1 || trial.slots[c + 1].queue != queue;
      if (last) trial.filled[queue] = c - static_cast<i32>(trial.loads[queue]) + 1;
    }
    __syncthreads();
    bool lighter = true;
    i64 fullest = 0;
#pragma unroll 1
    for (i32 q = thread_; q < rules_.num_queues; q += kNumThreads) {
      i64 load = 0;
#pragma unroll 1
      for (i32 k = 0; k < trial.filled[q]; ++k) {
        load += trial.costs[static_cast<i32>(trial.loads[q]) + k];
      }
      lighter &= load < makespan;
      if constexpr (kGeneral) fullest = Largest(fullest, load);
    }
    const bool rejected = num_split * rules_.num_kv_heads > rules_.max_balanced_partials;
    if (__syncthreads_or(!lighter) || rejected) return;
    if constexpr (kGeneral) makespan_ = MostOf(fullest);
    chosen_ = trial;
    num_chunks_ = num_chunks;
    by_ranges_ = true;
  }

  // Borders of a chunk of a schedule by ranges.
  __device__ i32 RangeBegin(const PlanTrial& trial, const QueryTile& t, i32 i, i32 split) const {
    return split == 0 ? t.kv_begin : inner_[trial.chunk_base[i] - i + split - 1];
  }
  __device__ i32 RangeEnd(const PlanTrial& trial, const QueryTile& t, i32 i, i32 split,
                          i32 splits) const {
    return split + 1 == splits ? t.kv_end : inner_[trial.chunk_base[i] - i + split];
  }

  bool by_ranges_ = false;

 private:
  i32* inner_ = nullptr;  // the positions that cut a tile, in order
};

}  // namespace jax_attn
