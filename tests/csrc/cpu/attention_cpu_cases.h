// Problems of attention_cpu_test.cc and backward_cpu_test.cc: data, a double-precision reference,
// plans, and the forward pass, on every instruction set of this machine and on emulated AMX tiles.
//
// Plans are made here, with random tiles and kv chunks, so that the kernels are tested with any
// list of work and not only with the lists of one planner. Everything that may hold any value by
// contract is poisoned: unused slots and pages, page ids, workspace, outputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "checks.h"
#include "cpu/amx_emulation.h"
#include "cpu/attention.h"
#include "cpu/dispatch.h"

namespace jax_attn {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kPoisonId = 2147480000;

// ---- instruction sets

std::vector<std::string> Isas() {
  std::vector<std::string> isas = SupportedCpuIsas();
  isas.push_back(kKernelsAmxEmulated.name);
  return isas;
}

void UseIsa(const std::string& isa) {
  if (isa == kKernelsAmxEmulated.name) {
    SetActiveKernels(kKernelsAmxEmulated);
  } else {
    CHECK(SetCpuIsa(isa).ok(), "%s", isa.c_str());
  }
}

// ---- storage types

float Bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
uint32_t Bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

double HalfValue(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double sign = h >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// An array of a storage type.
struct Array {
  int64_t dtype = kF32;
  std::vector<char> bytes;
  Array(int64_t dtype, int64_t n) : dtype(dtype), bytes(n * ElementBytes(dtype)) {}

  double Get(int64_t i) const {
    if (dtype == kF32) {
      float x;
      std::memcpy(&x, &bytes[i * 4], 4);
      return x;
    }
    uint16_t h;
    std::memcpy(&h, &bytes[i * 2], 2);
    return dtype == kBF16 ? Bits(uint32_t{h} << 16) : HalfValue(h);
  }
  // Nearest representable value; f16 by search, which is slow but obviously right.
  void Set(int64_t i, float x) {
    if (dtype == kF32) {
      std::memcpy(&bytes[i * 4], &x, 4);
      return;
    }
    uint16_t h;
    if (dtype == kBF16) {
      const uint32_t u = Bits(x);
      h = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    } else if (x != x) {
      h = 0x7e00;
    } else {
      uint32_t low = 0, high = 0x7c00;
      while (high - low > 1) {
        const uint32_t mid = (low + high) / 2;
        (HalfValue(static_cast<uint16_t>(mid)) <= std::fabs(x) ? low : high) = mid;
      }
      const double down = std::fabs(x) - HalfValue(low), up = HalfValue(high) - std::fabs(x);
      h = static_cast<uint16_t>((down < up || (down == up && low % 2 == 0) ? low : high) |
                                (x < 0 ? 0x8000 : 0));
    }
    std::memcpy(&bytes[i * 2], &h, 2);
  }
};

// ---- a problem with its data

struct Request {
  int qo_len, kv_len;
};

struct Case {
  std::string name;
  int num_qo_heads = 8, num_kv_heads = 2, dqk = 64, dvo = 64;
  int64_t dtype = kF32;
  int page_size = 16;  // 0: ragged
  int window_left = -1, window_right = 0;
  float soft_cap = 0, sm_scale = 0;  // 0: 1 / sqrt(dqk)
  bool sinks = false;
  int num_layers = 1;
  int padding_tokens = 3;
  float k_magnitude = 1;
  std::vector<Request> requests;
  int split = 0;  // kv chunk; 0: random chunks; -1: none
  int tile_q0 = 16, tile_q1 = 128;
  int max_tile_tokens = 1 << 30;  // makes tiles shorter than they could be
  bool in_order = false;          // items in the order of rows
  bool codes = false;             // keys and values are int8 and multiplied as int8
};

struct Problem {
  const Case c;
  AttentionProblem problem;
  int64_t nnz_qo = 0, max_qo = 0, num_pages = 1, layer_idx;
  std::vector<int32_t> qo_indptr{0}, kv_lens, kv_base, page_indptr{0}, page_indices;
  Array q, k, v;
  std::vector<float> sinks;
  std::vector<int32_t> layer;
  std::vector<int64_t> slots;  // [request] flattened: row of k, v of each position
  std::vector<int64_t> slot_begin;

  explicit Problem(const Case& c, uint32_t seed = 1)
      : c(c), q(c.dtype, 0), k(c.dtype, 0), v(c.dtype, 0) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    AttentionSpec& s = problem.spec;
    s.num_qo_heads = c.num_qo_heads;
    s.num_kv_heads = c.num_kv_heads;
    s.head_dim_qk = c.dqk;
    s.head_dim_vo = c.dvo;
    s.dtype = c.dtype;
    problem.config.num_tiles = 2;
    problem.config.tile_q[0] = c.tile_q0;
    problem.config.tile_q[1] = c.tile_q1;
    problem.config.tile_kv = 64;

    int64_t tokens = 0, pages = 0;
    for (const Request& r : c.requests) {
      nnz_qo += r.qo_len;
      qo_indptr.push_back(static_cast<int32_t>(nnz_qo));
      kv_lens.push_back(r.kv_len);
      if (c.page_size) {
        kv_base.push_back(static_cast<int32_t>(page_indices.size()));
        const int n = (r.kv_len + c.page_size - 1) / c.page_size;
        for (int i = 0; i < n; ++i) page_indices.push_back(static_cast<int32_t>(pages++));
        page_indptr.push_back(static_cast<int32_t>(page_indices.size()));
      } else {
        kv_base.push_back(static_cast<int32_t>(tokens + 2));  // two unused rows between requests
      }
      tokens += r.kv_len + 2;
    }
    std::shuffle(page_indices.begin(), page_indices.end(), rng);
    for (int32_t& page : page_indices) page += 1;  // page 0 belongs to no request
    num_pages = c.page_size ? pages + 2 : 1;
    max_qo = nnz_qo + c.padding_tokens;
    layer_idx = c.num_layers - 1;
    layer = {static_cast<int32_t>(layer_idx)};

    const int64_t rows = c.page_size ? c.num_layers * num_pages * c.page_size : tokens + 4;
    q = Array(c.dtype, max_qo * c.num_qo_heads * c.dqk);
    k = Array(c.dtype, rows * c.num_kv_heads * c.dqk);
    v = Array(c.dtype, rows * c.num_kv_heads * c.dvo);
    for (int64_t i = 0; i < max_qo * c.num_qo_heads * c.dqk; ++i) {
      q.Set(i, i < nnz_qo * c.num_qo_heads * c.dqk ? normal(rng) : kNan);
    }
    for (int64_t i = 0; i < rows * c.num_kv_heads * c.dqk; ++i) k.Set(i, kNan);
    for (int64_t i = 0; i < rows * c.num_kv_heads * c.dvo; ++i) v.Set(i, kNan);
    for (size_t r = 0; r < c.requests.size(); ++r) {
      slot_begin.push_back(slots.size());
      for (int j = 0; j < c.requests[r].kv_len; ++j) {
        int64_t row = kv_base[r] + j;
        if (c.page_size) {
          const int64_t page = page_indices[kv_base[r] + j / c.page_size];
          row = (layer_idx * num_pages + page) * c.page_size + j % c.page_size;
        }
        slots.push_back(row);
        for (int64_t i = row * c.num_kv_heads * c.dqk; i < (row + 1) * c.num_kv_heads * c.dqk;
             ++i) {
          k.Set(i, normal(rng) * c.k_magnitude);
        }
        for (int64_t i = row * c.num_kv_heads * c.dvo; i < (row + 1) * c.num_kv_heads * c.dvo;
             ++i) {
          v.Set(i, normal(rng));
        }
      }
    }
    if (c.codes) {
      s.kv_format = kInt8Format;
      s.eight_bit_products = 1;
      Encode(&k, c.dqk);
      Encode(&v, c.dvo);
    }
    for (int i = 0; i < 5; ++i) page_indices.push_back(kPoisonId);
    for (int h = 0; h < c.num_qo_heads; ++h) sinks.push_back(normal(rng));
  }

  // Replaces numbers by rows of int8 and a scale; rows with a NaN become NaN.
  static void Encode(Array* rows, int dim) {
    const int64_t elements = static_cast<int64_t>(rows->bytes.size()) / ElementBytes(rows->dtype);
    std::vector<char> bytes(elements / dim * (dim + 4));
    for (int64_t row = 0; row < elements / dim; ++row) {
      double largest = 0;
      for (int d = 0; d < dim; ++d) {
        const double x = std::fabs(rows->Get(row * dim + d));
        largest = x > largest || x != x ? x : largest;
      }
      const float scale = static_cast<float>(largest / 127);
      char* to = &bytes[row * (dim + 4)];
      for (int d = 0; d < dim && largest > 0; ++d) {
        to[d] = static_cast<char>(std::lrint(rows->Get(row * dim + d) / scale));
      }
      std::memcpy(to + dim, &scale, 4);
    }
    rows->bytes = bytes;
  }

  float scale() const {
    return c.sm_scale != 0 ? c.sm_scale : 1.0f / std::sqrt(static_cast<float>(c.dqk));
  }
};

struct Output {
  Array o;
  std::vector<float> lse;
};

// ---- reference: softmax over the visible keys, in double

Output Reference(const Problem& p) {
  const Case& c = p.c;
  const int group = c.num_qo_heads / c.num_kv_heads;
  Output out{Array(kF32, p.max_qo * c.num_qo_heads * c.dvo),
             std::vector<float>(p.max_qo * c.num_qo_heads, -kInf)};
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int i = 0; i < c.requests[r].qo_len; ++i) {
      const int pos = c.requests[r].kv_len - c.requests[r].qo_len + i;
      for (int h = 0; h < c.num_qo_heads; ++h) {
        const int64_t row = (p.qo_indptr[r] + i) * int64_t{c.num_qo_heads} + h;
        std::vector<double> logits;
        std::vector<int64_t> seen;
        double max = -INFINITY;
        for (int j = 0; j < c.requests[r].kv_len; ++j) {
          if (c.window_left >= 0 && j < pos - c.window_left) continue;
          if (c.window_right >= 0 && j > pos + c.window_right) continue;
          const int64_t slot = p.slots[p.slot_begin[r] + j] * c.num_kv_heads + h / group;
          double s = 0;
          for (int d = 0; d < c.dqk; ++d) s += p.q.Get(row * c.dqk + d) * p.k.Get(slot * c.dqk + d);
          s *= p.scale();
          if (c.soft_cap > 0) s = c.soft_cap * std::tanh(s / c.soft_cap);
          logits.push_back(s);
          seen.push_back(slot);
          max = std::fmax(max, s);
        }
        if (logits.empty()) continue;
        if (c.sinks) max = std::fmax(max, p.sinks[h]);
        double sum = c.sinks ? std::exp(p.sinks[h] - max) : 0;
        std::vector<double> o(c.dvo);
        for (size_t j = 0; j < logits.size(); ++j) {
          const double w = std::exp(logits[j] - max);
          sum += w;
          for (int d = 0; d < c.dvo; ++d) o[d] += w * p.v.Get(seen[j] * c.dvo + d);
        }
        for (int d = 0; d < c.dvo; ++d) out.o.Set(row * c.dvo + d, static_cast<float>(o[d] / sum));
        out.lse[row] = static_cast<float>(max + std::log(sum));
      }
    }
  }
  return out;
}

