// Chunked linear attention without a GPU: its launches in emulation against the recurrence in
// f64. Requests of odd lengths, empty ones, splits into segments, checkpoints inside of requests,
// slots that nobody names, padding, faulty plans. Include the emulation first.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/common/linear_tiles.cuh"
#include "cuda/common/state_plan.cuh"
#include "spec.h"

namespace jax_attn {
namespace {

int g_failures = 0;

template <int kK, int kV, int kColumns, bool kDelta, bool kL2, bool kBf16, int kDecayKind>
struct LinearShape {
  static constexpr int kArch = 90, kDtype = kElementBf16;
  static constexpr int kHeadDimK = kK, kHeadDimV = kV, kTileColumns = kColumns;
  static constexpr int kDecay = kDecayKind;
  static constexpr bool kHasDeltaRule = kDelta, kHasL2Norm = kL2, kHasBf16States = kBf16;
};
template <class Shape, int kThePhase>
struct LinearTraits : Shape {
  static constexpr int kPhase = kThePhase;
};

struct LinearCase {
  std::vector<int> lens;  // of requests; each reads and writes the slot of its number
  int qk_heads, v_heads, segment_chunks;
  float least_log;              // decays are exp of logs between this and 0
  bool has_checkpoint = false;  // of request 0 after 5 tokens
  bool is_faulty = false, repeats_keys = false;
  int parts = 0;        // CTAs for each chunk; 0: one for each q and k head
  int fast_chunk = -1;  // of the tokens, whose decays make a state 0
};

inline float RoundToBf16(float x) { return Bf16ToFloat(FloatToBf16(x)); }

template <class Body>
void LaunchLinear(int num_ctas, const LinearAttentionParams& p, unsigned seed) {
  if (Body::kSmemBytes > static_cast<int>(sizeof(smem))) emulation::Fail("no room");
  emulation::machine.Launch(num_ctas, Body::kNumThreads, seed, [&] { Body::Run(p); });
}

// BodyOf<Traits>: of a phase.
template <class Shape, template <class> class BodyOf>
void RunLinearCase(const char* what, const LinearCase& c) {
  constexpr int kK = Shape::kHeadDimK, kV = Shape::kHeadDimV;
  const int requests = static_cast<int>(c.lens.size());
  int tokens = 0;
  for (const int len : c.lens) tokens += len;
  const int max_tokens = tokens + 3, slots = requests + 2, group = c.v_heads / c.qk_heads;
  std::mt19937 rng(17);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0, 1);

  // One vector of NaN behind the tokens, which must not matter.
  std::vector<u16> q(max_tokens * c.qk_heads * kK, 0x7fff), k(q.size(), 0x7fff);
  std::vector<u16> v(max_tokens * c.v_heads * kV, 0x7fff), o(v.size(), 0x1234);
  std::vector<float> g(max_tokens * c.v_heads, NAN), beta(g.size(), NAN);
  for (int i = 0; i < tokens * c.qk_heads * kK; ++i) {
    q[i] = static_cast<u16>(FloatToBf16(normal(rng) * (Shape::kHasL2Norm ? 1 : 0.2f)));
    k[i] = static_cast<u16>(FloatToBf16(normal(rng) * (Shape::kHasL2Norm ? 3 : 0.08f)));
    const int row = c.qk_heads * kK;
    if (c.repeats_keys && i >= row && i / row % 4 != 0) k[i] = k[i - row];
  }
  for (int i = 0; i < tokens * c.v_heads * kV; ++i) {
    v[i] = static_cast<u16>(FloatToBf16(normal(rng)));
  }
  for (int i = 0; i < tokens * c.v_heads; ++i) {
    g[i] = c.least_log * uniform(rng);
    if (i / c.v_heads / kLinearTokens == c.fast_chunk) g[i] -= 2;
    beta[i] = c.repeats_keys ? 1.0f : uniform(rng);
  }
  const i64 of_state = static_cast<i64>(kK) * kV;
  std::vector<float> states(2 * slots * c.v_heads * of_state);
  for (float& x : states) x = normal(rng);
  const std::vector<float> before = states;
  std::vector<u16> bf16_states(states.size());
  for (size_t i = 0; i < states.size(); ++i) {
    bf16_states[i] = static_cast<u16>(FloatToBf16(states[i]));
  }

