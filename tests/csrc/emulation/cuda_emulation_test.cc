// The emulation of sm_90a, which kernel tests trust: matmuls against three loops in every layout, a
// pipeline of producers and consumers, and the mistakes that it must find.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include <sys/wait.h>
#include <unistd.h>

#include "emulation/cuda_emulation_sm90.h"

namespace jax_attn {
namespace {

using emulation::machine;

int g_failures = 0;

void Expect(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED %s\n", what.c_str());
  ++g_failures;
}

// --- matmuls ---

enum Swizzle { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };  // as in descriptors

// A [mn, k] matrix in shared memory and its descriptors.
struct Tile {
  u32 start;
  int mn, k;
  bool mn_major;
  Swizzle swizzle;

  int RowBytes() const { return swizzle == kNone ? 16 : 256 >> swizzle; }

  // Address of an element as copies write it: rows of RowBytes() in blocks of 8. The chunks of a
  // row are XORed with the row number, or with its low bits if rows are shorter.
  u32 Address(int i, int j) const {
    const int row = mn_major ? j : i, column = mn_major ? i : j;
    const int rows = mn_major ? k : mn;
    const int row_chunks = RowBytes() / 16;
    const int block = column / 8 / row_chunks;  // of columns, one below the other
    int chunk = column / 8 % row_chunks;
    if (swizzle != kNone) chunk ^= row * RowBytes() / 128 % row_chunks;
    return start + block * rows * RowBytes() + row * RowBytes() + chunk * 16 + column % 8 * 2;
  }

