// Stands in for cuda/sm90/ptx.cuh: include it after cuda_emulation.h.
//
// Asynchronous work happens as late as allowed, and sometimes early. A copy takes its slot when it
// is issued and arrives when no thread can go on without it, or at a random earlier time. A WGMMA
// reads its operands when it is issued and again when it is waited for, and both must be equal; its
// accumulators are NaN until then. Beyond the mistakes that cuda_emulation.h finds, it fails on
//   - shared memory that wgmma reads although writes to it were not fenced (it reads NaN or the
//     values before them): operands come from async_smem;
//   - accumulators or fragments that were written without wgmma.fence before the product, or before
//     the product was waited for;
//   - warps of a warpgroup that issue different products;
//   - barriers that were not initialised, that more threads arrive at than they count, named
//     barriers whose users disagree about the number of threads;
//   - a deadlock, with what every warp waits for.
// Cannot find: ordinary accesses without a fence before TMA overwrites the same memory, and a
// register limit that the compiler does not meet.
#pragma once
#define JAX_ATTN_CUDA_SM90_PTX_CUH_

#include <deque>
#include <map>

#include "cuda/common/types.cuh"
#include "emulation/cuda_emulation.h"

namespace jax_attn {
namespace emulation {

// mbarrier: a phase is complete when no arrivals and no bytes are pending.
struct SharedBarrier {
  int num_arrivals;
  int pending;
  int pending_bytes;
  u32 phase;
};

// Stands in for a CUtensorMap, in the words of a TensorMap.
struct TmaArray {
  u16* array;  // [num_layers, num_rows, num_heads, head_dim]
  u64 num_layers, num_rows, num_heads, head_dim;
  u64 tile_rows, tile_heads;  // of 64 columns
};

// A TMA tile in flight to global memory, which arrives as late as allowed.
struct TmaStoreTile {
  TmaArray to;
  u64 row, head, column;
  u32 shared;
  std::vector<u16> elements;  // as they were when the copy was issued
};

// A bulk copy of words in flight to global memory.
struct BulkOfResults {
  float* to;
  bool adds;
  u32 shared;
  std::vector<float> words;
  bool is_read = false;  // and waited for: what it read may be written again
};

// A WGMMA operand in shared memory, given by its descriptor. Layouts are those of the PTX ISA
// ("Asynchronous warpgroup-level matrix shared memory layout") in 16-byte chunks, in the notation
// of CUTLASS (cute/atom/mma_traits_sm90_gmma.hpp); T is the 8 elements of a chunk.
class SharedMatrix {
 public:
  SharedMatrix(u64 descriptor, bool mn_major) : mn_major_(mn_major) {
    start_ = static_cast<u32>(descriptor & 0x3fff) << 4;
    leading_ = static_cast<u32>(descriptor >> 16 & 0x3fff) << 4;
    stride_ = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
    if ((descriptor >> 49 & 7) != 0) Fail("no base offset here: swizzled tiles start aligned");
    switch (descriptor >> 62) {
      case 0:
        swizzle_bits_ = 0;
        break;
      case 1:
        swizzle_bits_ = 3;
        break;
      case 2:
        swizzle_bits_ = 2;
        break;
      case 3:
        swizzle_bits_ = 1;
        break;
    }
  }

  // Reads elements [begin, begin + num_rows) x [0, 16): rows or columns (the dimension that is not
  // summed over, in eights), and k. Two 8-bit values along k are an element.
  JAX_ATTN_EMULATION_INLINE void Read(int begin, int num_rows, u16* elements) const {
    for (int mn = begin; mn < begin + num_rows; mn += 8) {
      for (int k = 0; k < 16; k += 8) {
        u16* const to = elements + (mn - begin) * 16 + k;
        for (int i = 0; i < 8; ++i) {  // a chunk
          u16 x[8];
          std::memcpy(
              x, mn_major_ ? Chunk(AddressMnMajor(mn, k + i)) : Chunk(AddressKMajor(mn + i, k)),
              sizeof(x));
          for (int j = 0; j < 8; ++j) to[mn_major_ ? j * 16 + i : i * 16 + j] = x[j];
        }
      }
    }
  }

