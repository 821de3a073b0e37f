// Linear attention without a GPU: bodies of csrc/cuda run in emulation and must match the
// recurrence in f64, and gradients those of the recurrence. Include it after the emulation.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <type_traits>
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
template <class Shape, int kThePhase>
struct LinearPhaseTraits : Shape {
  static constexpr int kPhase = kThePhase;
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
  float lowest_g = -1.0f;     // of decays
  int nan_request = -1;       // has a NaN in v of its first token
  bool repeats_keys = false;  // three tokens in four have the key of the one before, and beta 1
  int fast_tokens = -1;       // these 64 tokens have decays that make a state 0
  int segment_chunks = 0;     // of chunked loops
  int chunk_tokens = 0;       // of the plan; 0: as specs choose them
};

// The arrays of a case, drawn, and its plan. Rows of padding, slots that nobody reads, and the
// other layer are NaN.
template <class Traits>
struct LinearBatch {
  static constexpr int kK = Traits::kHeadDimK, kV = Traits::kHeadDimV, kLayers = 2;
  static constexpr int kStateDtype = Traits::kHasBf16States ? kElementBf16 : kElementF32;
  static constexpr int kChunk = Traits::kDecay == kChannelDecay ? kChannelTokens : kLinearTokens;
  static constexpr int kChannels = Traits::kDecay == kChannelDecay ? kK : 1;
  static constexpr float kScale = 0.7f;

  const LinearCase& c;
  PlanWords plan;
  int heads, group, tokens, max_tokens;
  std::mt19937 rng;
  std::normal_distribution<float> normal;
  TypedArray q, k, v, o;
  std::vector<float> g, beta;
  i64 state_size, of_slot, layer;  // layer: the first element of the plan's layer
  TypedArray states;
  std::vector<bool> is_read, is_written;

  explicit LinearBatch(const LinearCase& of)
      : c(of),
        plan(MakeStatePlan(of.requests, of.chunk_tokens > 0 ? of.chunk_tokens : kChunk, 2)),
        heads(of.num_v_heads),
        group(of.num_v_heads / of.num_qk_heads),
        tokens(plan.words[kStatePlanTokens]),
        max_tokens(tokens + of.padding),
        rng(static_cast<unsigned>(tokens * 131 + kK * 7 + kV + heads)),
        q(Traits::kDtype, i64{max_tokens} * of.num_qk_heads * kK),
        k(q),
        v(Traits::kDtype, i64{max_tokens} * heads * kV),
        o(v),
        g(i64{max_tokens} * heads * kChannels, NAN),
        beta(i64{max_tokens} * heads, NAN),
        state_size(i64{kK} * kV),
        of_slot(heads * state_size),
        layer(i64{of.num_slots} * of_slot),
        states(kStateDtype, kLayers * of.num_slots * of_slot),
        is_read(of.num_slots),
        is_written(of.num_slots) {
    plan.layer = 1;
    std::uniform_real_distribution<float> uniform;
    const float k_size = Traits::kHasL2Norm ? 1.0f : 1.0f / std::sqrt(static_cast<float>(kK));
    const i64 row = i64{c.num_qk_heads} * kK;
    for (i64 i = 0; i < tokens * row; ++i) {
      q.Set(i, normal(rng));
      const bool repeats = c.repeats_keys && i >= row && i / row % 4 != 0;
      k.Set(i, repeats ? static_cast<float>(k.Get(i - row)) : k_size * normal(rng));
    }
    for (i64 i = 0; i < i64{tokens} * heads * kV; ++i) v.Set(i, normal(rng));
    for (i64 i = 0; i < i64{tokens} * heads * kChannels; ++i) {
      g[i] = c.lowest_g * uniform(rng);
      if (i / (i64{heads} * kChannels) / 64 == c.fast_tokens) g[i] -= 2;
    }
    for (i64 i = 0; i < i64{tokens} * heads; ++i) beta[i] = c.repeats_keys ? 1.0f : uniform(rng);
    for (const LinearRequest& r : c.requests) {
      if (r.read_slot >= 0) is_read[r.read_slot] = true;
      if (r.write_slot >= 0) is_written[r.write_slot] = true;
      for (const auto& [position, slot] : r.checkpoints) {
        if (slot >= 0) is_written[slot] = true;
      }
    }
    for (int slot = 0; slot < c.num_slots; ++slot) {
      for (i64 i = 0; is_read[slot] && i < of_slot; ++i) {
        states.Set(layer + slot * of_slot + i, normal(rng));
      }
    }
    int first = 0;
    for (size_t n = 0; n < c.requests.size(); ++n) {
      if (static_cast<int>(n) == c.nan_request) v.Set(i64{first} * heads * kV, NAN);
      first += c.requests[n].length;
    }
  }

