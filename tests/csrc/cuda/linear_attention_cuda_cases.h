// Linear attention without a GPU: a body of csrc/cuda runs in emulation and must match the
// recurrence in f64. Include it after the emulation.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/state_plan.cuh"

namespace jax_attn {
namespace {

int g_failures = 0;

template <int kOfDtype, int kDimK, int kDimV, int kOfDecay, bool kDelta, bool kNorm, bool kBf16,
          int kColumns = 128, int kLoop = kRecurrence, int kOfArch = 90>
struct LinearTraits {
  static constexpr int kArch = kOfArch, kDtype = kOfDtype, kHeadDimK = kDimK, kHeadDimV = kDimV;
  static constexpr int kDecay = kOfDecay, kMainLoop = kLoop, kTileColumns = kColumns;
  static constexpr bool kHasDeltaRule = kDelta, kHasL2Norm = kNorm, kHasBf16States = kBf16;
};

// Arrays of an element type, as they are in memory.
class TypedArray {
 public:
  TypedArray(int dtype, size_t size)
      : dtype_(dtype), bytes_(size * (dtype == kElementF32 ? 4 : 2)) {
    std::memset(data(), 0xff, bytes_.size());
  }
  void* data() { return bytes_.data(); }
  size_t size() const { return bytes_.size() / (dtype_ == kElementF32 ? 4 : 2); }
  void Set(size_t at, float x) {
    if (dtype_ == kElementF32) {
      std::memcpy(&bytes_[at * 4], &x, 4);
    } else {
      const u16 bits = static_cast<u16>(dtype_ == kElementBf16 ? FloatToBf16(x) : FloatToF16(x));
      std::memcpy(&bytes_[at * 2], &bits, 2);
    }
  }
  double Get(size_t at) const {
    if (dtype_ == kElementF32) {
      float x;
      std::memcpy(&x, &bytes_[at * 4], 4);
      return static_cast<double>(x);
    }
    u16 bits;
    std::memcpy(&bits, &bytes_[at * 2], 2);
    return static_cast<double>(dtype_ == kElementBf16 ? Bf16ToFloat(bits)
                                                      : Element<kElementF16>::ToFloat(bits));
  }
  bool SameBits(size_t at, const TypedArray& other) const {
    const size_t size = dtype_ == kElementF32 ? 4 : 2;
    return std::memcmp(&bytes_[at * size], &other.bytes_[at * size], size) == 0;
  }

 private:
  int dtype_;
  struct alignas(16) Block {
    unsigned char bytes[16];
  };
  class Bytes {
   public:
    explicit Bytes(size_t size) : size_(size), blocks_((size + 15) / 16 + 1) {}
    unsigned char* data() { return blocks_[0].bytes; }
    const unsigned char* data() const { return blocks_[0].bytes; }
    unsigned char& operator[](size_t i) { return data()[i]; }
    const unsigned char& operator[](size_t i) const { return data()[i]; }
    size_t size() const { return size_; }