 private:
  // The address of 8 elements.
  JAX_ATTN_EMULATION_INLINE const unsigned char* Chunk(u32 address) const {
    // The XOR acts on the address itself, not on the offset within the matrix.
    const u32 mask = (1u << swizzle_bits_) - 1;
    const u32 swizzled = address ^ (address >> 7 & mask) << 4;
    if (swizzled + 16 > sizeof(async_smem)) Fail("a matrix reaches beyond shared memory");
    return machine.AsyncSmem() + swizzled;
  }

  // ((8,m),(T,2)) : ((span,SBO),(1,T)); without swizzle the second chunk is LBO away.
  JAX_ATTN_EMULATION_INLINE u32 AddressKMajor(int mn, int k) const {
    const u32 row = 16u << swizzle_bits_, chunk = swizzle_bits_ == 0 ? leading_ : 16;
    return start_ + mn % 8 * row + mn / 8 * stride_ + k / 8 * chunk + k % 8 * 2;
  }

  // ((T,chunks,m),(8,2)) : ((1,T,LBO),(span,SBO)); without swizzle LBO and SBO are exchanged.
  JAX_ATTN_EMULATION_INLINE u32 AddressMnMajor(int mn, int k) const {
    const int width = 8 << swizzle_bits_;  // elements of a row
    const u32 along = swizzle_bits_ == 0 ? stride_ : leading_;
    const u32 across = swizzle_bits_ == 0 ? leading_ : stride_;
    return start_ + mn % width * 2 + mn / width * along + k % 8 * (2 * width) + k / 8 * across;
  }

  bool mn_major_;
  int swizzle_bits_;
  u32 start_, leading_, stride_;
};

inline constexpr int kElementCodes = 100;  // e4m3

// The properties on which all four warps of a warpgroup must agree.
struct ProductShape {
  int n;
  int element;  // kElementBf16, kElementF16 or kElementCodes
  bool a_in_registers;
  u64 a, b;  // descriptors
  bool a_mn_major, b_mn_major;
  bool accumulate;

  bool operator==(const ProductShape& other) const {
    return n == other.n && element == other.element && a_in_registers == other.a_in_registers &&
           a == other.a && b == other.b && a_mn_major == other.a_mn_major &&
           b_mn_major == other.b_mn_major && accumulate == other.accumulate;
  }
};

// The 16 rows of a product that one warp computes.
struct Product {
  ProductShape shape;
  int number;             // of the warp's products
  float* d;               // accumulators of lane 0
  std::vector<u16> a, b;  // [16, 16], [n, 16] as they were when it was issued
};

// Accumulator registers of one warp's products. The values are in `d`, not in the registers, until
// all products are waited for.
struct Accumulators {
  int n;
  int num_products;  // in flight
  float* registers[32];
  std::vector<float> d;  // [16, n]
};

struct WarpState {
  int num_products = 0;
  int num_fences = 0;
  int num_registers = 0;  // a thread; 0: as launched
  std::vector<TmaStoreTile> open_stores, stores;
  std::vector<BulkOfResults> open_bulks, bulks;
  std::deque<std::vector<Product>> groups;
  std::vector<Product> open_group;
  std::map<float*, Accumulators> accumulators;  // in flight, by the registers of lane 0
  // Number of fences when lane 0's registers were last written back, or read as operand a.
  std::map<const float*, int> given_back;
  struct Fragment {
    u32 values[4];
    int num_fences;
  };
  std::map<const u32*, Fragment> fragments;
};

// The state that sm_90a adds to an SM.
class Sm90 : public Unit {
 public:
  Sm90() { machine.units.push_back(this); }

  void BeginCta(int num_threads) override {
    shared_barriers_.clear();
    warps_.clear();
    warps_.resize(num_threads / 32);
    issued_.clear();
    issued_.resize((num_threads + 127) / 128);
  }