  // Descriptor of the 16 columns from k0 on.
  u64 Descriptor(int k0) const {
    const int rows = mn_major ? k : mn;
    const u64 block = rows * RowBytes(), eight_rows = 8 * RowBytes();
    u64 leading = block, stride = eight_rows;
    u32 at = start;
    if (mn_major) {
      at += k0 * RowBytes();
      if (swizzle == kNone) std::swap(leading, stride);
    } else {
      at += swizzle == kNone ? k0 / 8 * block : k0 / (RowBytes() / 2) * block + k0 * 2 % RowBytes();
    }
    return static_cast<u64>(swizzle) << 62 | stride >> 4 << 32 | leading >> 4 << 16 | at >> 4;
  }
};

float SmallInteger(int i, int j) { return static_cast<float>((i * 7 + j * 13 + i * j) % 9 - 4); }

void Fill(const Tile& tile, int thread, int num_threads, int salt) {
  for (int e = thread; e < tile.mn * tile.k; e += num_threads) {
    const int i = e / tile.k, j = e % tile.k;
    const u16 x = static_cast<u16>(FloatToBf16(SmallInteger(i + salt, j)));
    std::memcpy(smem + tile.Address(i, j), &x, sizeof(x));
  }
}

// d of [64, kN] after num_k columns, 0 at first.
float Expected(int row, int column, int num_k, int salt_a, int salt_b) {
  float sum = 0;
  for (int k = 0; k < num_k; ++k)
    sum += SmallInteger(row + salt_a, k) * SmallInteger(column + salt_b, k);
  return sum;
}

// Position of this thread's d[i].
int Row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
int Column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <int kN>
void TestProduct(bool a_in_registers, bool a_mn_major, Swizzle swizzle_a, Swizzle swizzle_b,
                 bool b_mn_major) {
  constexpr int kDepth = 64;
  const Tile a = {0, 64, kDepth, a_mn_major, swizzle_a};
  const Tile b = {16 * 1024, kN, kDepth, b_mn_major, swizzle_b};
  int num_wrong = 0;
  machine.Launch(1, 128, kN, [&] {
    Fill(a, threadIdx.x, 128, 0);
    Fill(b, threadIdx.x, 128, 1);
    FenceSharedForWgmma();
    __syncthreads();
    float d[kN / 2];
    for (float& x : d) x = 5.0f;
    u32 fragments[kDepth / 16][4];
    for (int k = 0; k < kDepth; k += 16) {
      for (int i = 0; i < 4; ++i) {
        const int row = Row(2 * i), column = k + Column(0) + i / 2 * 8;
        fragments[k / 16][i] = PackBf16(SmallInteger(row, column), SmallInteger(row, column + 1));
      }
    }
    WgmmaFence();
    for (int k = 0; k < kDepth; k += 16) {
      emulation::ProductShape shape = {};
      shape.n = kN;
      shape.element = kElementBf16;
      shape.a_in_registers = a_in_registers;
      if (!a_in_registers) shape.a = a.Descriptor(k);
      shape.b = b.Descriptor(k);
      shape.a_mn_major = a_mn_major;
      shape.b_mn_major = b_mn_major;
      shape.accumulate = k > 0;
      emulation::Multiply(shape, d, fragments[k / 16]);
    }
    WgmmaCommit();
    for (float x : d) num_wrong += !std::isnan(x);
    WgmmaWait<0>();
    for (int i = 0; i < kN / 2; ++i) {
      num_wrong += d[i] != Expected(Row(i), Column(i), kDepth, 0, 1);
    }
  });
  Expect(num_wrong == 0,
         emulation::Text("n %d, a %s swizzle %d, b %s swizzle %d: %d wrong", kN,
                         a_in_registers ? "in registers,"
                         : a_mn_major   ? "transposed,"
                                        : "in shared memory,",
                         swizzle_a, b_mn_major ? "transposed," : "", swizzle_b, num_wrong));
}

// The functions that kernels call, with their descriptors.
void TestWrappers() {
  const Tile a = {0, 64, 64, false, k128}, b = {8192, 128, 64, false, k128};
  const Tile v = {24576, 128, 64, true, k128};
  Expect(MatrixDescriptor(8192, v.k * 128, 1024) == (Tile{8192, 128, 64, true, k128}).Descriptor(0),
         "MatrixDescriptor");
  int num_wrong = 0;
  machine.Launch(1, 128, 3, [&] {
    Fill(a, threadIdx.x, 128, 0);
    Fill(b, threadIdx.x, 128, 1);
    Fill(v, threadIdx.x, 128, 2);
    __syncthreads();
    FenceSharedForWgmma();  // by the readers, after they met the writers
    float d[16][4], e[16][4];
    u32 fragment[4];
    for (int i = 0; i < 4; ++i) {
      const int row = Row(2 * i), column = Column(0) + i / 2 * 8;
      fragment[i] = PackBf16(SmallInteger(row, column), SmallInteger(row, column + 1));
    }
    WgmmaFence();
    Wgmma<128, kElementBf16>::SharedA(d, MatrixDescriptor(a.start, 0, 1024),
                                      MatrixDescriptor(b.start, 0, 1024), false);
    WgmmaCommit();
    Wgmma<128, kElementBf16>::RegistersATransposedB(
        e, fragment, MatrixDescriptor(v.start, v.k * 128, 1024), false);
    WgmmaCommit();
    WgmmaWait<1>();
    for (int i = 0; i < 64; ++i) {
      num_wrong += d[i / 4][i % 4] != Expected(Row(i), Column(i), 16, 0, 1);
      num_wrong += !std::isnan(e[i / 4][i % 4]);
    }
    WgmmaWait<0>();
    for (int i = 0; i < 64; ++i) {
      num_wrong += e[i / 4][i % 4] != Expected(Row(i), Column(i), 16, 0, 2);
    }
  });
  Expect(num_wrong == 0, "wrappers");
}

// The accumulators of one product become operand b of another one by shared memory; its operand a
// is transposed. A barrier tells if any thread differs.
void TestTransposedWrappers() {
  const Tile a = {0, 64, 64, false, k128}, b = {8192, 32, 64, false, k128};
  const Tile v = {16384, 64, 64, true, k128}, p = {24576, 32, 64, false, k128};
  int num_wrong = 0;
  machine.Launch(1, 128, 4, [&] {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Fill(a, threadIdx.x, 128, 0);
    Fill(b, threadIdx.x, 128, 1);
    Fill(v, threadIdx.x, 128, 2);
    FenceSharedForWgmma();
    __syncthreads();
    float d[4][4], e[4][4];
    WgmmaFence();
    Wgmma<32, kElementBf16>::SharedA(d, MatrixDescriptor(a.start, 0, 1024),
                                     MatrixDescriptor(b.start, 0, 1024), false);
    WgmmaCommit();
    WgmmaWait<0>();
    for (int j = 0; j < 4; ++j) {
      u32 x[2];
      for (int h = 0; h < 2; ++h) x[h] = PackBf16(d[j][2 * h] / 8.0f, d[j][2 * h + 1] / 8.0f);
      StoreMatrix2Transposed(p.Address(8 * j + lane % 8, 16 * warp + lane / 8 % 2 * 8), x[0], x[1]);
    }
    FenceSharedForWgmma();
    num_wrong += SyncNamedOr(1, 128, false);
    num_wrong += !SyncNamedOr(1, 128, threadIdx.x == 77);
    num_wrong += SyncNamedOr(1, 128, false);
    WgmmaFence();
    for (int k = 0; k < 64; k += 16) {
      Wgmma<32, kElementBf16>::TransposedSharedA(e, v.Descriptor(k), p.Descriptor(k), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    for (int i = 0; i < 16; ++i) {
      float sum = 0.0f;
      for (int k = 0; k < 64; ++k) {
        const float x = Expected(k, Column(i), 16, 0, 1) / 8.0f;
        sum += SmallInteger(Row(i) + 2, k) * Bf16ToFloat(FloatToBf16(x));
      }
      num_wrong += std::abs(e[i / 4][i % 4] - sum) > 1e-3f;
    }
  });
  Expect(num_wrong == 0, emulation::Text("transposed wrappers: %d wrong", num_wrong));
}

// --- a pipeline ---

struct PipelineMistakes {
  bool no_fence = false;            // between copies and products
  bool no_full_wait = false;        // consumers do not wait for copies
  bool early_release = false;       // a slot is free before its product is waited for
  bool one_consumer_frees = false;  // the other warpgroup may still read
};

// A producer warpgroup copies tiles into a ring of two slots, by TMA or with its threads. Two
// consumer warpgroups multiply their own a with them, and named barriers pass a ping-pong token.
int WrongResultsOfPipeline(unsigned seed, bool uses_tma, const PipelineMistakes& mistakes) {
  constexpr int kTiles = 7, kSlots = 2, kSlotBytes = 64 * 128;
  constexpr u32 kFull = 0, kEmpty = 64;
  constexpr u32 kA = 1024, kRing = kA + 2 * 8192;
  alignas(16) static u16 global[kTiles][64][64];
  for (int t = 0; t < kTiles; ++t) {
    for (int e = 0; e < 64 * 64; ++e) {
      global[t][e / 64][e % 64] = static_cast<u16>(FloatToBf16(SmallInteger(e / 64 + t, e % 64)));
    }
  }
  struct alignas(64) {
    emulation::TmaArray array;
    char rest[128 - sizeof(emulation::TmaArray)];
  } const map = {{&global[0][0][0], kTiles, 64, 1, 64, 32}, {}};
  int num_wrong = 0;
  machine.Launch(2, 384, seed, [&] {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
      for (int s = 0; s < kSlots; ++s) {
        InitBarrier(kFull + 8 * s, 128);
        InitBarrier(kEmpty + 8 * s, mistakes.one_consumer_frees ? 128 : 256);
      }
    }
    __syncthreads();
    if (group == 0) {
      LowerRegisterLimit<24>();
      for (int t = 0; t < kTiles; ++t) {
        const int slot = t % kSlots;
        WaitBarrier(kEmpty + 8 * slot, (t / kSlots & 1) ^ 1);
        const Tile to = {kRing + slot * kSlotBytes, 64, 64, false, k128};
        if (uses_tma) {
          if (thread != 0) continue;
          ExpectBytes(kFull + 8 * slot, kSlotBytes);
          ArriveBarrier(kFull + 8 * slot, 128);
          LoadTmaTile(to.start, map, 0, 0, 0, t, kFull + 8 * slot);
          LoadTmaTile(to.start + kSlotBytes / 2, map, 0, 0, 32, t, kFull + 8 * slot);
          continue;
        }
        for (int c = thread; c < 64 * 8; c += 128) {
          CopyAsync16(to.Address(c / 8, c % 8 * 8), &global[t][c / 8][c % 8 * 8], true);
        }
        ArriveBarrierAfterCopies(kFull + 8 * slot);
      }
      return;
    }
    RaiseRegisterLimit<240>();
    const Tile a = {kA + 8192 * (group - 1), 64, 64, false, k128};
    Fill(a, thread, 128, group);
    FenceSharedForWgmma();
    SyncNamed(1 + group, 128);
    if (group == 1) ArriveNamed(4, 256);
    float d[8][4];
    for (int t = 0; t < kTiles; ++t) {
      const int slot = t % kSlots;
      if (!mistakes.no_full_wait) WaitBarrier(kFull + 8 * slot, t / kSlots & 1);
      if (!mistakes.no_fence) FenceSharedForWgmma();
      SyncNamed(3 + group, 256);  // group 1: barrier 4, group 2: barrier 5
      const Tile b = {kRing + slot * kSlotBytes, 64, 64, false, k128};
      WgmmaFence();
      for (int k = 0; k < 64; k += 16) {
        Wgmma<64, kElementBf16>::SharedA(d, a.Descriptor(k), b.Descriptor(k), t + k > 0);
      }
      WgmmaCommit();
      ArriveNamed(group == 1 ? 5 : 4, 256);
      if (mistakes.early_release) ArriveBarrier(kEmpty + 8 * slot);
      WgmmaWait<0>();
      const bool frees = group == 1 || !mistakes.one_consumer_frees;
      if (!mistakes.early_release && frees) ArriveBarrier(kEmpty + 8 * slot);
    }
    // Takes the last token, which is left over.
    if (group == 1) SyncNamed(4, 256);
    for (int i = 0; i < 32; ++i) {
      float sum = 0;
      for (int t = 0; t < kTiles; ++t) sum += Expected(Row(i), Column(i), 64, group, t);
      num_wrong += !(d[i / 4][i % 4] == sum);
    }
  });
  return num_wrong;
}

// --- mistakes ---

// What `kernel` prints before it is aborted, or "" if it ends.
template <typename Function>
std::string Death(Function function) {
  std::fflush(stdout);
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    function();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[256];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? text : "";
}

template <typename Function>
void ExpectDeath(const char* name, const std::string& message, Function function) {
  const std::string text = Death(function);
  Expect(text.find(message) != std::string::npos,
         std::string(name) + ": expected '" + message + "', got '" + text + "'");
}

// In most runs the mistake shows in wrong results or, earlier, in a failure. The choice of the slow
// warpgroup may hide it.
void ExpectTrouble(const char* name, const PipelineMistakes& mistakes) {
  int num_runs = 0, num_found = 0;
  for (unsigned seed = 0; seed < 12; ++seed) {
    const bool uses_tma = seed % 2 == 1;
    if (uses_tma && mistakes.no_fence) continue;  // TMA needs none
    const std::string text = Death([&] {
      if (WrongResultsOfPipeline(seed, uses_tma, mistakes) > 0) emulation::Fail("wrong results");
    });
    ++num_runs;
    num_found += !text.empty();
  }
  Expect(4 * num_found >= 3 * num_runs,
         emulation::Text("%s: found in %d of %d runs", name, num_found, num_runs));
}

void TestMistakes() {
  ExpectTrouble("no fence", {.no_fence = true});
  ExpectTrouble("no full wait", {.no_full_wait = true});
  ExpectTrouble("early release", {.early_release = true});
  ExpectTrouble("one consumer frees", {.one_consumer_frees = true});

  const Tile a = {0, 64, 16, false, k32}, b = {4096, 32, 16, false, k32};
  const auto product = [&](float* d) {
    emulation::Multiply({32, true, false, a.Descriptor(0), b.Descriptor(0), false, false}, d,
                        nullptr);
  };
  ExpectDeath("no wgmma.fence", "no wgmma.fence between registers and a product that adds", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      product(d);
    });
  });
  ExpectDeath("a fence too few", "no wgmma.fence between registers and a product that adds", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      WgmmaFence();
      for (int i = 0; i < 2; ++i) {
        product(d);
        WgmmaCommit();
        WgmmaWait<0>();
      }
    });
  });
  ExpectDeath("fragments", "operand a", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      u32 fragment[4] = {};
      WgmmaFence();
      for (int i = 0; i < 2; ++i) {
        fragment[0] = i;
        emulation::Multiply({32, true, true, 0, b.Descriptor(0), false, false}, d, fragment);
      }
    });
  });
  ExpectDeath("accumulators in flight", "written before their product was waited for", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      WgmmaFence();
      product(d);
      WgmmaCommit();
      d[3] = 0;
      WgmmaWait<0>();
    });
  });
  ExpectDeath("three warps", "waits for product 0 of all warps of the warpgroup", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      if (threadIdx.x < 96) {
        WgmmaFence();
        product(d);
        WgmmaCommit();
        WgmmaWait<0>();
      }
    });
  });
  ExpectDeath("no wait", "ends before its products", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      WgmmaFence();
      product(d);
      WgmmaCommit();
    });
  });
  ExpectDeath("warps disagree", "differs between warps of a warpgroup", [&] {
    machine.Launch(1, 128, 0, [&] {
      float d[16] = {};
      WgmmaFence();
      emulation::Multiply(
          {32, true, false, a.Descriptor(0), b.Descriptor(0), false, threadIdx.x < 64}, d, nullptr);
      WgmmaCommit();
      WgmmaWait<0>();
    });
  });
  ExpectDeath("lost arrival", "parity 0: phase 0 lacks 1 of 32", [&] {
    machine.Launch(1, 32, 0, [&] {
      if (threadIdx.x == 0) InitBarrier(8, 32);
      __syncwarp();
      if (threadIdx.x != 7) ArriveBarrier(8);
      WaitBarrier(8, 0);
    });
  });
  ExpectDeath("no barrier", "there is no barrier at 0x8",
              [&] { machine.Launch(1, 32, 0, [&] { ArriveBarrier(8); }); });
  ExpectDeath("named barrier", "waits for named barrier 2: 32 of 64 arrived", [&] {
    machine.Launch(1, 64, 0, [&] {
      if (threadIdx.x < 32) SyncNamed(2, 64);
    });
  });
  ExpectDeath("lost copy", "ends before its copies arrive", [&] {
    alignas(16) static u16 global[8];
    machine.Launch(1, 32, 0, [&] {
      if (threadIdx.x == 0) CopyAsync16(0, global, true);
    });
  });
}

