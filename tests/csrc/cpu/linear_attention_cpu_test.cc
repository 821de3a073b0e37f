// Linear attention on every instruction set of this machine: against the recurrence in f64,
// gradients against differences of it; bits beside other requests and on other numbers of threads;
// slots that nobody names stay.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/linear_attention.h"
#include "cpu/simd/simd_types.h"
#include "cpu/thread_pool.h"
#include "spec.h"

namespace jax_attn {
namespace {

int g_failures = 0;

struct Random {
  uint32_t state = 1;
  float operator()() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
};

enum Decay { kNone, kHead, kChannel };

struct Shape {
  i64 qk_heads, v_heads, dim_k, dim_v;
  Decay decay;
  bool delta_rule, l2_norm;
};

// Requests of these lengths, each with the slot of its number.
constexpr i64 kLens[] = {37, 1, 0, 70, 2, 3};
constexpr i64 kNumRequests = 6, kNumTokens = 113, kNumSlots = kNumRequests + 1;
constexpr i64 kPlanChunk = 64;

template <typename X>
struct Arrays {
  std::vector<X> q, k, v, g, beta, states;
  std::vector<X>* all[6] = {&q, &k, &v, &g, &beta, &states};

  explicit Arrays(const Shape& s)
      : q(kNumTokens * s.qk_heads * s.dim_k),
        k(q.size()),
        v(kNumTokens * s.v_heads * s.dim_v),
        g(s.decay == kNone ? 0 : kNumTokens * s.v_heads * (s.decay == kChannel ? s.dim_k : 1)),
        beta(kNumTokens * s.v_heads),
        states(kNumSlots * s.v_heads * s.dim_k * s.dim_v) {}
  Arrays(const Arrays&) = delete;
};

std::vector<StateChunk> Chunks(i64 first_request, i64 end_request) {
  std::vector<StateChunk> chunks;
  i64 begin = 0;
  for (i64 r = 0; r < end_request; ++r) {
    i64 done = 0;
    do {
      const i64 num = Min(kPlanChunk, kLens[r] - done);
      const bool is_last = done + num == kLens[r];
      const i32 slot = static_cast<i32>(r);
      if (r >= first_request) {
        chunks.push_back({static_cast<i32>(begin + done), static_cast<i32>(num), done == 0, slot,
                          is_last ? slot : -1, slot});
      }
      done += num;
    } while (done < kLens[r]);
    begin += kLens[r];
  }
  return chunks;
}

LinearParams ParamsOf(const Shape& s, Arrays<float>& arrays, std::vector<float>& o) {
  LinearParams p = {};
  p.q = arrays.q.data();
  p.k = arrays.k.data();
  p.v = arrays.v.data();
  p.g = s.decay == kNone ? nullptr : arrays.g.data();
  p.beta = arrays.beta.data();
  p.states = arrays.states.data();
  p.o = o.data();
  p.num_qk_heads = s.qk_heads;
  p.num_v_heads = s.v_heads;
  p.dim_k = s.dim_k;
  p.dim_v = s.dim_v;
  p.scale = 0.5f;
  p.has_channel_decay = s.decay == kChannel;
  p.has_delta_rule = s.delta_rule;
  p.has_l2_norm = s.l2_norm;
  return p;
}

// The recurrence; states become those after the call.
void Recur(const Shape& s, Arrays<double>& a, std::vector<double>* o) {
  const i64 group = s.v_heads / s.qk_heads;
  i64 t = 0;
  for (i64 r = 0; r < kNumRequests; ++r) {
    for (const i64 end = t + kLens[r]; t < end; ++t) {
      for (i64 h = 0; h < s.v_heads; ++h) {
        double* state = &a.states[(r * s.v_heads + h) * s.dim_k * s.dim_v];
        const double* rows[] = {&a.k[(t * s.qk_heads + h / group) * s.dim_k],
                                &a.q[(t * s.qk_heads + h / group) * s.dim_k]};
        std::vector<double> k(s.dim_k), q(s.dim_k);
        for (i64 i = 0; i < 2; ++i) {
          double squares = 1e-6;
          for (i64 d = 0; d < s.dim_k; ++d) squares += rows[i][d] * rows[i][d];
          const double factor = s.l2_norm ? 1 / std::sqrt(squares) : 1;
          for (i64 d = 0; d < s.dim_k; ++d) (i == 0 ? k : q)[d] = factor * rows[i][d];
        }
        for (i64 d = 0; d < s.dim_k; ++d) {
          const i64 at = t * s.v_heads + h;
          const double g = s.decay == kNone   ? 0
                           : s.decay == kHead ? a.g[at]
                                              : a.g[at * s.dim_k + d];
          for (i64 j = 0; j < s.dim_v; ++j) state[d * s.dim_v + j] *= std::exp(g);
        }
        for (i64 j = 0; j < s.dim_v; ++j) {
          const i64 at = (t * s.v_heads + h) * s.dim_v + j;
          double seen = 0, sum = 0;
          for (i64 d = 0; d < s.dim_k; ++d) seen += state[d * s.dim_v + j] * k[d];
          const double change = a.beta[t * s.v_heads + h] * (a.v[at] - (s.delta_rule ? seen : 0));
          for (i64 d = 0; d < s.dim_k; ++d) {
            state[d * s.dim_v + j] += k[d] * change;
            sum += state[d * s.dim_v + j] * q[d];
          }
          (*o)[at] = 0.5 * sum;
        }
      }
    }
  }
}

void TestShape(const std::string& isa, const Shape& s, TaskPool& threads) {
  const auto fail = [&](const char* what, double got, double expected) {
    std::printf("FAILED %s heads %lld / %lld dims %lld, %lld decay %d delta %d: %s: %g, %g\n",
                isa.c_str(), static_cast<long long>(s.qk_heads), static_cast<long long>(s.v_heads),
                static_cast<long long>(s.dim_k), static_cast<long long>(s.dim_v), s.decay,
                s.delta_rule, what, got, expected);
    ++g_failures;
  };
  Random random;
  Arrays<float> arrays(s);
  for (auto* array : arrays.all) {
    for (float& x : *array) x = random();
  }
  for (float& x : arrays.g) x = -std::fabs(x);
  for (float& x : arrays.beta) x = std::fabs(x);
  const size_t of_slot = arrays.states.size() / kNumSlots;
  for (size_t i = kNumRequests * of_slot; i < arrays.states.size(); ++i) arrays.states[i] = NAN;
  const std::vector<float> before = arrays.states;
  std::vector<float> o(arrays.v.size(), NAN);
  const std::vector<StateChunk> chunks = Chunks(0, kNumRequests);
  const LinearParams p = ParamsOf(s, arrays, o);
  LinearAttentionCpu(kF32, p, chunks.data(), static_cast<i64>(chunks.size()), threads);

  Arrays<double> exact(s);
  for (i64 i = 0; i < 6; ++i) exact.all[i]->assign(arrays.all[i]->begin(), arrays.all[i]->end());
  exact.states.assign(before.begin(), before.end());
  std::vector<double> expected(o.size());
  Recur(s, exact, &expected);
  for (size_t i = 0; i < o.size(); ++i) {
    if (!(std::fabs(o[i] - expected[i]) < 2e-5)) return fail("o", o[i], expected[i]);
  }
  for (size_t i = 0; i < arrays.states.size(); ++i) {
    const bool is_same = std::isnan(arrays.states[i]) && std::isnan(exact.states[i]);
    if (!is_same && !(std::fabs(arrays.states[i] - exact.states[i]) < 2e-5)) {
      return fail("state", arrays.states[i], exact.states[i]);
    }
  }

  // One request, in one thread.
  const std::vector<float> after = arrays.states;
  arrays.states = before;
  std::vector<float> o_alone(o.size(), NAN);
  const std::vector<StateChunk> of_one = Chunks(3, 4);
  InlinePool alone;
  LinearAttentionCpu(kF32, ParamsOf(s, arrays, o_alone), of_one.data(),
                     static_cast<i64>(of_one.size()), alone);
  const size_t row = s.v_heads * s.dim_v, first = 38 * row;
  if (std::memcmp(&o_alone[first], &o[first], 70 * row * sizeof(float)) != 0 ||
      std::memcmp(&arrays.states[3 * of_slot], &after[3 * of_slot], of_slot * 4) != 0) {
    return fail("other bits alone", o_alone[first], o[first]);
  }
  if (!std::isnan(o_alone[0])) return fail("wrote another row", o_alone[0], NAN);

  // Gradients of a weighted sum of o and of the states.
  arrays.states = before;
  std::vector<float> of_o(o.size()), of_states(before.size());
  for (float& x : of_o) x = random();
  for (float& x : of_states) x = random();
  Arrays<float> grad(s);
  grad.states = of_states;
  const LinearBackwardParams backward = {
      ParamsOf(s, arrays, o), of_o.data(),       grad.q.data(),
      grad.k.data(),          grad.v.data(),     s.decay == kNone ? nullptr : grad.g.data(),
      grad.beta.data(),       grad.states.data()};
  LinearAttentionBackwardCpu(kF32, backward, chunks.data(), static_cast<i64>(chunks.size()),
                             threads);
  for (size_t i = kNumRequests * of_slot; i < before.size(); ++i) {
    if (grad.states[i] != of_states[i]) return fail("gradient of a slot", grad.states[i], 0);
  }
  const auto loss = [&](i64 which, const std::vector<float>& way, double step) {
    Arrays<double> moved(s);
    for (i64 i = 0; i < 6; ++i) moved.all[i]->assign(arrays.all[i]->begin(), arrays.all[i]->end());
    for (size_t i = 0; i < way.size(); ++i) (*moved.all[which])[i] += step * way[i];
    std::vector<double> of(o.size());
    Recur(s, moved, &of);
    double sum = 0;
    for (size_t i = 0; i < of.size(); ++i) sum += of[i] * of_o[i];
    for (size_t i = 0; i < kNumRequests * of_slot; ++i) sum += moved.states[i] * of_states[i];
    return sum;
  };
  for (i64 which = 0; which < 6; ++which) {
    std::vector<float> way(arrays.all[which]->size());
    if (which == 5) way.resize(kNumRequests * of_slot);
    double slope = 0, size = 0;
    for (size_t i = 0; i < way.size(); ++i) {
      way[i] = random();
      slope += double{way[i]} * (*grad.all[which])[i];
      size += double{(*grad.all[which])[i]} * (*grad.all[which])[i];
    }
    const double expected_slope = (loss(which, way, 1e-5) - loss(which, way, -1e-5)) / 2e-5;
    if (!(std::fabs(slope - expected_slope) <= 1e-4 * std::sqrt(size) + 1e-7)) {
      static constexpr const char* kNames[] = {"d_q", "d_k", "d_v", "d_g", "d_beta", "d_states"};
      fail(kNames[which], slope, expected_slope);
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  ThreadPool threads(3);
  const Shape shapes[] = {
      {1, 2, 16, 24, kHead, true, true},    {1, 1, 8, 8, kHead, true, false},
      {2, 2, 40, 72, kNone, true, true},    {1, 3, 24, 40, kHead, false, true},
      {1, 2, 16, 16, kChannel, true, true}, {1, 1, 40, 8, kChannel, false, false},
      {1, 1, 64, 128, kHead, true, true},
  };
  for (const std::string& isa : SupportedCpuIsas()) {
    if (!SetCpuIsa(isa).ok()) return 1;
    for (const Shape& shape : shapes) TestShape(isa, shape, threads);
  }
  std::printf("linear_attention_cpu_test: %s\n", g_failures ? "FAILED" : "ok");
  return g_failures ? 1 : 0;
}