  void EndCta() override {
    int num_registers = 0;
    bool all_set = true;
    for (size_t i = 0; i < warps_.size(); ++i) {
      const WarpState& warp = warps_[i];
      if (!warp.groups.empty() || !warp.open_group.empty()) {
        Fail(Text("warp %zu ends before its products", i));
      }
      if (!warp.stores.empty() || !warp.open_stores.empty()) {
        Fail(Text("warp %zu ends before its TMA tiles are read", i));
      }
      if (!warp.bulks.empty() || !warp.open_bulks.empty()) {
        Fail(Text("warp %zu ends before its bulk copies arrive", i));
      }
      if (warp.num_products != warps_[i / 4 * 4].num_products) {
        Fail(Text("warps %zu and %zu of a warpgroup issue %d and %d products", i / 4 * 4, i,
                  warps_[i / 4 * 4].num_products, warp.num_products));
      }
      num_registers += 32 * warp.num_registers;
      all_set = all_set && warp.num_registers > 0;
    }
    // The CTA's registers at launch, in eights a thread: warps can only take what others released.
    const int num_threads = 32 * static_cast<int>(warps_.size());
    if (all_set && num_registers > 64 * 1024 / num_threads / 8 * 8 * num_threads) {
      Fail(Text("the warps' limits add up to %d registers", num_registers));
    }
  }

  void Exchange(int drawer) override {
    Drawer& d = drawers_[drawer];
    std::swap(shared_barriers_, d.shared_barriers);
    std::swap(warps_, d.warps);
    std::swap(issued_, d.issued);
  }

  // --- mbarrier ---

  void Init(u32 barrier, int num_arrivals) {
    if (barrier % 8 != 0 || barrier + 8 > sizeof(smem)) Fail("misplaced barrier");
    if (num_arrivals < 1) Fail("a barrier for nobody");
    shared_barriers_[barrier] = {num_arrivals, num_arrivals, 0, 0};
  }

  // Bytes may complete before they are expected.
  void Arrive(u32 barrier, int num_arrivals, int num_bytes) {
    SharedBarrier& b = Find(barrier);
    if (num_arrivals > b.pending) Fail(Text("too many arrivals at the barrier at 0x%x", barrier));
    b.pending -= num_arrivals;
    b.pending_bytes += num_bytes;
    if (b.pending > 0 || b.pending_bytes != 0) return;
    b.pending = b.num_arrivals;
    ++b.phase;
  }

  void Wait(u32 barrier, u32 parity) {
    if (parity > 1) Fail("a parity is 0 or 1");
    const SharedBarrier& b = Find(barrier);
    machine.WaitUntil([&b, parity] { return (b.phase & 1) != parity; },
                      [&b, barrier, parity] {
                        return Text(
                            "the barrier at 0x%x, parity %u: phase %u lacks %d of %d arrivals and"
                            " %d bytes",
                            barrier, parity, b.phase, b.pending, b.num_arrivals, b.pending_bytes);
                      });
  }

  // --- WGMMA: called by one lane for its warp, between barriers of the warp ---

  WarpState& warp() { return warps_[machine.current().thread.x / 32]; }

  void Issue(const ProductShape& shape, float* const (&d)[32], const u32 (&a)[32][4],
             const u32* fragment) {
    WarpState& w = warp();
    CheckAgreement(shape, w.num_products);
    Accumulate(w, shape, d);
    if (shape.a_in_registers) CheckFragment(w, a[0], fragment);
    Product p = {shape, w.num_products++, d[0], {}, {}};
    if (shape.a_in_registers) {
      p.a.resize(16 * 16);
      for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
          const u32 pair = a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
          p.a[row * 16 + k] = static_cast<u16>(pair >> 16 * (k % 2));
        }
      }
    } else {
      p.a = ReadA(shape);
    }
    p.b = ReadB(shape);
    w.open_group.push_back(std::move(p));
  }

  void Commit() {
    WarpState& w = warp();
    w.groups.push_back(std::move(w.open_group));
    w.open_group.clear();
  }

  // The last product that all four warps must issue before at most num_pending groups are
  // unfinished.
  int LastAwaited(size_t num_pending) {
    const WarpState& w = warp();
    int last = -1;
    for (size_t i = 0; i + num_pending < w.groups.size(); ++i) {
      if (!w.groups[i].empty()) last = w.groups[i].back().number;
    }
    return last;
  }
  void WaitForIssue(int product) {
    const int first = machine.current().thread.x / 128 * 4;
    machine.WaitUntil(
        [this, first, product] {
          for (int i = first; i < first + 4; ++i) {
            if (warps_[i].num_products <= product) return false;
          }
          return true;
        },
        [product] { return Text("product %d of all warps of the warpgroup", product); });
  }

