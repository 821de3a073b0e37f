// Attention in plain FFMA for f32 inputs: tensor cores would round them to 10 bits. Kept simple; it
// reads the same plan and writes the same states as the fast kernels.
#pragma once

#include "cuda/common/budget.cuh"
#include "cuda/common/logits.cuh"
#include "cuda/common/partials.cuh"

namespace jax_attn {

// Eight threads share a row. Each computes every eighth logit of a step, and every eighth group of
// four columns of o.
template <class Traits>
struct AttentionF32Body {
  // --- shape ---

  static constexpr int kNumThreads = Traits::kNumWarps * kWarpSize;
  static constexpr int kRowThreads = 8;
  static constexpr int kRows = Traits::kTileQ0;
  static constexpr int kStep = Traits::kTileKv;  // kv tokens
  static constexpr int kStages = Traits::kNumStages;
  static constexpr int kGroupSize = Traits::kGroupSize;
  static constexpr int kQkDim = Traits::kHeadDimQk, kVoDim = Traits::kHeadDimVo;
  static constexpr int kLogits = kStep / kRowThreads;                // for each thread
  static constexpr int kVectors = CeilDiv(kVoDim, 4 * kRowThreads);  // of o, for each thread
  static_assert(Traits::kNumTiles == 1 && kRows * kRowThreads == kNumThreads, "a row, 8 threads");
  static_assert(kStep % kRowThreads == 0 && kRows >= kGroupSize, "whole logits, whole tokens");

  // Rows are 4 floats longer than their data, so that eight of them start in different banks.
  struct alignas(16) Shared {
    float q[kRows][kQkDim + 4];
    float k[kStages][kStep][kQkDim + 4];
    float v[kStages][kStep][kVoDim + 4];
    float p[kRows][kStep];  // P, or UnseenP
    MergeScratch merge;
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinCtasPerSm =
      kNumThreads <= 256 && kSmemBytes <= CtaSmemBudget(Traits::kArch, 2) ? 2 : 1;

  __device__ __forceinline__ static void Run(const AttentionParams& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    const KvPools pools = FindPools<Traits, sizeof(float)>(p);
    if (threadIdx.x == 0) shared.merge.counters = LaunchCounters(p);
    __syncthreads();
    for (int index = QueueBegin(p); index < QueueEnd(p); ++index) {
      RecordBegin<Traits>(p, index, threadIdx.x);
      RunItem(p, pools, index, shared);
      RecordEnd<Traits>(p, index, threadIdx.x);
    }
    FinishLaunch<Traits, sizeof(float)>(p, threadIdx.x, blockDim.x);
  }

  // --- load ---

  __device__ static void LoadQ(const AttentionParams& p, const WorkItem& item, Shared& shared) {
    const QueryRows<kGroupSize> rows(p, item.first_token, item.kv_head, IsShared(item));
    for (int i = threadIdx.x; i < kRows * kQkDim; i += kNumThreads) {
      const int row = i / kQkDim, column = i % kQkDim;
      const bool live = row < item.qo_len * kGroupSize;
      shared.q[row][column] =
          live ? static_cast<const float*>(p.q)[rows.Index(row) * kQkDim + column] : 0.0f;
    }
  }

  // Starts the copies of the step at `pos`. Tokens outside the item's span become zeros.
  // fresh_rows: k_new or v_new.
  template <int kDim>
  __device__ static void LoadRows(const AttentionParams& p, const WorkItem& item, const char* pool,
                                  const void* fresh_rows, int pos, float (&rows)[kStep][kDim + 4]) {
    constexpr int kChunks = kDim / 4;
    const i64 row_bytes = static_cast<i64>(p.num_kv_heads) * kDim * sizeof(float);
    for (int i = threadIdx.x; i < kStep * kChunks; i += kNumThreads) {
      const int token = pos + i / kChunks, chunk = i % kChunks;
      const bool in_span = Traits::kHasSteps ? token < p.kv_lens[item.request]
                                             : token >= item.kv_begin && token < item.kv_end;
      const char* from = pool;
      if (in_span) {
        u32 row;
        if constexpr (Traits::kPageSize > 0) {
          const i32 page = LoadPage<Traits::kPageSize>(p, item.kv_base, token);
          row = PoolRow<Traits::kPageSize>(page, token);
        } else {
          row = static_cast<u32>(item.kv_base) + token;
        }
        if constexpr (Traits::kHasFreshKv) {
          const FreshTokens fresh(p, item.request);
          if (token >= fresh.begin) {
            row = fresh.Row(token);
            from = static_cast<const char*>(fresh_rows);
          }
        }
        from += row * row_bytes + (item.kv_head * kChunks + chunk) * 16;
      }
      CopyAsync16(SharedAddress(&rows[i / kChunks][chunk * 4]), from, in_span);
    }
  }

  // --- one item ---