  LinearAttentionParams Params() {
    LinearAttentionParams p = {};
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    p.g = Traits::kDecay == kNoDecay ? nullptr : g.data();
    p.beta = c.has_beta ? beta.data() : nullptr;
    p.states = states.data();
    p.o = o.data();
    p.plan = ParamsOf(plan, max_tokens, c.num_slots, kLayers);
    p.scale = kScale;
    p.num_qk_heads = c.num_qk_heads;
    p.num_v_heads = heads;
    p.segment_chunks = c.segment_chunks;
    return p;
  }

  double Beta(i64 of_head) const { return c.has_beta ? static_cast<double>(beta[of_head]) : 1.0; }
  double Decay(i64 of_head, int d) const {
    if (Traits::kDecay == kNoDecay) return 1.0;
    return std::exp(static_cast<double>(g[kChannels == 1 ? of_head : of_head * kK + d]));
  }
  // Row `at` of q or k in f64, normalized if the call's are. Returns 1 over its norm.
  double Row(const TypedArray& array, i64 at, std::vector<double>* row) const {
    row->resize(kK);
    double squares = 1e-6;
    for (int d = 0; d < kK; ++d) {
      (*row)[d] = array.Get(at + d);
      squares += (*row)[d] * (*row)[d];
    }
    const double factor = Traits::kHasL2Norm ? 1 / std::sqrt(squares) : 1;
    for (double& x : *row) x *= factor;
    return factor;
  }
  i64 KeyRow(int token, int head) const {
    return (i64{token} * c.num_qk_heads + head / group) * kK;
  }
  // Calls fn(slot) for the slots that get the state after `position` tokens of a request.
  template <class Fn>
  static void ForWrites(const LinearRequest& r, int position, const Fn& fn) {
    if (position == (r.commit < 0 ? r.length : r.commit) && r.write_slot >= 0) fn(r.write_slot);
    for (const auto& [at, slot] : r.checkpoints) {
      if (at == position && slot >= 0) fn(slot);
    }
  }
  // The state before a request for a head.
  std::vector<double> FirstState(const TypedArray& pool, const LinearRequest& r, int head) const {
    std::vector<double> s(state_size, 0.0);
    for (i64 i = 0; r.read_slot >= 0 && i < state_size; ++i) {
      s[i] = pool.Get(layer + (i64{r.read_slot} * heads + head) * state_size + i);
    }
    return s;
  }
};