  void Finish(size_t num_pending) {
    WarpState& w = warp();
    for (; w.groups.size() > num_pending; w.groups.pop_front()) {
      for (const Product& p : w.groups.front()) Multiply(w, p);
    }
  }

 private:
  static constexpr u32 kInFlight = 0xffffffff;  // a NaN

  SharedBarrier& Find(u32 barrier) {
    const auto found = shared_barriers_.find(barrier);
    if (found == shared_barriers_.end()) {
      Fail(Text("there is no barrier at 0x%x, or not yet", barrier));
    }
    return found->second;
  }

  void CheckAgreement(const ProductShape& shape, int number) {
    const int group = machine.current().thread.x / 128;
    if (128 * group + 128 > machine.block_dim.x) Fail("wgmma needs a whole warpgroup");
    std::vector<ProductShape>& issued = issued_[group];
    if (static_cast<size_t>(number) == issued.size()) issued.push_back(shape);
    if (!(issued[number] == shape)) {
      Fail(Text("product %d differs between warps of a warpgroup", number));
    }
  }

  // Takes the accumulators away from the lanes until the product is waited for.
  void Accumulate(WarpState& w, const ProductShape& shape, float* const (&d)[32]) {
    const int count = shape.n / 2;
    for (const auto& [other, acc] : w.accumulators) {
      if (other != d[0] && other < d[0] + count && d[0] < other + acc.n / 2) {
        Fail("accumulators of products in flight overlap");
      }
    }
    const auto [found, is_new] = w.accumulators.try_emplace(d[0]);
    Accumulators& acc = found->second;
    if (is_new) {
      const auto given_back = w.given_back.find(d[0]);
      if (w.num_fences == (given_back == w.given_back.end() ? 0 : given_back->second)) {
        Fail("no wgmma.fence between registers and a product that adds to them");
      }
      acc.n = shape.n;
      acc.num_products = 0;
      acc.d.resize(16 * shape.n);
      for (int lane = 0; lane < 32; ++lane) {
        acc.registers[lane] = d[lane];
        for (int i = 0; i < count; ++i) {
          acc.d[Position(shape.n, lane, i)] = d[lane][i];
          d[lane][i] = EmulationBits<float>(kInFlight);
        }
      }
    }
    if (acc.n != shape.n) Fail("products of different shapes add to the same registers");
    ++acc.num_products;
  }

  // A fragment that changed since an earlier product needs a fence in between.
  void CheckFragment(WarpState& w, const u32 (&values)[4], const u32* registers) {
    WarpState::Fragment& last = w.fragments[registers];
    if (last.num_fences == w.num_fences && !std::equal(values, values + 4, last.values)) {
      Fail("no wgmma.fence between registers and a product that has them as operand a");
    }
    std::copy_n(values, 4, last.values);
    last.num_fences = w.num_fences;
  }

