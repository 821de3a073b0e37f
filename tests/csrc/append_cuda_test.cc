// The append kernels, without a GPU: cuda/any/append.cuh and append_rotated.cuh run in emulation
// and must leave, bit for bit, what the CPU's kernels leave.
#include "cuda_emulation.h"
// The above stands in for CUDA and comes first.
#include <cstring>
#include <random>
#include <string>

#include "cpu/append.h"
#include "cuda/any/append.cuh"
#include "cuda/any/append_rotated.cuh"
#include "damaged_headers.h"
#include "spec.h"

namespace jax_attn {
namespace {

int g_failures = 0;

struct Request {
  int qo_len, kv_len;
};

struct Case {
  std::string name;
  std::vector<Request> requests;
  int q_heads, kv_heads, dqk, dvo, page_size;
  bool scaled = false;  // of e4m3
};

template <int kElement, bool kIsE4m3>
struct TraitsOf {
  static constexpr int kArch = 90, kDtype = kElement;
  static constexpr int kKvFormat = kIsE4m3 ? kE4m3Format : kPlainFormat;
};

template <class Traits>
class Batch {
 public:
  explicit Batch(const Case& c) : c_(c), rng_(static_cast<unsigned>(c.requests.size())) {
    qo_indptr_ = page_indptr_ = {0};
    for (const Request& r : c.requests) {
      qo_indptr_.push_back(qo_indptr_.back() + r.qo_len);
      kv_lens_.push_back(r.kv_len);
      page_indptr_.push_back(page_indptr_.back() + (r.kv_len + c.page_size - 1) / c.page_size);
    }
    num_pages_ = page_indptr_.back() + 2;
    for (int i = 0; i < num_pages_; ++i) page_indices_.push_back(num_pages_ - 1 - i);
    header_.magic = kPlanMagic;
    header_.version = kPlanVersion;
    header_.batch_size = static_cast<i32>(c.requests.size());
    header_.nnz_qo = qo_indptr_.back();
    header_.nnz_kv = page_indptr_.back();
    header_.max_page_id = num_pages_ - 1;
    const int row_dim = (c.q_heads + c.kv_heads) * c.dqk + c.kv_heads * c.dvo;
    tokens_ = header_.nnz_qo + 3;  // the last ones are padding
    qkv_ = Elements(tokens_ * row_dim);
    for (int i = 0; i < tokens_ * c.dqk / 2; ++i) {
      const float angle = std::uniform_real_distribution<float>(-4, 4)(rng_);
      cos_.push_back(std::cos(angle));
      sin_.push_back(std::sin(angle));
    }
  }

  void Run(bool rotates) {
    Outputs want = MakeOutputs(), got = want;
    InlinePool pool;
    AppendParams p = Params(rotates, &want);
    rotates ? AppendRotatedCpu(p, pool) : AppendCpu(p, pool);
    for (int num_ctas : {1, 3}) {
      Launch(rotates, num_ctas, &(got = MakeOutputs()));
      Compare(rotates, "q", want.q, got.q);
      Compare(rotates, "k_pages", want.k, got.k);
      Compare(rotates, "v_pages", want.v, got.v);
    }
  }

  // Headers that are none of this launch's: nothing is written.
  void RunDamaged(bool rotates) {
    const PlanHeader good = header_;
    const Outputs blank = MakeOutputs();
    Outputs got = blank;
    for (const DamagedHeader& damaged : DamagedHeaders(good, Params(rotates, &got))) {
      header_ = damaged.header;
      Launch(rotates, 1, &(got = blank));
      const bool is_blank = got.q == blank.q && got.k == blank.k && got.v == blank.v;
      if (is_blank) continue;
      std::printf("FAILED %s%s: %s: something is written\n", c_.name.c_str(),
                  rotates ? ", rotated" : "", damaged.what.c_str());
      ++g_failures;
    }
    header_ = good;
  }

 private:
  static constexpr int kBytes = Traits::kDtype == kElementF32 ? 4 : 2;
  static constexpr int kKvBytes = Traits::kKvFormat == kE4m3Format ? 1 : kBytes;
  static constexpr int kNumLayers = 2;

  struct Outputs {
    std::vector<char> q, k, v;
  };

  void Launch(bool rotates, int num_ctas, Outputs* out) {
    const AppendParams p = Params(rotates, out);
    if (rotates) {
      using Body = AppendRotatedBody<Traits>;
      emulation::machine.Launch(num_ctas, Body::kNumThreads, 1, [&] { Body::Run(p); });
    } else {
      using Body = AppendBody<Traits>;
      emulation::machine.Launch(num_ctas, Body::kNumThreads, 1, [&] { Body::Run(p); });
    }
  }