// ---- a random plan, and a run of it

struct PlanData {
  PlanHeader header{};
  std::vector<int32_t> queue_indptr{0};
  std::vector<WorkItem> items;
  std::vector<MergeGroup> groups;
  std::vector<int32_t> partial_rows;
};

PlanData RandomPlan(const Problem& p, int num_ctas, uint32_t seed) {
  std::mt19937 rng(seed);
  const Case& c = p.c;
  const int group = c.num_qo_heads / c.num_kv_heads;
  PlanData plan;
  // Units of consecutive heads with one span stay together, as heads_per_unit requires.
  std::vector<std::vector<WorkItem>> units;
  int32_t partial_rows = 0;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    const Request& request = c.requests[r];
    for (int token = 0; token < request.qo_len;) {
      const int left = request.qo_len - token;
      const int tile = left * group <= c.tile_q0 ? 0 : 1;
      const int height = (tile == 0 ? c.tile_q0 : c.tile_q1) / group;
      const int n = std::min(std::min(left, height), c.max_tile_tokens);
      const int pos = request.kv_len - request.qo_len + token;
      int begin = c.window_left >= 0 ? std::max(0, pos - c.window_left) : 0;
      int end = c.window_right >= 0 ? std::min(request.kv_len, pos + n - 1 + c.window_right + 1)
                                    : request.kv_len;
      begin = std::max(0, std::min(begin, request.kv_len));
      end = std::max(begin, end);
      std::vector<int> cuts{begin};
      while (c.split >= 0 && cuts.back() < end) {
        const int chunk =
            c.split ? c.split - cuts.back() % c.split : 1 + static_cast<int>(rng() % 200);
        if (cuts.back() + chunk >= end) break;
        cuts.push_back(cuts.back() + chunk);
      }
      cuts.push_back(end);
      const int num_chunks = static_cast<int>(cuts.size()) - 1, rows = n * group;
      const int32_t group_base = static_cast<int32_t>(plan.groups.size()),
                    partial_base = partial_rows;
      if (num_chunks > 1) {
        for (int h = 0; h < c.num_kv_heads; ++h) {
          const auto partials_begin = static_cast<int32_t>(plan.partial_rows.size());
          const int place = c.split > 0 ? begin / c.split % kReduceBatch : 0;
          plan.groups.push_back(
              {p.qo_indptr[r] + token, n, h, num_chunks, partials_begin, 1, -1, place});
          for (int i = 0; i < num_chunks; ++i) {
            plan.partial_rows.push_back(partial_base + (h * num_chunks + i) * rows);
          }
        }
        partial_rows += c.num_kv_heads * rows * num_chunks;
      }
      for (int i = 0; i < num_chunks; ++i) {
        std::vector<WorkItem> unit;
        for (int h = 0; h < c.num_kv_heads; ++h) {
          WorkItem item{
              p.qo_indptr[r] + token, n, h, tile, cuts[i], cuts[i + 1], p.kv_base[r], pos, -1, -1,
              static_cast<int>(r),    0};
          if (num_chunks > 1) {
            item.partial_row = partial_base + (h * num_chunks + i) * rows;
            item.merge_idx = group_base + h;
            item.num_groups = 1;
          }
          unit.push_back(item);
        }
        units.push_back(unit);
      }
      token += n;
    }
  }
  if (!c.in_order) std::shuffle(units.begin(), units.end(), rng);
  for (int q = 0; q < num_ctas; ++q) {
    for (size_t u = q; u < units.size(); u += num_ctas) {
      plan.items.insert(plan.items.end(), units[u].begin(), units[u].end());
    }
    plan.queue_indptr.push_back(static_cast<int32_t>(plan.items.size()));
  }
  plan.header.magic = kPlanMagic;
  plan.header.batch_size = static_cast<i32>(c.requests.size());
  plan.header.nnz_qo = static_cast<i32>(p.nnz_qo);
  plan.header.num_items = static_cast<i32>(plan.items.size());
  plan.header.num_merge_groups = static_cast<i32>(plan.groups.size());
  plan.header.num_partial_rows = partial_rows;
  return plan;
}