  std::vector<StateChunk> chunks;
  int begin = 0;
  for (int r = 0; r < requests; ++r) {
    const int cut = c.has_checkpoint && r == 0 ? 5 : 0;
    int done = 0;
    do {
      const bool in_cut = done < cut;
      const int num = std::min(kLinearTokens, (in_cut ? cut : c.lens[r]) - done);
      const bool is_last = !in_cut && done + num == c.lens[r];
      chunks.push_back({begin + done, num, done == 0, r, is_last ? r : in_cut ? requests : -1, r});
      done += num;
    } while (done < c.lens[r]);
    begin += c.lens[r];
  }
  const int num_chunks = static_cast<int>(chunks.size()), max_chunks = num_chunks + 2;
  chunks.resize(max_chunks, {1 << 30, 1 << 30, 0, 7, 7, 7});
  const i32 header[kStatePlanHeaderWords] = {requests, tokens, num_chunks, c.is_faulty ? 3 : 0};
  const i32 layer = 1;

  LinearAttentionParams p = {};
  p.q = q.data();
  p.k = k.data();
  p.v = v.data();
  p.g = Shape::kDecay == kNoDecay ? nullptr : g.data();
  p.beta = beta.data();
  p.states = Shape::kHasBf16States ? static_cast<void*>(bf16_states.data()) : states.data();
  p.o = o.data();
  p.plan = {header, chunks.data(), &layer, max_chunks, max_tokens, slots, 2};
  p.scale = 0.3f;
  p.num_qk_heads = c.qk_heads;
  p.num_v_heads = c.v_heads;
  p.segment_chunks = c.segment_chunks;
  using Outputs = BodyOf<LinearTraits<Shape, kLinearOutputs>>;
  constexpr int kPaddedK = CeilDiv(kK, 64) * 64;
  constexpr int kPaddedV = CeilDiv(kV, Shape::kTileColumns) * Shape::kTileColumns;
  const LinearWorkspace at(max_chunks, c.v_heads, kPaddedK, kPaddedV, c.segment_chunks);
  std::vector<uint4> workspace(at.size / 16 + 1, {~0u, ~0u, ~0u, ~0u});
  workspace[0].x = 0;
  p.workspace = workspace.data();
  LaunchLinear<BodyOf<LinearTraits<Shape, kLinearTerms>>>(
      max_chunks * (c.parts ? c.parts : c.qk_heads), p, 1);
  if (c.segment_chunks > 0) {
    LaunchLinear<BodyOf<LinearTraits<Shape, kLinearMaps>>>(3, p, 2);
    LaunchLinear<BodyOf<LinearTraits<Shape, kLinearStarts>>>(3, p, 4);
  }
  LaunchLinear<Outputs>(3, p, 3);

  // The recurrence.
  const auto value = [](u16 bits) { return static_cast<double>(Bf16ToFloat(bits)); };
  std::vector<double> exact(states.size()), expected(o.size());
  const i64 of_layer = slots * c.v_heads * of_state;
  for (size_t i = 0; i < exact.size(); ++i) {
    exact[i] = Shape::kHasBf16States ? RoundToBf16(before[i]) : before[i];
  }
  int t = 0;
  for (int r = 0; r < requests; ++r) {
    for (int i = 0; i < c.lens[r]; ++i, ++t) {
      for (int h = 0; h < c.v_heads; ++h) {
        double* s = &exact[of_layer + (r * c.v_heads + h) * of_state];
        const u16* rows[2] = {&k[(t * c.qk_heads + h / group) * kK],
                              &q[(t * c.qk_heads + h / group) * kK]};
        std::vector<double> kq[2];
        for (int which = 0; which < 2; ++which) {
          double squares = 1e-6;
          for (int d = 0; d < kK; ++d) squares += value(rows[which][d]) * value(rows[which][d]);
          const double factor = Shape::kHasL2Norm ? 1 / std::sqrt(squares) : 1;
          for (int d = 0; d < kK; ++d) kq[which].push_back(factor * value(rows[which][d]));
        }
        const double decay = Shape::kDecay == kNoDecay ? 1 : std::exp(g[t * c.v_heads + h]);
        for (i64 e = 0; e < of_state; ++e) s[e] *= decay;
        for (int j = 0; j < kV; ++j) {
          const i64 row = static_cast<i64>(t * c.v_heads + h) * kV + j;
          double seen = 0, sum = 0;
          for (int d = 0; d < kK; ++d) seen += s[d * kV + j] * kq[0][d];
          const double change = static_cast<double>(beta[t * c.v_heads + h]) *
                                (value(v[row]) - (Shape::kHasDeltaRule ? seen : 0));
          for (int d = 0; d < kK; ++d) {
            s[d * kV + j] += kq[0][d] * change;
            sum += s[d * kV + j] * kq[1][d];
          }
          expected[row] = 0.3f * sum;
        }
      }
      if (c.has_checkpoint && r == 0 && i == 4) {
        std::copy_n(&exact[of_layer], c.v_heads * of_state,
                    &exact[of_layer + requests * c.v_heads * of_state]);
      }
    }
  }
  if (c.is_faulty) exact.assign(before.begin(), before.end());