  // Index of register i of `lane` in the warp's [16, n].
  static int Position(int n, int lane, int i) {
    return (lane / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + 2 * (lane % 4) + i % 2;
  }

  JAX_ATTN_EMULATION_HOT std::vector<u16> ReadA(const ProductShape& shape) const {
    const SharedMatrix matrix(shape.a, shape.a_mn_major);
    const int first_row = machine.current().thread.x / 32 % 4 * 16;
    std::vector<u16> a(16 * 16);
    matrix.Read(first_row, 16, a.data());
    return a;
  }
  JAX_ATTN_EMULATION_HOT std::vector<u16> ReadB(const ProductShape& shape) const {
    const SharedMatrix matrix(shape.b, shape.b_mn_major);
    std::vector<u16> b(shape.n * 16);
    matrix.Read(0, shape.n, b.data());
    return b;
  }

  JAX_ATTN_EMULATION_HOT void Multiply(WarpState& w, const Product& p) {
    if (!p.shape.a_in_registers && ReadA(p.shape) != p.a) {
      Fail(Text("operand a of product %d changed before it was waited for", p.number));
    }
    if (ReadB(p.shape) != p.b) {
      Fail(Text("operand b of product %d changed before it was waited for", p.number));
    }
    // Elements of 16 bits, or two 8-bit values each, in byte order.
    const int n = p.shape.n, num_k = p.shape.element == kElementCodes ? 32 : 16;
    const auto to_float = [&](const std::vector<u16>& from, int row, int k) {
      if (p.shape.element == kElementCodes) {
        static const std::vector<float> kValues = [] {
          std::vector<float> values;
          for (u32 code = 0; code < 256; ++code) values.push_back(E4m3ToFloat(code));
          return values;
        }();
        return kValues[from[row * 16 + k / 2] >> k % 2 * 8 & 0xff];
      }
      const u16 x = from[row * 16 + k];
      return p.shape.element == kElementBf16 ? Bf16ToFloat(x) : F16ToFloat(x);
    };
    std::vector<float> b(num_k * n);  // [num_k, n]
    for (int j = 0; j < n; ++j) {
      for (int k = 0; k < num_k; ++k) b[k * n + j] = to_float(p.b, j, k);
    }
    Accumulators& acc = w.accumulators.at(p.d);
    for (int row = 0; row < 16; ++row) {
      float* d = &acc.d[row * n];
      if (!p.shape.accumulate) std::fill_n(d, n, 0.0f);
      for (int k = 0; k < num_k; ++k) {
        const float x = to_float(p.a, row, k);
        for (int j = 0; j < n; ++j) d[j] += x * b[k * n + j];
      }
    }
    if (--acc.num_products == 0) GiveBack(w, p.d, acc);
  }

  void GiveBack(WarpState& w, float* key, const Accumulators& acc) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < acc.n / 2; ++i) {
        float& x = acc.registers[lane][i];
        if (EmulationBits<u32>(x) != kInFlight) {
          Fail("accumulators were written before their product was waited for");
        }
        x = acc.d[Position(acc.n, lane, i)];
      }
    }
    w.given_back[key] = w.num_fences;
    w.accumulators.erase(key);
  }

  struct Drawer {
    std::map<u32, SharedBarrier> shared_barriers;
    std::vector<WarpState> warps;
    std::vector<std::vector<ProductShape>> issued;
  };
  std::map<int, Drawer> drawers_;
  std::map<u32, SharedBarrier> shared_barriers_;  // by address
  std::vector<WarpState> warps_;
  std::vector<std::vector<ProductShape>> issued_;  // by a warpgroup's first warp
};
inline Sm90 sm90;

// Runs `action` once for the warp, when all of its lanes have arrived.
template <typename Action>
void OncePerWarp(const char* where, Action action) {
  WarpBarrier(where);
  if (machine.current().thread.x % 32 == 0) action();
  WarpBarrier(where);
}

inline void Multiply(const ProductShape& shape, float* d, const u32* a) {
  struct Lane {
    float* d;
    const ProductShape* shape;
    u32 a[4];
  };
  Lane lane = {d, &shape, {}};
  if (a != nullptr) std::copy_n(a, 4, lane.a);
  static_assert(sizeof(lane) <= sizeof(Fiber::exchange), "room for it");
  std::memcpy(machine.current().exchange, &lane, sizeof(lane));
  OncePerWarp("wgmma", [&] {
    float* lanes_d[32];
    u32 lanes_a[32][4];
    for (int i = 0; i < 32; ++i) {
      std::memcpy(&lane, machine.lane(i).exchange, sizeof(lane));
      if (!(*lane.shape == shape)) Fail("lanes of a warp have different descriptors");
      lanes_d[i] = lane.d;
      std::copy_n(lane.a, 4, lanes_a[i]);
    }
    sm90.Issue(shape, lanes_d, lanes_a, a);
  });
}

}  // namespace emulation

// --- cuda/sm90/ptx.cuh ---