// A token of the recurrence.
struct LinearToken {
  std::vector<double> k, q;
  double k_factor, q_factor;    // see LinearBatch::Row
  std::vector<double> decayed;  // the state after its decay
  std::vector<double> after;    // the state
};
template <class Traits>
LinearToken Advance(const LinearBatch<Traits>& batch, int token, int h,
                    const std::vector<double>& before) {
  constexpr int kK = Traits::kHeadDimK, kV = Traits::kHeadDimV;
  LinearToken t;
  t.k_factor = batch.Row(batch.k, batch.KeyRow(token, h), &t.k);
  t.q_factor = batch.Row(batch.q, batch.KeyRow(token, h), &t.q);
  const i64 of_head = i64{token} * batch.heads + h;
  t.decayed = before;
  for (int d = 0; d < kK; ++d) {
    const double decay = batch.Decay(of_head, d);
    for (int e = 0; e < kV; ++e) t.decayed[d * kV + e] *= decay;
  }
  t.after = t.decayed;
  for (int e = 0; e < kV; ++e) {
    double seen = 0;
    for (int d = 0; Traits::kHasDeltaRule && d < kK; ++d) seen += t.k[d] * t.decayed[d * kV + e];
    const double change = batch.Beta(of_head) * (batch.v.Get(of_head * kV + e) - seen);
    for (int d = 0; d < kK; ++d) t.after[d * kV + e] += t.k[d] * change;
  }
  return t;
}

// How far values may be from the oracle's: each by of_element (|x| + the root of the mean square of
// the array, or 1 if it is less), on top of the rounding of their type, and the array by of_norm of
// its norm.
struct Tolerance {
  double of_element, of_norm = INFINITY;
};

// Counts values that differ.
class Comparison {
 public:
  // nan_is_any: where the oracle has NaN there may be anything, else there must be NaN.
  explicit Comparison(Tolerance tolerance, bool nan_is_any = false)
      : tolerance_(tolerance), nan_is_any_(nan_is_any) {}

  static double Rounding(int dtype) {
    return dtype == kElementBf16 ? 0x1p-8 : dtype == kElementF16 ? 0x1p-11 : 0x1p-22;
  }
  void Values(const char* what, int dtype, i64 num, const std::function<double(i64)>& got,
              const std::function<double(i64)>& want) {
    double error = 0, size = 0, num_finite = 0;
    for (i64 i = 0; i < num; ++i) {
      if (!std::isfinite(want(i))) continue;
      size += want(i) * want(i);
      ++num_finite;
    }
    const double bound = tolerance_.of_element + Rounding(dtype);
    const double rms = std::sqrt(size / std::max(num_finite, 1.0));
    for (i64 i = 0; i < num; ++i) {
      const double x = got(i), y = want(i), off = std::abs(x - y);
      const double most = bound * (std::max(1.0, rms) + std::abs(y));
      Check(std::isnan(y) ? nan_is_any_ || std::isnan(x) : off <= most, x, y, what, i);
      if (!std::isfinite(off)) continue;
      worst_ = std::max(worst_, off / most);
      error += off * off;
    }
    const double norm = std::sqrt(error / std::max(size, 1e-30));
    const bool is_near = error <= 1e-20 || norm <= tolerance_.of_norm;
    Check(is_near, norm, tolerance_.of_norm, (std::string("relative norm of ") + what).c_str(), 0);
    worst_norm_ = std::max(worst_norm_, error <= 1e-20 ? 0 : norm);
  }
  void Check(bool is_right, double got, double want, const char* what, i64 at) {
    if (is_right || wrong_++ > 0) return;
    char text[200];
    std::snprintf(text, sizeof text, "%s[%lld] is %.6g, not %.6g", what, static_cast<long long>(at),
                  got, want);
    first_ = text;
  }

  template <class Traits>
  void Finish(const char* op, const LinearBatch<Traits>& batch) const {
    if (wrong_ == 0) return;
    ++g_failures;
    std::printf(
        "FAILED %s: type %d, %d x %d, decay %d, delta %d, norm %d, bf16 states %d, %zu requests, "
        "%d tokens, %d/%d heads, segments of %d: %d values differ, by %.3g times the bound at "
        "most, relative norm up to %.3g; %s\n",
        op, Traits::kDtype, Traits::kHeadDimK, Traits::kHeadDimV, Traits::kDecay,
        Traits::kHasDeltaRule, Traits::kHasL2Norm, Traits::kHasBf16States, batch.c.requests.size(),
        batch.tokens, batch.c.num_qk_heads, batch.heads, batch.c.segment_chunks, wrong_, worst_,
        worst_norm_, first_.c_str());
  }