  const auto fail = [&](const char* which, double got, double limit) {
    ++g_failures;
    std::printf(
        "FAILED %s, dims %d x %d, heads %d / %d, %d requests, segments of %d: %s: %.3g, "
        "expected at most %.3g\n",
        what, kK, kV, c.qk_heads, c.v_heads, requests, c.segment_chunks, which, got, limit);
  };
  double error = 0, size = 0, worst = 0;
  const i64 live = c.is_faulty ? 0 : static_cast<i64>(tokens) * c.v_heads * kV;
  for (i64 i = 0; i < static_cast<i64>(o.size()); ++i) {
    const double got = value(o[i]);
    if (i < live) {
      const double off = std::abs(got - expected[i]);
      error += off * off;
      size += expected[i] * expected[i];
      worst = off <= worst ? worst : off;
    } else if (c.is_faulty ? !std::isnan(got) : o[i] != 0) {
      return fail("a row of padding", got, 0);
    }
  }
  error = std::sqrt(error / std::max(size, 1e-30));
  if (!(error <= 6e-3)) fail("relative error of o", error, 6e-3);
  const double most = 0.1 * std::sqrt(size / std::max<double>(static_cast<double>(live), 1));
  if (!(worst <= most)) fail("largest error of o", worst, most);
  double state_error = 0, state_size = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double got = Shape::kHasBf16States ? value(bf16_states[i]) : states[i];
    const i64 slot = (static_cast<i64>(i) - of_layer) / (c.v_heads * of_state);
    const bool is_named =
        static_cast<i64>(i) >= of_layer && !c.is_faulty && slot < requests + c.has_checkpoint;
    if (is_named) {
      state_error += (got - exact[i]) * (got - exact[i]);
      state_size += exact[i] * exact[i];
    } else if (got != (Shape::kHasBf16States ? RoundToBf16(before[i]) : before[i])) {
      return fail("a slot that nobody names", got, before[i]);
    }
  }
  state_error = std::sqrt(state_error / std::max(state_size, 1e-30));
  if (!(state_error <= 6e-3)) fail("relative error of the states", state_error, 6e-3);
  std::printf("%s %dx%d segments %d: o %.2g, worst %.2g, states %.2g\n", what, kK, kV,
              c.segment_chunks, error, worst, state_error);
}

template <template <class> class BodyOf>
void RunLinearCases() {
  using Gdn = LinearShape<128, 128, 128, true, true, false, kHeadDecay>;
  // Two or more segments before the last one, whose maps are not 0.
  RunLinearCase<Gdn, BodyOf>("slow decays", {{330}, 1, 1, 2, -0.01f});
  RunLinearCase<Gdn, BodyOf>("fast decays", {{257, 7}, 1, 2, 1, -3.0f, true});
  RunLinearCase<Gdn, BodyOf>("a map of zeros among others",
                             {{400}, 1, 1, 1, -0.01f, false, false, false, 0, 2});
  RunLinearCase<Gdn, BodyOf>("repeated keys", {{130}, 1, 1, 0, 0, false, false, true});
  RunLinearCase<Gdn, BodyOf>("a fault", {{30}, 1, 1, 1, -1.0f, false, true});
  using Bf16 = LinearShape<64, 72, 128, true, false, true, kHeadDecay>;
  RunLinearCase<Bf16, BodyOf>("bf16 states", {{65, 0, 64, 1, 193}, 2, 4, 2, -0.1f, true});
  RunLinearCase<Bf16, BodyOf>("a CTA for each v head",
                              {{70}, 1, 2, 0, -0.1f, false, false, false, 2});
  using Narrow = LinearShape<40, 24, 64, true, true, false, kNoDecay>;
  RunLinearCase<Narrow, BodyOf>("narrow", {{140, 5}, 1, 1, 1, 0, true});
  using Wide = LinearShape<96, 256, 128, true, true, false, kHeadDecay>;
  RunLinearCase<Wide, BodyOf>("wide", {{140}, 1, 1, 1, -0.02f});
  using Ssd = LinearShape<128, 64, 64, false, false, false, kHeadDecay>;
  RunLinearCase<Ssd, BodyOf>("no delta rule", {{100, 0, 3}, 1, 2, 0, -0.2f, true});
  RunLinearCase<Ssd, BodyOf>("sums", {{290}, 1, 2, 2, -0.01f});
  RunLinearCase<Ssd, BodyOf>("sums, fast decays", {{290}, 1, 2, 1, -3.0f});
}

}  // namespace
}  // namespace jax_attn