inline void InitBarrier(u32 barrier, int num_arrivals) {
  emulation::sm90.Init(barrier, num_arrivals);
}
inline void ArriveBarrier(u32 barrier, int count) { emulation::sm90.Arrive(barrier, count, 0); }
inline void ArriveBarrier(u32 barrier) { ArriveBarrier(barrier, 1); }
inline void ExpectBytes(u32 barrier, int num_bytes) {
  emulation::sm90.Arrive(barrier, 0, num_bytes);
}
inline void ArriveBarrierAfterCopies(u32 barrier) {
  emulation::Fiber& f = emulation::machine.current();
  std::vector<emulation::Copy> copies;
  for (const auto& group : f.groups) copies.insert(copies.end(), group.begin(), group.end());
  copies.insert(copies.end(), f.open_group.begin(), f.open_group.end());
  f.groups.clear();
  f.open_group.clear();
  emulation::machine.Later(true, [copies = std::move(copies), barrier] {
    for (const emulation::Copy& c : copies) c.Land();
    emulation::sm90.Arrive(barrier, 1, 0);
  });
}
template <class TensorMap>
void LoadTmaTile(u32 shared, const TensorMap& map, int column, int head, int row, int layer,
                 u32 barrier) {
  static_assert(sizeof(TensorMap) == 128, "of the driver");
  if (reinterpret_cast<uintptr_t>(&map) % 64 != 0) emulation::Fail("misaligned tensor map");
  emulation::TmaArray from;
  std::memcpy(&from, &map, sizeof(from));
  const int num_bytes = static_cast<int>(from.tile_rows) * 128;
  if (shared % 128 != 0 || shared + num_bytes > sizeof(smem)) emulation::Fail("misplaced TMA tile");
  std::memset(smem + shared, 0xff, num_bytes);  // until it is waited for
  std::memset(emulation::machine.AsyncSmem() + shared, 0xff, num_bytes);
  emulation::machine.Later(false, [=] {
    for (int e = 0; e < num_bytes / 2; ++e) {
      const u64 r = static_cast<u64>(row) + e / 64, c = static_cast<u64>(column) + e % 64;
      u16 x = 0;  // beyond the array
      if (r < from.num_rows && c < from.head_dim && static_cast<u64>(head) < from.num_heads &&
          static_cast<u64>(layer) < from.num_layers) {
        x = from.array[((layer * from.num_rows + r) * from.num_heads + head) * from.head_dim + c];
      }
      const u32 to = shared + 2 * e;
      for (unsigned char* memory : {smem, emulation::machine.AsyncSmem()}) {
        std::memcpy(memory + (to ^ (to >> 7 & 7) << 4), &x, sizeof(x));
      }
    }
    emulation::sm90.Arrive(barrier, 0, -num_bytes);
  });
}
inline std::vector<u16> ReadTmaTile(const emulation::TmaArray& of, u32 shared) {
  std::vector<u16> elements(of.tile_rows * of.tile_heads * 64);
  for (size_t e = 0; e < elements.size(); ++e) {
    const u32 from = shared + 2 * static_cast<u32>(e);
    std::memcpy(&elements[e], emulation::machine.AsyncSmem() + (from ^ (from >> 7 & 7) << 4), 2);
  }
  return elements;
}
template <class TensorMap>
void PrefetchTensorMap(const TensorMap&) {}

