// The append kernels without a GPU: cuda/any/append.cuh and append_rotated.cuh run in emulation and
// must write the same bits as the CPU's kernels.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include <cstring>
#include <random>
#include <string>

#include "cpu/append.h"
#include "cuda/any/append.cuh"
#include "cuda/any/append_rotated.cuh"
#include "plan/damaged_headers.h"
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
  bool scaled = false;  // formats with a scale for each head
};

template <int kElement, int kFormat>
struct TraitsOf {
  static constexpr int kArch = 90, kDtype = kElement, kKvFormat = kFormat;
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
    max_kv_ = header_.nnz_kv + 1;
    tokens_ = header_.nnz_qo + 3;  // the last ones are padding
    // Words after the batch look like more requests of one token; the kernel must not read them.
    max_batch_ = static_cast<i32>(c.requests.size()) + 8;
    while (static_cast<i32>(kv_lens_.size()) < max_batch_) {
      kv_lens_.push_back(1);
      qo_indptr_.push_back(static_cast<i32>(kv_lens_.size()));
      page_indptr_.push_back(0);
    }
    for (int i = 0; i < tokens_ * c.dqk / 2; ++i) {
      const float angle = std::uniform_real_distribution<float>(-4, 4)(rng_);
      cos_.push_back(std::cos(angle));
      sin_.push_back(std::sin(angle));
    }
  }

  void Run(bool rotates) {
    FillNew(rotates);
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

  // Headers that do not fit this launch: nothing is written.
  void RunDamaged(bool rotates) {
    FillNew(rotates);
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
  static constexpr bool kHasOwnScales = FormatOf(Traits::kKvFormat).scale_bytes > 0;
  static i64 RowBytes(int head_dim) {
    return Traits::kKvFormat == kPlainFormat ? head_dim * kBytes
                                             : QuantizedRowBytes(Traits::kKvFormat, head_dim);
  }
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
            std::vector<char>(slots * RowBytes(c_.dqk), 0x7b),
            std::vector<char>(slots * RowBytes(c_.dvo), 0x7b)};
  }

  // The bits of a rotated NaN differ between machines.
  void FillNew(bool rotates) {
    const int row_dim = (c_.q_heads + c_.kv_heads) * c_.dqk + c_.kv_heads * c_.dvo;
    qkv_ = Elements(int64_t{tokens_} * row_dim, !rotates);
  }

  std::vector<char> Elements(int64_t n, bool with_nan) {
    std::vector<char> bytes(n * kBytes);
    for (int64_t i = 0; i < n; ++i) {
      float x = std::normal_distribution<float>()(rng_);
      if constexpr (kHasOwnScales) x = Awkward(i, x, with_nan);
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

  // Blocks of all sizes, ties, zeros, and sometimes a row that is NaN.
  static float Awkward(int64_t i, float x, bool with_nan) {
    const int64_t block = i / 32;
    if (block % 7 == 0) return i % 32 == 0 ? 6.0f : static_cast<float>(i * 5 % 49 - 24) / 4;
    if (block % 11 == 0) return block % 2 == 0 ? 0.0f : 1e-7f;
    if (with_nan && i % 3001 == 17) return i % 2 == 0 ? NAN : INFINITY;
    return std::ldexp(x, static_cast<int>(block * 5 % 30) - 20);
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
    p.k_row_bytes = c_.kv_heads * RowBytes(c_.dqk);
    p.v_row_bytes = c_.kv_heads * RowBytes(c_.dvo);
    p.page_size = c_.page_size;
    p.max_qo_tokens = tokens_;
    p.max_batch = max_batch_;
    p.max_kv = max_kv_;
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
  int num_pages_ = 0, tokens_ = 0, max_batch_ = 0, max_kv_ = 0;
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
           Case{"many heads", {{1, 4}, {0, 3}, {1, 7}, {0, 0}, {3, 9}}, 9, 9, 256, 144, 4},
           Case{"short blocks", mixed, 3, 3, 80, 48, 4},
       }) {
    // The limit of select/cuda.cc for quantized values with scales of rows.
    const int multiple = FormatOf(Traits::kKvFormat).scale_bytes > 0 ? 16 : 8;
    if (c.dqk % multiple != 0 || c.dvo % multiple != 0) continue;
    Case named = c;
    named.name = dtype + ", " + c.name;
    Batch<Traits> batch(named);
    batch.Run(false);
    batch.Run(true);
    if (c.name == "wide") {
      batch.RunDamaged(false);
      batch.RunDamaged(true);
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunCases<TraitsOf<kElementBf16, kPlainFormat>>("bf16");
  RunCases<TraitsOf<kElementF16, kPlainFormat>>("f16");
  RunCases<TraitsOf<kElementF32, kPlainFormat>>("f32");
  RunCases<TraitsOf<kElementBf16, kE4m3Format>>("bf16 as e4m3");
  RunCases<TraitsOf<kElementF16, kE4m3Format>>("f16 as e4m3");
  RunCases<TraitsOf<kElementBf16, kE5m2Format>>("bf16 as e5m2");
  RunCases<TraitsOf<kElementF16, kE5m2Format>>("f16 as e5m2");
  RunCases<TraitsOf<kElementBf16, kInt8Format>>("bf16 as int8");
  RunCases<TraitsOf<kElementF16, kInt8Format>>("f16 as int8");
  RunCases<TraitsOf<kElementBf16, kMxfp4Format>>("bf16 as mxfp4");
  RunCases<TraitsOf<kElementF16, kMxfp4Format>>("f16 as mxfp4");
  RunCases<TraitsOf<kElementBf16, kNvfp4Format>>("bf16 as nvfp4");
  RunCases<TraitsOf<kElementF16, kNvfp4Format>>("f16 as nvfp4");
  RunCases<TraitsOf<kElementBf16, kInt4Format>>("bf16 as int4");
  RunCases<TraitsOf<kElementF16, kInt4Format>>("f16 as int4");
  if (g_failures == 0) std::printf("append_cuda_test: ok\n");
  return g_failures != 0;
}