 private:
  Tolerance tolerance_;
  bool nan_is_any_;
  int wrong_ = 0;
  double worst_ = 0, worst_norm_ = 0;
  std::string first_;
};

// Runs one case. launch(params) launches the body.
template <class Traits, class LaunchBody>
void RunLinearCase(const LinearCase& c, Tolerance tolerance, const LaunchBody& launch) {
  constexpr int kV = Traits::kHeadDimV, kStateDtype = LinearBatch<Traits>::kStateDtype;
  LinearBatch<Traits> batch(c);
  const TypedArray before = batch.states;

  // The recurrence in f64.
  std::vector<double> want_o(batch.o.size(), 0.0);
  std::vector<std::vector<double>> want_states(c.num_slots);
  for (auto& of : want_states) of.assign(batch.of_slot, 0.0);
  int row = 0;
  for (const LinearRequest& r : c.requests) {
    for (int h = 0; h < batch.heads; ++h) {
      std::vector<double> s = batch.FirstState(before, r, h);
      for (int t = 0;; ++t) {
        batch.ForWrites(r, t, [&](int slot) {
          std::copy(s.begin(), s.end(), want_states[slot].begin() + h * batch.state_size);
        });
        if (t == r.length) break;
        const LinearToken token = Advance(batch, row + t, h, s);
        s = token.after;
        for (int e = 0; e < kV; ++e) {
          double sum = 0;
          for (size_t d = 0; d < token.q.size(); ++d) sum += token.q[d] * s[d * kV + e];
          want_o[(i64{row + t} * batch.heads + h) * kV + e] =
              static_cast<double>(batch.kScale) * sum;
        }
      }
    }
    row += r.length;
  }

  const LinearAttentionParams p = batch.Params();
  const char* pool = static_cast<const char*>(p.states);
  emulation::ends_of_pools = {pool + batch.states.size() * (kStateDtype == kElementF32 ? 4 : 2)};
  launch(p);
  emulation::ends_of_pools.clear();

  Comparison comparison(tolerance);
  comparison.Values(
      "o", Traits::kDtype, static_cast<i64>(want_o.size()), [&](i64 i) { return batch.o.Get(i); },
      [&](i64 i) { return want_o[i]; });
  for (int slot = 0; slot < c.num_slots; ++slot) {
    if (!batch.is_written[slot]) continue;
    comparison.Values(
        "states", kStateDtype, batch.of_slot,
        [&](i64 i) { return batch.states.Get(batch.layer + slot * batch.of_slot + i); },
        [&](i64 i) { return want_states[slot][i]; });
  }
  for (i64 i = 0; i < static_cast<i64>(batch.states.size()); ++i) {
    if (i >= batch.layer && batch.is_written[(i - batch.layer) / batch.of_slot]) continue;
    comparison.Check(batch.states.SameBits(i, before), batch.states.Get(i), before.Get(i),
                     "a slot that nobody writes: states", i);
  }

  // A plan with a fault writes no state, and makes o NaN.
  for (i64 i = 0; i < static_cast<i64>(batch.o.size()); ++i) batch.o.Set(i, 1.0f);
  const TypedArray after = batch.states;
  batch.plan.words[kStatePlanFault] = 5;
  launch(p);
  for (i64 i = 0; i < static_cast<i64>(batch.o.size()); ++i) {
    comparison.Check(std::isnan(batch.o.Get(i)), batch.o.Get(i), NAN, "faulty o", i);
  }
  for (i64 i = 0; i < static_cast<i64>(after.size()); ++i) {
    comparison.Check(batch.states.SameBits(i, after), 1, 0, "faulty plan: states", i);
  }
  comparison.Finish("linear attention", batch);
}