// A fence publishes writes before it, whether all lanes call it or one. It does not publish later
// writes of its thread, or of the last lane if all lanes call it.
void TestFences() {
  const auto write = [](int word) {
    const float x = static_cast<float>(word);
    std::memcpy(smem + 4 * word, &x, 4);
  };
  int num_wrong = 0;
  const auto expect_words = [&](const std::vector<float>& words, int begin, int end) {
    for (int i = begin; i < end; ++i) num_wrong += words[i] != static_cast<float>(i);
  };
  for (int seed = 0; seed < 64; ++seed) {
    machine.Launch(1, 32, seed, [&] {
      const int lane = threadIdx.x;
      write(lane);
      FenceSharedForWgmma();
      if (seed % 2 == 1) expect_words(ReadBulk(0, 32), lane, lane + 1);
      write(32 + lane);
      __syncwarp();
      if (lane > 0) return;
      const std::vector<float> words = ReadBulk(0, 64);
      expect_words(words, 0, 32);
      num_wrong += std::none_of(words.begin() + 32, words.end(), [](float x) { return x != x; });
    });
    machine.Launch(1, 32, seed, [&] {
      const int lane = threadIdx.x;
      if (lane == seed % 32) {
        write(0);
        FenceSharedForWgmma();
        write(1);
      }
      __syncwarp();
      if (lane > 0) return;
      const std::vector<float> words = ReadBulk(0, 2);
      expect_words(words, 0, 1);
      num_wrong += !std::isnan(words[1]);
    });
    machine.Launch(1, 32, seed, [&] {
      const int lane = threadIdx.x;
      write(lane);
      if (lane % 2 == 0) FenceSharedForWgmma();
      __syncwarp();
      if (lane > 0) return;
      const std::vector<float> words = ReadBulk(0, 32);
      for (int i = 0; i < 32; i += 2) expect_words(words, i, i + 1);
    });
  }
  Expect(num_wrong == 0, emulation::Text("fences: %d wrong", num_wrong));
}

template <int kN>
void TestProducts() {
  for (Swizzle b : {kNone, k128, k64, k32}) {
    for (bool b_mn_major : {false, true}) {
      if (b_mn_major && b != kNone && kN % (128 >> b) != 0) continue;  // rows of b are full
      TestProduct<kN>(false, false, b, b, b_mn_major);
      TestProduct<kN>(false, true, b, b, b_mn_major);
      TestProduct<kN>(true, false, k128, b, b_mn_major);
    }
  }
}

void RunAll() {
  TestProducts<32>();
  TestProducts<64>();
  TestProducts<192>();
  TestWrappers();
  TestTransposedWrappers();
  TestFences();
  for (unsigned seed = 0; seed < 6; ++seed) {
    const bool uses_tma = seed % 2 == 1;
    const int num_wrong = WrongResultsOfPipeline(seed, uses_tma, {.no_fence = uses_tma});
    Expect(num_wrong == 0, emulation::Text("pipeline: %d wrong", num_wrong));
  }
  TestMistakes();
}

}  // namespace
}  // namespace jax_attn

int main() {
  jax_attn::RunAll();
  if (jax_attn::g_failures > 0) std::printf("%d failures\n", jax_attn::g_failures);
  return jax_attn::g_failures > 0;
}
