// What the last launches of gradients of linear attention share: a CTA of eight warps has a chunk
// and a q and k head, and takes from v heads 64 columns of v at a time. Warps have 16 of the
// chunk's rows and half of the channels of k.
#pragma once

#include "cuda/common/linear_gradient_scan.cuh"

namespace jax_attn {

template <class Traits>
class LinearGradientParts : protected LinearPlaces<Traits> {
  using Places = LinearPlaces<Traits>;

 public:
  using Params = LinearGradientParams;
  static constexpr int kNumThreads = 256, kWarps = kNumThreads / kWarpSize;
  static constexpr int kMinCtasPerSm = 1;

 protected:
  using Shape = typename Places::Dims;
  using Image = LinearImage<Shape>;
  using Places::p_, Places::plan_;
  static constexpr int kDtype = Traits::kDtype;
  using E = Element<kDtype>;
  static constexpr int kDimK = Traits::kHeadDimK, kDimV = Traits::kHeadDimV, kK = Shape::kK;
  static constexpr bool kHasDeltaRule = Traits::kHasDeltaRule;
  static constexpr int kDecays =
      Traits::kDecay == kChannelDecay ? kDimK : 1;  // of a token and head
  static constexpr int kBlocks = kLinearTokens / 16;
  static constexpr int kParts = Shape::kV / 64;  // of 64 columns of v
  static constexpr int kHalf = kK / 2;           // channels of k of a warp
  static constexpr int kTiles = kHalf / 8;

  // What products of a part of the columns of v read.
  struct Part {
    alignas(1024) unsigned char d_o[kPartBytes];
    alignas(1024) unsigned char fresh[kPartBytes];
    alignas(1024) unsigned char d_r[kPartBytes];
    alignas(1024) unsigned char s[Image::kTileBytes];
    alignas(1024) unsigned char d_s[Image::kTileBytes];
  };

  __device__ __forceinline__ explicit LinearGradientParts(const Params& params)
      : Places(params.forward),
        params_(params),
        warp_(Uniform(static_cast<int>(threadIdx.x) / kWarpSize)),
        block_(warp_ % kBlocks),
        half_(warp_ / kBlocks) {}

  __device__ __forceinline__ static int Lane() {
    return Opaque(static_cast<int>(threadIdx.x)) % kWarpSize;
  }

  // Gradients of rows that are no token's are 0, all of them with a fault.
  __device__ __forceinline__ void FillPadding() const {
    const i32 rows = p_.plan.max_tokens;
    const i64 of_keys = static_cast<i64>(p_.num_qk_heads) * kDimK;
    plan_.template FillRows<kDtype, 8>(params_.d_q, rows, of_keys, 0.0f);
    plan_.template FillRows<kDtype, 8>(params_.d_k, rows, of_keys, 0.0f);
    plan_.template FillRows<kDtype, 8>(params_.d_v, rows, static_cast<i64>(p_.num_v_heads) * kDimV,
                                       0.0f);
    if (params_.d_g) {
      plan_.template FillRows<kElementF32, 1>(params_.d_g, rows,
                                              static_cast<i64>(p_.num_v_heads) * kDecays, 0.0f);
    }
    if (params_.d_beta) {
      plan_.template FillRows<kElementF32, 1>(params_.d_beta, rows, p_.num_v_heads, 0.0f);
    }
  }

  // Norm factors of the rows of k and q.
  __device__ __forceinline__ static void FindNorms(const unsigned char* k, const unsigned char* q,
                                                   float (&norms)[2][kLinearTokens]) {
    if (static_cast<int>(threadIdx.x) >= 2 * kLinearTokens) return;
    const int row = static_cast<int>(threadIdx.x) % kLinearTokens;
    const int which = static_cast<int>(threadIdx.x) / kLinearTokens;
    norms[which][row] = NormFactor<Traits, kK>(which == 0 ? k : q, row);
  }