template <class TensorMap>
void StoreTmaTile(const TensorMap& map, int column, int head, int row, u32 shared) {
  if (reinterpret_cast<uintptr_t>(&map) % 64 != 0) emulation::Fail("misaligned tensor map");
  emulation::TmaStoreTile tile;
  std::memcpy(&tile.to, &map, sizeof(tile.to));
  tile.row = row, tile.head = head, tile.column = column, tile.shared = shared;
  if (shared % 1024 != 0) emulation::Fail("misplaced TMA tile");
  tile.elements = ReadTmaTile(tile.to, shared);
  emulation::sm90.warp().open_stores.push_back(tile);
}
inline std::vector<float> ReadBulk(u32 shared, size_t num_words) {
  std::vector<float> words(num_words);
  std::memcpy(words.data(), emulation::machine.AsyncSmem() + shared, 4 * num_words);
  return words;
}
inline void StartBulk(float* global, u32 shared, int num_bytes, bool adds) {
  if (num_bytes % 16 != 0 || shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulation::Fail("misplaced bulk copy");
  }
  emulation::sm90.warp().open_bulks.push_back(
      {global, adds, shared, ReadBulk(shared, num_bytes / 4), false});
}
inline void StoreBulk(float* global, u32 shared, int num_bytes) {
  StartBulk(global, shared, num_bytes, false);
}
inline void AddBulk(float* global, u32 shared, int num_bytes) {
  StartBulk(global, shared, num_bytes, true);
}
inline void CommitStores() {
  auto& w = emulation::sm90.warp();
  w.bulks.insert(w.bulks.end(), w.open_bulks.begin(), w.open_bulks.end());
  w.open_bulks.clear();
  w.stores.insert(w.stores.end(), w.open_stores.begin(), w.open_stores.end());
  w.open_stores.clear();
}
inline void WaitStores() {
  auto& w = emulation::sm90.warp();
  for (const emulation::TmaStoreTile& tile : w.stores) {
    if (ReadTmaTile(tile.to, tile.shared) != tile.elements) {
      emulation::Fail("a TMA tile was written again while TMA could read it");
    }
    const emulation::TmaArray& to = tile.to;
    for (size_t e = 0; e < tile.elements.size(); ++e) {
      const u64 column = tile.column + e % 64, head = tile.head + e / 64 % to.tile_heads;
      const u64 row = tile.row + e / 64 / to.tile_heads;
      if (column >= to.head_dim || head >= to.num_heads || row >= to.num_rows) continue;
      to.array[(row * to.num_heads + head) * to.head_dim + column] = tile.elements[e];
    }
  }
  w.stores.clear();
  for (const emulation::BulkOfResults& bulk : w.bulks) {
    for (size_t i = 0; i < bulk.words.size(); ++i) {
      bulk.to[i] = (bulk.adds ? bulk.to[i] : 0.0f) + bulk.words[i];
    }
  }
  w.bulks.clear();
}
// Waits until bulk copies have read shared memory; their data has not arrived yet.
inline void WaitStoresRead() {
  auto& w = emulation::sm90.warp();
  for (emulation::BulkOfResults& bulk : w.bulks) {
    if (bulk.is_read) continue;
    const std::vector<float> now = ReadBulk(bulk.shared, bulk.words.size());
    if (std::memcmp(now.data(), bulk.words.data(), 4 * now.size()) != 0) {
      emulation::Fail("what a bulk copy reads was written before it was waited for");
    }
    bulk.is_read = true;
  }
  if (w.bulks.empty()) WaitStores();
}
inline void FenceGlobalForBulk() {}
inline void Nanosleep() {}
inline void WaitBarrier(u32 barrier, u32 parity) { emulation::sm90.Wait(barrier, parity); }
inline bool TestBarrier(u32, u32) { return false; }    // never ready: the worst case
inline bool TryWaitBarrier(u32 barrier, u32 parity) {  // always waits
  WaitBarrier(barrier, parity);
  return true;
}
inline void FenceSharedForWgmma() { emulation::machine.Publish(); }

inline void StoreMatrix2Transposed(u32 shared, u32 r0, u32 r1) {
  if (threadIdx.x % 32 < 16 && shared % 16 != 0) emulation::Fail("misaligned row of a matrix");
  uint32_t* mine = emulation::machine.current().exchange;
  mine[0] = shared;
  mine[1] = r0;
  mine[2] = r1;
  emulation::OncePerWarp("stmatrix", [] {
    for (int m = 0; m < 2; ++m) {
      for (int row = 0; row < 8; ++row) {
        const u32 to = emulation::machine.lane(m * 8 + row).exchange[0];
        for (int e = 0; e < 8; ++e) {  // becomes element `row` of row e
          const u32 pair = emulation::machine.lane(e * 4 + row / 2).exchange[1 + m];
          const u16 x = static_cast<u16>(pair >> 16 * (row % 2));
          std::memcpy(smem + to + 2 * e, &x, sizeof(x));
        }
      }
    }
  });
}