// Runs the gradients of one case: of a sum of o and of the states after the call with weights.
template <class Traits, class LaunchBody>
void RunLinearGradientCase(const LinearCase& c, Tolerance tolerance, const LaunchBody& launch) {
  constexpr int kK = Traits::kHeadDimK, kV = Traits::kHeadDimV;
  constexpr int kStateDtype = LinearBatch<Traits>::kStateDtype;
  LinearBatch<Traits> batch(c);
  TypedArray d_o = batch.v, d_states = batch.states;
  for (i64 i = 0; i < static_cast<i64>(d_o.size()); ++i) d_o.Set(i, batch.normal(batch.rng));
  for (i64 i = batch.layer; i < static_cast<i64>(d_states.size()); ++i) {
    d_states.Set(i, batch.normal(batch.rng));
  }
  const TypedArray d_after = d_states;

  std::vector<double> d_q(batch.q.size()), d_k(batch.q.size()), d_v(batch.v.size());
  std::vector<double> d_g(batch.g.size()), d_beta(batch.beta.size()), d_before(d_states.size());
  for (size_t i = 0; i < d_before.size(); ++i) {
    const i64 slot = static_cast<i64>(i) >= batch.layer
                         ? (static_cast<i64>(i) - batch.layer) / batch.of_slot
                         : -1;
    d_before[i] = slot >= 0 && batch.is_written[slot] ? 0.0 : d_after.Get(i);
  }
  int row = 0;
  for (const LinearRequest& r : c.requests) {
    for (int h = 0; h < batch.heads; ++h) {
      const auto first = [&](int slot) {
        return batch.layer + (i64{slot} * batch.heads + h) * batch.state_size;
      };
      std::vector<std::vector<double>> states = {batch.FirstState(batch.states, r, h)};
      std::vector<LinearToken> all;
      for (int t = 0; t < r.length; ++t) {
        all.push_back(Advance(batch, row + t, h, states.back()));
        states.push_back(all.back().after);
      }
      std::vector<double> ds(batch.state_size, 0.0);
      for (int t = r.length;; --t) {
        batch.ForWrites(r, t, [&](int slot) {
          for (i64 i = 0; i < batch.state_size; ++i) ds[i] += d_after.Get(first(slot) + i);
        });
        if (t == 0) break;
        const LinearToken& token = all[t - 1];
        const i64 of_head = i64{row + t - 1} * batch.heads + h;
        const i64 of_key = batch.KeyRow(row + t - 1, h);
        const double scale = static_cast<double>(batch.kScale), beta = batch.Beta(of_head);
        std::vector<double> dk(kK), dq(kK);
        for (int e = 0; e < kV; ++e) {
          const i64 at = of_head * kV + e;
          double seen = 0, du = 0;
          for (int d = 0; d < kK; ++d) {
            dq[d] += scale * token.after[d * kV + e] * d_o.Get(at);
            ds[d * kV + e] += scale * token.q[d] * d_o.Get(at);
            du += ds[d * kV + e] * token.k[d];
            if (Traits::kHasDeltaRule) seen += token.k[d] * token.decayed[d * kV + e];
          }
          const double rest = batch.v.Get(at) - seen;
          d_v[at] += beta * du;
          d_beta[of_head] += du * rest;
          for (int d = 0; d < kK; ++d) {
            dk[d] += ds[d * kV + e] * beta * rest;
            if (!Traits::kHasDeltaRule) continue;
            dk[d] -= beta * du * token.decayed[d * kV + e];
            ds[d * kV + e] -= beta * du * token.k[d];
          }
        }
        for (int d = 0; d < kK; ++d) {
          const double decay = batch.Decay(of_head, d);
          double& of_g = d_g[batch.kChannels == 1 ? of_head : of_head * kK + d];
          for (int e = 0; e < kV; ++e) {
            of_g += ds[d * kV + e] * token.decayed[d * kV + e];
            ds[d * kV + e] *= decay;
          }
        }
        const auto add_row = [&](std::vector<double>* to, const std::vector<double>& row_of,
                                 double factor, const std::vector<double>& d_row) {
          double inner = 0;
          for (int d = 0; d < kK; ++d) inner += row_of[d] * d_row[d];
          for (int d = 0; d < kK; ++d) {
            const double less = Traits::kHasL2Norm ? row_of[d] * inner : 0;
            (*to)[of_key + d] += factor * (d_row[d] - less);
          }
        };
        add_row(&d_q, token.q, token.q_factor, dq);
        add_row(&d_k, token.k, token.k_factor, dk);
      }
      if (&r == &c.requests[0] + c.nan_request) {  // its gradients may be anything, others' not
        for (int t = row; t < row + r.length; ++t) {
          std::fill_n(&d_q[batch.KeyRow(t, h)], kK, NAN);
          std::fill_n(&d_k[batch.KeyRow(t, h)], kK, NAN);
          std::fill_n(&d_v[(i64{t} * batch.heads + h) * kV], kV, NAN);
          d_beta[i64{t} * batch.heads + h] = NAN;
          std::fill_n(&d_g[(i64{t} * batch.heads + h) * batch.kChannels], batch.kChannels, NAN);
        }
        std::fill(ds.begin(), ds.end(), NAN);
      }
      for (i64 i = 0; r.read_slot >= 0 && i < batch.state_size; ++i) {
        d_before[first(r.read_slot) + i] += ds[i];
      }
    }
    row += r.length;
  }

  LinearGradientParams p = {};
  p.forward = batch.Params();
  TypedArray got_q(Traits::kDtype, batch.q.size()), got_k = got_q;
  TypedArray got_v(Traits::kDtype, batch.v.size());
  std::vector<float> got_g(batch.g.size(), NAN), got_beta(batch.beta.size(), NAN);
  p.d_o = d_o.data();
  p.d_q = got_q.data();
  p.d_k = got_k.data();
  p.d_v = got_v.data();
  p.d_g = Traits::kDecay == kNoDecay ? nullptr : got_g.data();
  p.d_beta = c.has_beta ? got_beta.data() : nullptr;
  p.d_states = d_states.data();
  launch(p);

  Comparison comparison(tolerance, true);
  const auto compare = [&](const char* what, int dtype, const auto& got,
                           const std::vector<double>& want) {
    const auto value = [&](i64 i) {
      if constexpr (std::is_same_v<std::decay_t<decltype(got)>, TypedArray>) {
        return got.Get(i);
      } else {
        return static_cast<double>(got[i]);
      }
    };
    comparison.Values(what, dtype, static_cast<i64>(want.size()), value,
                      [&](i64 i) { return want[i]; });
  };
  compare("d_q", Traits::kDtype, got_q, d_q);
  compare("d_k", Traits::kDtype, got_k, d_k);
  compare("d_v", Traits::kDtype, got_v, d_v);
  if (p.d_g) compare("d_g", kElementF32, got_g, d_g);
  if (p.d_beta) compare("d_beta", kElementF32, got_beta, d_beta);
  compare("d_states", kStateDtype, d_states, d_before);

  // With a fault gradients are 0, and those of states are left as they are.
  const TypedArray after = d_states;
  batch.plan.words[kStatePlanFault] = 5;
  launch(p);
  for (i64 i = 0; i < static_cast<i64>(got_v.size()); ++i) {
    comparison.Check(got_v.Get(i) == 0, got_v.Get(i), 0, "faulty d_v", i);
  }
  for (i64 i = 0; i < static_cast<i64>(got_q.size()); ++i) {
    comparison.Check(got_q.Get(i) == 0 && got_k.Get(i) == 0, got_q.Get(i), 0, "faulty d_q", i);
  }
  for (i64 i = 0; i < static_cast<i64>(after.size()); ++i) {
    comparison.Check(d_states.SameBits(i, after), 1, 0, "faulty plan: d_states", i);
  }
  comparison.Finish("gradients", batch);
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