  __device__ __forceinline__ void LoadPart(Part& to, int chunk, const StateChunk& rows, int head,
                                           int part) const {
    const LinearGradientWorkspace at = this->Arrays();
    const i64 pitch = static_cast<i64>(p_.num_v_heads) * kDimV;
    const i64 column = static_cast<i64>(head) * kDimV + 64 * part;
    const int columns = kDimV - 64 * part;
    const auto load = [&](unsigned char* tile, const void* array) {
      LoadTile<64, kNumThreads>(SharedAddress(tile), array, rows.begin, rows.length, pitch, column,
                                columns);
    };
    load(to.d_o, params_.d_o);
    load(to.fresh, this->template At<u16>(at.fresh));
    load(to.d_r, this->template At<u16>(at.d_r));
    const i64 image = (static_cast<i64>(chunk) * p_.num_v_heads + head) * Image::kBytes +
                      static_cast<i64>(part) * Image::kTileBytes + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < Image::kTileBytes / 16 / kNumThreads; ++i) {
      const int offset = i * kNumThreads * 16;
      CopyAsync16(SharedAddress(to.s) + threadIdx.x * 16 + offset,
                  this->template At<const unsigned char>(at.states) + image + offset, true);
      CopyAsync16(SharedAddress(to.d_s) + threadIdx.x * 16 + offset,
                  this->template At<const unsigned char>(at.d_states) + image + offset, true);
    }
  }

  __device__ __forceinline__ void MultiplyPart(const Part& tiles, float (&y)[kTiles][4],
                                               float (&x)[kTiles][4], float (&w)[kTiles][4],
                                               float (&upper)[4][4], float (&lower)[4][4]) const {
    const u32 s = SharedAddress(tiles.s), d_s = SharedAddress(tiles.d_s);
    const u32 fresh_tile = SharedAddress(tiles.fresh);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 d_o[4], d_r[4], fresh[4];
      LoadA(d_o, SharedAddress(tiles.d_o), 16 * block_, 16 * step);
      LoadA(fresh, fresh_tile, 16 * block_, 16 * step);
      if constexpr (kHasDeltaRule) LoadA(d_r, SharedAddress(tiles.d_r), 16 * block_, 16 * step);
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        u32 b[4];
        LoadColumnsB(b, s, 16 * step, kHalf * half_ + 16 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          E::Mma(y[2 * j + i], d_o, b[2 * i], b[2 * i + 1]);
          if constexpr (kHasDeltaRule) E::Mma(x[2 * j + i], d_r, b[2 * i], b[2 * i + 1]);
        }
        LoadColumnsB(b, d_s, 16 * step, kHalf * half_ + 16 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) E::Mma(w[2 * j + i], fresh, b[2 * i], b[2 * i + 1]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (2 * half_ + j > block_) break;
        u32 b[4];
        LoadRowsB(b, fresh_tile, 32 * half_ + 16 * j, 16 * step);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          E::Mma(upper[2 * j + i], d_o, b[2 * i], b[2 * i + 1]);
          if constexpr (kHasDeltaRule) E::Mma(lower[2 * j + i], d_r, b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }

  // Writes a part of dV. factors: beta. Returns the thread's part of a token's dR . V.
  __device__ __forceinline__ float WriteValues(const Part& tiles, const StateChunk& rows, int head,
                                               int part,
                                               const float (&factors)[kLinearTokens]) const {
    constexpr int kOfToken = kNumThreads / kLinearTokens;
    const int token = static_cast<int>(threadIdx.x) / kOfToken;
    const int first = static_cast<int>(threadIdx.x) % kOfToken;
    float sum = 0.0f;
    if (token >= rows.length) return sum;
    const float beta = factors[token];
    const i64 row = ((rows.begin + token) * static_cast<i64>(p_.num_v_heads) + head) * kDimV;
#pragma unroll
    for (int i = 0; i < 8 / kOfToken; ++i) {
      const int column = (first + i * kOfToken) * 8;
      if (64 * part + column >= kDimV) continue;
      const i64 at = row + 64 * part + column;
      const uint4 d_r = *reinterpret_cast<const uint4*>(tiles.d_r + SwizzledByte(token, column));
      const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const u16*>(p_.v) + at);
      sum = AddProducts<kDtype>(d_r, v, sum);
      const auto scaled = [&](u32 pair) {
        return E::Pack(beta * HalfOf<kDtype>(pair, 0), beta * HalfOf<kDtype>(pair, 1));
      };
      StoreVector(static_cast<u16*>(params_.d_v) + at,
                  make_uint4(scaled(d_r.x), scaled(d_r.y), scaled(d_r.z), scaled(d_r.w)));
    }
    return sum;
  }

  // The warp's two rows of a lane: 16 block_ + lane / 4 and 8 further.
  __device__ __forceinline__ int Row(int half) const { return 16 * block_ + Lane() / 4 + 8 * half; }

  const Params& params_;
  const int warp_, block_, half_;
};

}  // namespace jax_attn