  __device__ static void RunItem(const AttentionParams& p, const KvPools& pools, int index,
                                 Shared& shared) {
    const WorkItem& item = p.items[index];
    const int row = threadIdx.x / kRowThreads, part = threadIdx.x % kRowThreads;
    const LogitStage<Traits> stage(p, index);
    const VisibleSpan span = SpanOfRow<Traits>(p, ItemRecord(p, index), row);
    const int first = item.kv_begin / kStep * kStep;
    const int num_steps = item.kv_begin < item.kv_end ? CeilDiv(item.kv_end - first, kStep) : 0;
    const auto at = [&](int step) { return KvStep<Traits>(p, first + step * kStep, item.kv_end); };
    const auto load = [&](int step) {
      if (step < num_steps) {
        const int pos = at(step).begin();
        LoadRows<kQkDim>(p, item, pools.k, p.k_new, pos, shared.k[step % kStages]);
        LoadRows<kVoDim>(p, item, pools.v, p.v_new, pos, shared.v[step % kStages]);
      }
      CommitCopies();
    };

    float max_log4 = stage.InitialMax(), sum = 0.0f;
    float4 o[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) o[i] = make_float4(0, 0, 0, 0);
    LoadQ(p, item, shared);
    for (int step = 0; step < kStages - 1; ++step) load(step);
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
      load(step + kStages - 1);
      WaitCopies<kStages - 1>();
      __syncthreads();
      float s[kLogits];
      MultiplyQk(shared, step % kStages, row, part, s);
      Softmax(stage, Layout(row, part), span, at(step), s, &max_log4, &sum, o,
              shared.p[row] + part);
      __syncwarp();  // the threads of a row are of one warp
      MultiplyPv(shared, step % kStages, row, part, o);
      __syncthreads();
    }
    Finish(p, item, row, part, max_log4, sum, o);
    if (item.num_groups > 0) {
      ArriveAndMerge<Traits>(p, index, item.merge_idx, item.num_groups, shared.merge);
    }
    __syncthreads();  // the next item's q overwrites this one's
  }

  // --- qk ---

  __device__ static void MultiplyQk(const Shared& shared, int stage, int row, int part,
                                    float (&s)[kLogits]) {
#pragma unroll
    for (int i = 0; i < kLogits; ++i) s[i] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < kQkDim; d += 4) {
      const float4 q = *reinterpret_cast<const float4*>(&shared.q[row][d]);
#pragma unroll
      for (int i = 0; i < kLogits; ++i) {
        const float4 k =
            *reinterpret_cast<const float4*>(&shared.k[stage][part + i * kRowThreads][d]);
        s[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, s[i]))));
      }
    }
  }

  // --- softmax ---

  using Layout = OneRowLayout<kLogits, kRowThreads>;
  // p: where P of s[0] goes; those of s[i] follow kRowThreads apart.
  __device__ static void Softmax(const LogitStage<Traits>& stage, const Layout& layout,
                                 const VisibleSpan& span, const KvStep<Traits>& step,
                                 float (&s)[kLogits], float* max_log4, float* sum,
                                 float4 (&o)[kVectors], float* p) {
    stage.Transform(layout, step.begin(), step.is_masked(), s);
    const float scale = stage.scale();
    float new_max = *max_log4;
    bool sees[1][kLogits];
    stage.Look(layout, step.begin(), step.is_masked(), [&](int) { return span; }, sees);
    const bool (&seen)[kLogits] = sees[0];
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      if (seen[i] && stage.kNormalizes) new_max = fmaxf(new_max, s[i] * (0.5f * scale));
    }
#pragma unroll
    for (int mask = 1; mask < kRowThreads; mask *= 2) {
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, mask));
    }
    const float factor = StateWeight(*max_log4, new_max);
    *max_log4 = new_max;
    *sum *= factor;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      o[i] = make_float4(o[i].x * factor, o[i].y * factor, o[i].z * factor, o[i].w * factor);
    }
    if (IsFar(new_max)) {
      const float inverse = 1.0f / scale;
#pragma unroll
      for (int i = 0; i < kLogits; ++i) s[i] = FarScore(s[i], scale, inverse, new_max);
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      const float probability = LogitStage<Traits>::Weight(s[i], scale, BaseOf(new_max));
      if (seen[i]) *sum += probability;
      p[i * kRowThreads] = seen[i] ? probability : UnseenP();
    }
  }

  // --- pv ---

  __device__ static void MultiplyPv(const Shared& shared, int stage, int row, int part,
                                    float4 (&o)[kVectors]) {
#pragma unroll 2
    for (int token = 0; token < kStep; ++token) {
      const float p = shared.p[row][token];
      if (IsUnseenP(p)) continue;  // must not add 0 * v, the value may be NaN
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int column = 4 * (part + i * kRowThreads);
        if (column < kVoDim) {
          Accumulate(o[i], p, *reinterpret_cast<const float4*>(&shared.v[stage][token][column]));
        }
      }
    }
  }

  // --- finish ---

  __device__ static void Finish(const AttentionParams& p, const WorkItem& item, int row, int part,
                                float max_log4, float sum, const float4 (&o)[kVectors]) {
#pragma unroll
    for (int mask = 1; mask < kRowThreads; mask *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, mask);
    }
    if (row >= item.qo_len * kGroupSize) return;
    const RowMap<kGroupSize> map(p, item.first_token, item.kv_head);
    const bool final = item.partial_row < 0;
    const i64 at = final ? map.Index(row) : item.partial_row + row;
    float* to = (final ? static_cast<float*>(p.o) : p.partial_o) + at * kVoDim;
    const float o_scale =
        WriteState<Traits>(p, final, at, map.QoHead(row), part == 0, {max_log4, sum});
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = 4 * (part + i * kRowThreads);
      float4 x = make_float4(0, 0, 0, 0);
      Accumulate(x, o_scale, o[i]);
      if (column < kVoDim) Store4<kElementF32>(to, column, x);
    }
  }
};

}  // namespace jax_attn
