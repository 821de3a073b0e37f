// Runs a case of backward_cuda_cases.h in backward*_sm90_test.cc with LaunchBackward's launches.
//
// Include cuda_emulation.h and cuda_emulation_sm90.h before this file.
#pragma once

#include "cuda/backward_cuda_cases.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm90/backward.cuh"
#include "part.h"

namespace jax_attn {
namespace {

void AddMaps(const AttentionSpec& spec, BackwardCudaParams* p) {
  AttentionParams& f = p->forward;
  const auto dim_qk = static_cast<i32>(spec.head_dim_qk),
             dim_vo = static_cast<i32>(spec.head_dim_vo);
  const auto map = [&](const void* array, int64_t rows, int64_t heads, i32 dim, i32 tile_rows) {
    const emulation::TmaArray tiled = {static_cast<u16*>(const_cast<void*>(array)),
                                       1,
                                       static_cast<u64>(rows),
                                       static_cast<u64>(heads),
                                       static_cast<u64>(dim),
                                       static_cast<u64>(tile_rows),
                                       1};
    TensorMap bits = {};
    std::memcpy(&bits, &tiled, sizeof(tiled));
    return bits;
  };
  const i32 tile = HopperBackwardRows(dim_qk, dim_vo);
  p->q_map = map(f.q, spec.max_qo_tokens, spec.num_qo_heads, dim_qk, tile);
  p->d_o_map = map(p->d_o, spec.max_qo_tokens, spec.num_qo_heads, dim_vo, tile);
  const int64_t kv_rows = spec.paged() ? f.num_pages * spec.page_size : spec.max_kv_tokens;
  const i32 kv_tile =
      HopperBackwardTmaRows(static_cast<i32>(spec.page_size), HopperBackwardKeys(dim_qk, dim_vo));
  f.k_map = map(f.k, kv_rows, spec.num_kv_heads, dim_qk, kv_tile);
  f.v_map = map(f.v, kv_rows, spec.num_kv_heads, dim_vo, kv_tile);
  f.has_tensor_maps = 1;
}

// With poison, or with common pages that are no prefixes, the portable kernel must recompute
// everything. Each run has another number of CTAs.
template <class Shape>
void RunInPart(const Case& c, unsigned seed, bool uses_tma, Poison poison, Tables tables) {
  using Traits = typename Kernel<Shape, 90>::Traits;
  using Portable = BackwardBody<Traits>;
  using Hopper = HopperBackwardBody<Traits>;
  RunBackward<Traits>(
      c, seed, poison, tables,
      [=](const Case& c, const AttentionSpec& spec, const BackwardCudaParams& given,
          std::mt19937& random) {
        BackwardCudaParams params = given;
        if (!RunsHopperBackward({spec, {}})) {
          std::printf("FAILED %s: not a case of the Hopper kernel\n", c.name);
          ++g_failures;
          return;
        }
        // As XLA passes them.
        void* const results[] = {params.d_q, params.d_k, params.d_v};
        for (int i = 0; i < (spec.paged() ? 1 : 3); ++i) {
          std::memset(results[i], 0x7f, 2 * params.num_elements[i]);
        }
        const i64 num_sums =
            static_cast<i64>(params.max_tiles) * spec.num_qo_heads * Hopper::Shape::kSumWords;
        if (num_sums > 0) std::memset(params.d_q_sums, 0xff, 4 * num_sums);
        if (uses_tma) AddMaps(spec, &params);
        Case with = c;
        with.num_ctas = 1 + random() % 9;
        const auto expect = [&](const char* what, i32 got, bool expected) {
          if (got == static_cast<i32>(expected)) return;
          std::printf("FAILED %s: %s is %d\n", c.name, what, got);
          ++g_failures;
        };
        const bool no_prefixes = tables == kScattered || tables == kAllButTheFirst;
        Emulate<Portable>(with, params, kBackwardReadPlan, random);
        if (spec.paged()) Emulate<Portable>(with, params, kBackwardLinkPages, random);
        expect("needs_portable, of pages,", *params.needs_portable, no_prefixes);
        Emulate<Hopper>(with, params, kBackwardSums, random);
        if (no_prefixes) expect("num_blocks_taken", *params.num_blocks_taken, false);
        Emulate<Hopper>(with, params, kBackwardRound, random);
        expect("needs_portable", *params.needs_portable, no_prefixes || poison != kNone);
        Emulate<Portable>(with, params, kBackwardRows, random);
      });
  std::printf("%s%s: %d bytes of shared memory\n", c.name, uses_tma ? ", TMA" : "",
              Hopper::kSmemBytes);
}

template <class Shape>
void Run(const Case& c, unsigned seed, bool uses_tma, Poison poison = kNone,
         Tables tables = kOfCase) {
  g_part.has_asked = true;
  if constexpr (InPart<Shape>()) {
    if (TakesCase<Shape>()) RunInPart<Shape>(c, seed, uses_tma, poison, tables);
  }
}

template <class Shape>
void RunDamaged() {
  using Traits = typename Kernel<Shape, 90>::Traits;
  const Case c = {.name = "damaged headers", .requests = {{150, 150}, {3, 17}}, .kv_heads = 1};
  RunDamagedHeaders<Traits>(
      c, [&](const AttentionSpec& spec, BackwardCudaParams params, std::mt19937& random) {
        AddMaps(spec, &params);
        Emulate<BackwardBody<Traits>>(c, params, kBackwardReadPlan, random);
        if (spec.paged()) Emulate<BackwardBody<Traits>>(c, params, kBackwardLinkPages, random);
        Emulate<HopperBackwardBody<Traits>>(c, params, kBackwardSums, random);
        Emulate<HopperBackwardBody<Traits>>(c, params, kBackwardRound, random);
        Emulate<BackwardBody<Traits>>(c, params, kBackwardRows, random);
      });
}

}  // namespace
}  // namespace jax_attn