  Outputs MakeOutputs() const {
    const int64_t slots = int64_t{kNumLayers} * num_pages_ * c_.page_size * c_.kv_heads;
    return {std::vector<char>(int64_t{tokens_} * c_.q_heads * c_.dqk * kBytes, 0x7b),
            std::vector<char>(slots * c_.dqk * kKvBytes, 0x7b),
            std::vector<char>(slots * c_.dvo * kKvBytes, 0x7b)};
  }

  std::vector<char> Elements(int64_t n) {
    std::vector<char> bytes(n * kBytes);
    for (int64_t i = 0; i < n; ++i) {
      const float x = std::normal_distribution<float>()(rng_);
      u32 bits;
      if constexpr (kBytes == 4) {
        std::memcpy(&bits, &x, 4);
      } else {
        bits = Element<Traits::kDtype>::Pack(x, 0) & 0xffff;
      }
      std::memcpy(&bytes[i * kBytes], &bits, kBytes);
    }
    return bytes;
  }

  AppendParams Params(bool rotates, Outputs* out) {
    AppendParams p = {};
    p.k_pages = out->k.data();
    p.v_pages = out->v.data();
    p.layer = &layer_;
    p.header = &header_;
    p.qo_indptr = qo_indptr_.data();
    p.kv_lens = kv_lens_.data();
    p.page_indptr = page_indptr_.data();
    p.page_indices = page_indices_.data();
    p.num_pages = num_pages_;
    p.k_row_bytes = c_.kv_heads * c_.dqk * kKvBytes;
    p.v_row_bytes = c_.kv_heads * c_.dvo * kKvBytes;
    p.page_size = c_.page_size;
    p.max_qo_tokens = tokens_;
    p.max_batch = static_cast<i32>(c_.requests.size()) + 1;
    p.max_kv = page_indptr_.back() + 1;
    p.kv_format = Traits::kKvFormat;
    p.dtype = Traits::kDtype;
    p.num_kv_heads = c_.kv_heads;
    p.head_dim_qk = c_.dqk;
    p.head_dim_vo = c_.dvo;
    p.k_scale = p.v_scale = c_.scaled ? scales_ : nullptr;
    if (rotates) {
      p.qkv = qkv_.data();
      p.cos = cos_.data();
      p.sin = sin_.data();
      p.q = out->q.data();
      p.num_qo_heads = c_.q_heads;
    } else {
      p.k_new = qkv_.data();
      p.v_new = qkv_.data();
    }
    return p;
  }

  void Compare(bool rotates, const char* what, const std::vector<char>& want,
               const std::vector<char>& got) {
    if (want == got) return;
    int64_t at = 0;
    while (want[at] == got[at]) ++at;
    std::printf("FAILED %s%s: %s differs from byte %lld of %zu on\n", c_.name.c_str(),
                rotates ? ", rotated" : "", what, static_cast<long long>(at), want.size());
    ++g_failures;
  }

  const Case& c_;
  std::mt19937 rng_;
  alignas(64) PlanHeader header_ = {};
  std::vector<i32> qo_indptr_, kv_lens_, page_indptr_, page_indices_;
  std::vector<char> qkv_;
  std::vector<float> cos_, sin_;
  float scales_[8] = {0.5f, 3, 0.01f, 1, 0.1f, 7, 2, 0.3f};
  i32 layer_ = kNumLayers - 1;
  int num_pages_ = 0, tokens_ = 0;
};

template <class Traits>
void RunCases(const std::string& dtype) {
  std::vector<Request> decode(67);
  for (size_t r = 0; r < decode.size(); ++r) decode[r] = {1, static_cast<int>(1 + 5 * r % 41)};
  const std::vector<Request> mixed = {{2, 5}, {0, 4}, {7, 7}, {1, 1}, {0, 0}, {3, 70}, {5, 2}};
  for (const Case& c : {
           Case{"decode", decode, 8, 2, 128, 128, 16},
           Case{"odd", mixed, 3, 3, 24, 8, 3, true},
           Case{"one head", mixed, 5, 1, 8, 16, 1},
           Case{"wide", {{3, 9}, {1, 20}}, 2, 1, 256, 256, 5, true},
           Case{"nothing", {}, 4, 2, 64, 64, 16},
       }) {
    Case named = c;
    named.name = dtype + ", " + c.name;
    Batch<Traits> batch(named);
    batch.Run(false);
    batch.Run(true);
    if (c.name == "odd") {
      batch.RunDamaged(false);
      batch.RunDamaged(true);
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunCases<TraitsOf<kElementBf16, false>>("bf16");
  RunCases<TraitsOf<kElementF16, false>>("f16");
  RunCases<TraitsOf<kElementF32, false>>("f32");
  RunCases<TraitsOf<kElementBf16, true>>("bf16 as e4m3");
  RunCases<TraitsOf<kElementF16, true>>("f16 as e4m3");
  if (g_failures == 0) std::printf("append_cuda_test: ok\n");
  return g_failures != 0;
}