// Operands and plan for a call of either pass.
AttentionParams ParamsOf(const Problem& p, const PlanData& plan) {
  const Case& c = p.c;
  AttentionParams a{};
  a.q = p.q.bytes.data();
  a.k = p.k.bytes.data();
  a.v = p.v.bytes.data();
  a.sinks = c.sinks ? p.sinks.data() : nullptr;
  a.layer = p.layer_idx ? p.layer.data() : nullptr;
  a.header = &plan.header;
  a.queue_indptr = plan.queue_indptr.data();
  a.items = plan.items.data();
  a.merge_groups = plan.groups.data();
  a.partial_rows = plan.partial_rows.data();
  a.page_indices = p.page_indices.data();
  a.num_pages = p.num_pages;
  a.num_layers = c.num_layers;
  a.max_qo_tokens = static_cast<i32>(p.max_qo);
  a.num_ctas = static_cast<i32>(plan.queue_indptr.size() - 1);
  a.num_qo_heads = c.num_qo_heads;
  a.num_kv_heads = c.num_kv_heads;
  a.group_size = c.num_qo_heads / c.num_kv_heads;
  a.head_dim_qk = c.dqk;
  a.head_dim_vo = c.dvo;
  a.page_size = c.page_size;
  a.window_left = c.window_left;
  a.window_right = c.window_right;
  a.sm_scale = p.scale();
  a.logits_soft_cap = c.soft_cap;
  a.kv_format = c.codes ? kInt8Format : kPlainFormat;
  return a;
}

}  // namespace
}  // namespace jax_attn