   private:
    size_t size_;
    std::vector<Block> blocks_;
  } bytes_;
};

struct LinearRequest {
  int length, read_slot, write_slot;
  int commit = -1;                                    // tokens; -1: all
  std::vector<std::pair<int, int>> checkpoints = {};  // (position, slot), ascending
};

// The words of a plan: a header, then chunks, as jax_attn/_plan/state_plan.py makes them.
struct PlanWords {
  std::vector<i32> words;
  i32 max_chunks, layer;
};
inline PlanWords MakeStatePlan(const std::vector<LinearRequest>& requests, int chunk_tokens,
                               int spare_chunks) {
  std::vector<StateChunk> chunks;
  int row = 0, number = 0;
  for (const LinearRequest& r : requests) {
    std::vector<std::pair<int, int>> cuts = r.checkpoints;  // the state there goes to a slot
    cuts.push_back({r.commit < 0 ? r.length : r.commit, r.write_slot});
    std::stable_sort(cuts.begin(), cuts.end());
    cuts.push_back({r.length, -1});
    int at = 0;
    bool is_first = true;
    for (const auto& [position, slot] : cuts) {
      int rest = position - at;
      if (rest == 0 && slot < 0) continue;
      do {
        const int length = std::min(rest, chunk_tokens);
        rest -= length;
        chunks.push_back({row + at, length, is_first, r.read_slot, rest == 0 ? slot : -1, number});
        at += length;
        is_first = false;
      } while (rest > 0);
    }
    row += r.length;
    ++number;
  }
  PlanWords plan;
  plan.max_chunks = static_cast<i32>(chunks.size()) + spare_chunks;
  plan.layer = 0;
  plan.words = {number, row, static_cast<i32>(chunks.size()), 0, 0, 0, 0, 0};
  for (int i = 0; i < spare_chunks; ++i) chunks.push_back({0, 0, 1, -1, -1, -1});
  for (const StateChunk& c : chunks) {
    plan.words.insert(plan.words.end(),
                      {c.begin, c.length, c.is_first, c.read_slot, c.write_slot, c.request});
  }
  return plan;
}
inline StatePlanParams ParamsOf(const PlanWords& plan, int max_tokens, int slots, int layers) {
  StatePlanParams p = {};
  p.header = plan.words.data();
  p.chunks = reinterpret_cast<const StateChunk*>(plan.words.data() + kStatePlanHeaderWords);
  p.layer = &plan.layer;
  p.max_chunks = plan.max_chunks;
  p.max_tokens = max_tokens;
  p.num_slots = slots;
  p.num_layers = layers;
  return p;
}

struct LinearCase {
  std::vector<LinearRequest> requests;
  int num_qk_heads, num_v_heads, num_slots;
  int padding = 3;  // rows behind the last token
  bool has_beta = true;
  float lowest_g = -1.0f;  // of decays
  int nan_request = -1;    // has a NaN in v of its first token
};

// Runs one case. launch(params) launches the body. tolerance: of o and states, relative to 1 + |x|
// in the types of both, on top of their rounding.
template <class Traits, class LaunchBody>
void RunLinearCase(const LinearCase& c, double tolerance, const LaunchBody& launch) {
  constexpr int kK = Traits::kHeadDimK, kV = Traits::kHeadDimV, kLayers = 2;
  constexpr int kStateDtype = Traits::kHasBf16States ? kElementBf16 : kElementF32;
  constexpr int kChunk = Traits::kDecay == kChannelDecay ? 16 : 64;
  const int heads = c.num_v_heads, group = heads / c.num_qk_heads;
  PlanWords plan = MakeStatePlan(c.requests, kChunk, 2);
  plan.layer = 1;
  const int tokens = plan.words[kStatePlanTokens], max_tokens = tokens + c.padding;
  std::mt19937 rng(static_cast<unsigned>(tokens * 131 + kK * 7 + kV + heads));
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;

  // Padding rows stay NaN.
  TypedArray q(Traits::kDtype, i64{max_tokens} * c.num_qk_heads * kK), k = q;
  TypedArray v(Traits::kDtype, i64{max_tokens} * heads * kV), o = v;
  const int channels = Traits::kDecay == kChannelDecay ? kK : 1;
  std::vector<float> g(i64{max_tokens} * heads * channels, NAN), beta(i64{max_tokens} * heads, NAN);
  const float k_size = Traits::kHasL2Norm ? 1.0f : 1.0f / std::sqrt(static_cast<float>(kK));
  for (i64 i = 0; i < i64{tokens} * c.num_qk_heads * kK; ++i) {
    q.Set(i, normal(rng));
    k.Set(i, k_size * normal(rng));
  }
  for (i64 i = 0; i < i64{tokens} * heads * kV; ++i) v.Set(i, normal(rng));
  for (i64 i = 0; i < i64{tokens} * heads * channels; ++i) g[i] = c.lowest_g * uniform(rng);
  for (i64 i = 0; i < i64{tokens} * heads; ++i) beta[i] = uniform(rng);
  const i64 state_size = i64{kK} * kV, of_slot = heads * state_size;
  // Slots that nobody reads, and the other layer, are NaN.
  TypedArray states(kStateDtype, kLayers * c.num_slots * of_slot);
  std::vector<bool> is_read(c.num_slots), is_written(c.num_slots);
  for (const LinearRequest& r : c.requests) {
    if (r.read_slot >= 0) is_read[r.read_slot] = true;
    if (r.write_slot >= 0) is_written[r.write_slot] = true;
    for (const auto& [position, slot] : r.checkpoints) {
      if (slot >= 0) is_written[slot] = true;
    }
  }
  const i64 layer = i64{plan.layer} * c.num_slots * of_slot;
  for (int slot = 0; slot < c.num_slots; ++slot) {
    for (i64 i = 0; is_read[slot] && i < of_slot; ++i) {
      states.Set(layer + slot * of_slot + i, normal(rng));
    }
  }
  const TypedArray before = states;

  // The recurrence in f64.
  std::vector<double> want_o(i64{max_tokens} * heads * kV, 0.0);
  std::vector<std::vector<double>> want_states(c.num_slots);
  for (auto& of : want_states) of.assign(of_slot, 0.0);
  const float scale = 0.7f;
  int row = 0;
  for (size_t n = 0; n < c.requests.size(); ++n) {
    const LinearRequest& r = c.requests[n];
    if (static_cast<int>(n) == c.nan_request) {
      v.Set(i64{row} * heads * kV, NAN);
    }
    for (int h = 0; h < heads; ++h) {
      std::vector<double> s(state_size, 0.0);
      if (r.read_slot >= 0) {
        for (i64 i = 0; i < state_size; ++i) {
          s[i] = before.Get(layer + (i64{r.read_slot} * heads + h) * state_size + i);
        }
      }
      const auto write = [&](int position) {
        const auto to = [&](int slot) {
          if (slot < 0) return;
          std::copy(s.begin(), s.end(), want_states[slot].begin() + h * state_size);
        };
        if (position == (r.commit < 0 ? r.length : r.commit)) to(r.write_slot);
        for (const auto& [at, slot] : r.checkpoints) {
          if (at == position) to(slot);
        }
      };
      write(0);
      for (int t = 0; t < r.length; ++t) {
        const i64 of_keys = (i64{row + t} * c.num_qk_heads + h / group) * kK;
        const i64 of_head = i64{row + t} * heads + h;
        double kn[kK], qn[kK], k2 = 1e-6, q2 = 1e-6;
        for (int d = 0; d < kK; ++d) {
          kn[d] = k.Get(of_keys + d);
          qn[d] = q.Get(of_keys + d);
          k2 += kn[d] * kn[d];
          q2 += qn[d] * qn[d];
        }
        const double b = c.has_beta ? static_cast<double>(beta[of_head]) : 1.0;
        for (int d = 0; d < kK; ++d) {
          if (Traits::kHasL2Norm) {
            kn[d] /= std::sqrt(k2);
            qn[d] /= std::sqrt(q2);
          }
          double decay = 1.0;
          if (Traits::kDecay == kHeadDecay) decay = std::exp(static_cast<double>(g[of_head]));
          if (Traits::kDecay == kChannelDecay) {
            decay = std::exp(static_cast<double>(g[of_head * kK + d]));
          }
          for (int e = 0; e < kV; ++e) s[d * kV + e] *= decay;
        }
        for (int e = 0; e < kV; ++e) {
          double of_k = 0;
          if (Traits::kHasDeltaRule) {
            for (int d = 0; d < kK; ++d) of_k += kn[d] * s[d * kV + e];
          }
          const double change = b * (v.Get(of_head * kV + e) - of_k);
          double sum = 0;
          for (int d = 0; d < kK; ++d) {
            s[d * kV + e] += kn[d] * change;
            sum += qn[d] * s[d * kV + e];
          }
          want_o[of_head * kV + e] = static_cast<double>(scale) * sum;
        }
        write(t + 1);
      }
    }
    row += r.length;
  }

  LinearAttentionParams p = {};
  p.q = q.data();
  p.k = k.data();
  p.v = v.data();
  p.g = Traits::kDecay == kNoDecay ? nullptr : g.data();
  p.beta = c.has_beta ? beta.data() : nullptr;
  p.states = states.data();
  p.o = o.data();
  p.plan = ParamsOf(plan, max_tokens, c.num_slots, kLayers);
  p.scale = scale;
  p.num_qk_heads = c.num_qk_heads;
  p.num_v_heads = heads;
  TypedArray fresh_o = o;  // NaN everywhere
  emulation::ends_of_pools = {static_cast<char*>(states.data()) +
                              kLayers * c.num_slots * of_slot *
                                  (kStateDtype == kElementF32 ? 4 : 2)};
  launch(p);
  emulation::ends_of_pools.clear();

  const auto rounding = [](int dtype) {
    return dtype == kElementBf16 ? 0x1p-8 : dtype == kElementF16 ? 0x1p-11 : 0x1p-22;
  };
  int wrong = 0;
  double worst = 0;
  std::string first;
  const auto compare = [&](double got, double want, double bound, const char* what, i64 at) {
    const bool is_right =
        std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= bound * (1 + std::abs(want));
    if (!std::isnan(want) && !std::isnan(got)) {
      worst = std::max(worst, std::abs(got - want) / (bound * (1 + std::abs(want))));
    }
    if (is_right) return;
    if (wrong++ == 0) {
      char text[160];
      std::snprintf(text, sizeof text, "%s[%lld] is %.6g, not %.6g", what,
                    static_cast<long long>(at), got, want);
      first = text;
    }
  };
  for (i64 i = 0; i < i64{max_tokens} * heads * kV; ++i) {
    compare(o.Get(i), want_o[i], tolerance + rounding(Traits::kDtype), "o", i);
  }
  for (i64 i = 0; i < static_cast<i64>(states.size()); ++i) {
    const i64 in_layer = i - layer;
    const i64 slot = in_layer >= 0 ? in_layer / of_slot : c.num_slots;
    if (slot < c.num_slots && is_written[slot]) {
      compare(states.Get(i), want_states[slot][in_layer % of_slot],
              tolerance + rounding(kStateDtype), "states", i);
    } else if (!states.SameBits(i, before)) {
      compare(1, 0, 0, "a slot that nobody writes: states", i);
    }
  }

  // A plan with a fault writes no state, and makes o NaN.
  o = fresh_o;
  for (i64 i = 0; i < i64{max_tokens} * heads * kV; ++i) o.Set(i, 1.0f);
  const TypedArray after = states;
  plan.words[kStatePlanFault] = 5;
  launch(p);
  for (i64 i = 0; i < i64{max_tokens} * heads * kV; ++i) compare(o.Get(i), NAN, 0, "faulty o", i);
  for (i64 i = 0; i < static_cast<i64>(states.size()); ++i) {
    if (!states.SameBits(i, after)) compare(1, 0, 0, "faulty plan: states", i);
  }
  if (wrong == 0) return;
  ++g_failures;
  std::printf(
      "FAILED type %d, %d x %d, decay %d, delta %d, norm %d, bf16 states %d, %zu requests, %d "
      "tokens,"
      " %d/%d heads: %d values differ, by %.3g times the bound at most; %s\n",
      Traits::kDtype, kK, kV, Traits::kDecay, Traits::kHasDeltaRule, Traits::kHasL2Norm,
      Traits::kHasBf16States, c.requests.size(), tokens, c.num_qk_heads, heads, wrong, worst,
      first.c_str());
}

// Batches that every kernel is tested with. `longest`: of a request of the long ones.
inline std::vector<LinearCase> LinearBatches(int longest) {
  std::vector<LinearCase> cases;
  // Decode: in place, from zeros, to nowhere, empty requests that copy a state or do nothing.
  cases.push_back(
      {{{1, 0, 0}, {1, -1, 1}, {1, 2, -1}, {0, 3, 4}, {0, -1, -1}, {1, 5, 5}}, 1, 2, 7});
  // Drafts: some are committed; none are.
  cases.push_back({{{8, 0, 0, 3}, {5, 1, 2, 0}, {7, -1, 3, 7}, {2, 4, 4, 1}}, 2, 2, 5});
  cases.back().has_beta = false;
  cases.back().padding = 0;
  // Prompts with checkpoints, one of them in the slot that is read, beside decodes.
  cases.push_back({{{longest, 0, 1, -1, {{0, 3}, {5, 0}, {longest / 2, 4}}},
                    {1, 2, 2},
                    {longest / 3, -1, 5, longest / 4, {{2, 6}, {2, 7}}}},
                   1,
                   3,
                   9});
  cases.back().lowest_g = -20.0f;
  // A NaN stays in its request and its head.
  cases.push_back({{{3, 0, 0}, {4, 1, 1}, {2, 2, 2}}, 1, 2, 3});  // the last slot is read
  cases.back().nan_request = 1;
  // No request at all.
  cases.push_back({{}, 1, 1, 2});
  return cases;
}

}  // namespace
}  // namespace jax_attn