inline void StoreMatrix4(u32 shared, const u32 (&r)[4]) {
  if (shared % 16 != 0) emulation::Fail("misaligned row of a matrix");
  uint32_t* mine = emulation::machine.current().exchange;
  mine[0] = shared;
  for (int m = 0; m < 4; ++m) mine[1 + m] = r[m];
  emulation::OncePerWarp("stmatrix", [] {
    for (int m = 0; m < 4; ++m) {
      for (int row = 0; row < 8; ++row) {
        const u32 to = emulation::machine.lane(m * 8 + row).exchange[0];
        for (int i = 0; i < 4; ++i) {
          std::memcpy(smem + to + 4 * i, &emulation::machine.lane(row * 4 + i).exchange[1 + m], 4);
        }
      }
    }
  });
}

template <int kRegisters>
void SetRegisterLimit() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "of setmaxnreg");
  emulation::OncePerWarp("setmaxnreg", [] { emulation::sm90.warp().num_registers = kRegisters; });
}
template <int kRegisters>
void LowerRegisterLimit() {
  SetRegisterLimit<kRegisters>();
}
template <int kRegisters>
void RaiseRegisterLimit() {
  SetRegisterLimit<kRegisters>();
}

// As in cuda/sm90/ptx.cuh.
inline u64 MatrixDescriptor(u32 shared, int leading, int stride) {
  constexpr u64 kSwizzle128 = u64{1} << 62;
  return kSwizzle128 | static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(leading >> 4) << 16 |
         (shared & 0x3ffff) >> 4;
}

inline void WgmmaFence() {
  emulation::OncePerWarp("wgmma.fence", [] { ++emulation::sm90.warp().num_fences; });
}
inline void WgmmaCommit() {
  emulation::OncePerWarp("wgmma.commit_group", [] { emulation::sm90.Commit(); });
}
template <int kPending>
void WgmmaWait() {
  emulation::WarpBarrier("wgmma.wait_group");
  emulation::sm90.WaitForIssue(emulation::sm90.LastAwaited(kPending));
  emulation::OncePerWarp("wgmma.wait_group", [] { emulation::sm90.Finish(kPending); });
}

inline u64 MoveDescriptor(u64 descriptor, int num_bytes) { return descriptor + (num_bytes >> 4); }
inline void KeepBefore(float) {}
template <class T, int kTiles>
void PinRegisters(T (&)[kTiles][4]) {}

template <int kN, int kDtype>
struct Wgmma {
  static void SharedA(float (&d)[kN / 8][4], u64 a, u64 b, bool accumulate) {
    emulation::Multiply({kN, kDtype, false, a, b, false, false, accumulate}, &d[0][0], nullptr);
  }
  static void SharedATransposedB(float (&d)[kN / 8][4], u64 a, u64 b, bool accumulate) {
    emulation::Multiply({kN, kDtype, false, a, b, false, true, accumulate}, &d[0][0], nullptr);
  }
  static void TransposedSharedA(float (&d)[kN / 8][4], u64 a, u64 b, bool accumulate) {
    emulation::Multiply({kN, kDtype, false, a, b, true, false, accumulate}, &d[0][0], nullptr);
  }
  static void TransposedSharedATransposedB(float (&d)[kN / 8][4], u64 a, u64 b, bool accumulate) {
    emulation::Multiply({kN, kDtype, false, a, b, true, true, accumulate}, &d[0][0], nullptr);
  }
  static void RegistersA(float (&d)[kN / 8][4], const u32 (&a)[4], u64 b, bool accumulate) {
    emulation::Multiply({kN, kDtype, true, 0, b, false, false, accumulate}, &d[0][0], a);
  }
  static void RegistersATransposedB(float (&d)[kN / 8][4], const u32 (&a)[4], u64 b,
                                    bool accumulate) {
    emulation::Multiply({kN, kDtype, true, 0, b, false, true, accumulate}, &d[0][0], a);
  }
};

// Sums are f32. A GPU truncates addends.
template <int kN>
struct WgmmaE4m3 {
  static void SharedA(float (&d)[kN / 8][4], u64 a, u64 b, bool accumulate) {
    emulation::Multiply({kN, emulation::kElementCodes, false, a, b, false, false, accumulate},
                        &d[0][0], nullptr);
  }
};

}  // namespace jax_attn
