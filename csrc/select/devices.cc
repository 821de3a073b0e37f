#include "select/devices.h"

#include "select/tuning.h"

namespace jax_attn {
namespace {

// --- what fits, by shared memory ---

constexpr const char* kPrefillWhy =
    "128 rows double the reuse of each K and V fragment, where o and logits fit the registers and "
    "two CTAs the memory";
constexpr const char* kStepWhy =
    "32 x 64 logits a warp take 64 registers a thread; half of that where o needs them or memory "
    "is short";
constexpr const char* kRingWhy =
    "as many slots as fit beside q and the exchange of states: 4 of head_dim 128 keep 96 KB in "
    "flight, 3 us of an H200 multiprocessor's 34 bytes/ns, two to three times the latency of "
    "memory under load";
constexpr const char* kCtasWhy =
    "one CTA computes while the other waits, unless the rows of a step are too long for half of "
    "the memory";
constexpr const char* kF32Why =
    "keys and values are twice as wide: steps shrink before memory ends";
constexpr const char* kMlaRowsWhy =
    "rows of q are 1152 bytes: 64 take 73 KB beside the steps, and reuse each latent row four "
    "times as often as 16";
constexpr const char* kMlaStepWhy =
    "short steps, so that several are on their way: 3 of 37 KB are more than the 74 KB that an "
    "H200 multiprocessor needs (34 bytes/ns for 2 us)";

constexpr const char* kWideRowsWhy =
    "reasoned: 64 rows of q with 512 columns take 66 KB beside the steps, and reuse each key and "
    "value four times as often as 16; 32 where that leaves no room for three slots";
constexpr const char* kWideStepWhy =
    "reasoned: keys and values of 32 tokens take 33 KB each, so 100 KB are on their way beside the "
    "slot that is read; 16 where less fits";

constexpr Tiles k228KB = {
    "228 KB",
    227 << 10,
    {{{192, 128}, {256, 64}}, kPrefillWhy},
    {{{192, 64}, {256, 32}}, kStepWhy},
    {{{64, 6}, {96, 5}, {128, 4}, {192, 3}, {256, 2}}, kRingWhy},
    {{{256, 2}}, kCtasWhy},
    {{{256, 32}, {512, 16}, {1024, 8}}, kF32Why},
    {{{256, 2}, {512, 1}}, kF32Why},
    {64, kMlaRowsWhy},
    {32, kMlaStepWhy},
    {64, kWideRowsWhy},
    {32, kWideStepWhy},
};

constexpr Tiles k164KB = {
    "164 KB",
    163 << 10,
    {{{128, 128}, {256, 64}}, kPrefillWhy},
    {{{192, 64}, {256, 32}}, kStepWhy},
    {{{64, 5}, {128, 3}, {192, 2}, {256, 4}}, kRingWhy},
    {{{192, 2}, {256, 1}}, kCtasWhy},
    {{{256, 32}, {512, 16}, {1024, 8}}, kF32Why},
    {{{512, 1}}, kF32Why},
    {32, kMlaRowsWhy},
    {32, kMlaStepWhy},
    {64, kWideRowsWhy},
    {16, kWideStepWhy},
};

constexpr Tiles k100KB = {
    "100 KB",
    99 << 10,
    {{{64, 128}, {256, 64}}, kPrefillWhy},
    {{{64, 64}, {256, 32}}, kStepWhy},
    {{{64, 3}, {128, 2}, {192, 3}, {256, 2}}, kRingWhy},
    {{{128, 2}, {256, 1}}, kCtasWhy},
    {{{256, 32}, {400, 16}, {512, 8}}, kF32Why},
    {{{512, 1}}, kF32Why},
    {32, kMlaRowsWhy},
    {16, kMlaStepWhy},
    {32, kWideRowsWhy},
    {16, kWideStepWhy},
};

// --- Hopper's tiles ---

// A thread holds S and P of a step in registers for 3/4 of its tokens, and o for half of
// head_dim_vo. Rows in shared memory are padded to whole blocks of 64 columns (128 bytes). A kernel
// whose shared memory does not fit does not compile (HopperBody), and build_tools/check_kernels.py
// reports spilled registers.
constexpr HopperTile kHopperTiles[] = {
    {HopperOperands::k16Bit, 64, 1, 3, 192,
     "three consumers: S, P and o of 64 columns leave 32 of 160 registers a thread; two slots of K "
     "and V of 128 tokens fit beside q up to head_dim_qk 192"},
    {HopperOperands::k16Bit, 128, 1, 2, 192,
     "two consumers: S and P of 128 tokens take 96 registers a thread and o 64, of 232; two slots "
     "of K and V of 128 tokens fit beside q up to head_dim_qk 192"},
    {HopperOperands::k16Bit, 256, 1, 2, 0,
     "o takes up to 128 of 232 registers a thread, so S and P have those of 64 tokens"},
    {HopperOperands::kDequantized, 128, 2, 2, 128,
     "a second producer converts beside the first, so consumers have 200 registers a thread; two "
     "slots of K and V of 128 tokens and one of quantized rows fit beside q up to head_dim_qk 128, "
     "and more quantized slots have what is left: these are on their way from memory"},
    {HopperOperands::kDequantized, 192, 2, 2, 0,
     "o takes 96 of 200 registers a thread, so S and P have those of 64 tokens"},
    {HopperOperands::kDequantized, 256, 1, 2, 0,
     "o takes 128 registers a thread, which 512 threads do not have: one producer converts both"},
    {HopperOperands::kFp8, 128, 1, 2, 256,
     "S and P of 128 tokens take 96 of 232 registers a thread, o 64, and the product of a step as "
     "many; e4m3 slots of 128 tokens fit at every head dim"},
    {HopperOperands::kFp8, 256, 1, 2, 0,
     "o and the product of a step take up to 96 registers a thread each, so S and P have those of "
     "64 tokens"},
};

// --- what it costs ---

// MLA numbers are reasoned, not measured one by one. A CTA has a multiprocessor for itself: 34
// bytes/ns, a token of 1152 bytes in 34 ns. 64 rows multiply for 50 ns a token (139 KFLOP at 2.8
// TFLOP/s a multiprocessor, which is what mma.sync reaches with operands from shared memory), or on
// Hopper for 29 ns (4.8 TFLOP/s).
constexpr Number kMlaChunk = {128, "reasoned: below it a state costs as much as the keys"};
constexpr Number kMlaItem = {96, "reasoned: 3 us to fill and drain, at 34 ns a token"};
constexpr Steps kMlaKv = {
    {{32, 16}, {64, 24}},
    "reasoned: up to 32 rows wait for memory, 34 ns a token; 64 multiply for 50 ns"};

constexpr Number kTallState = {
    1024,
    "a state of 128 rows is 64 KB and more, and one CTA adds up a tile's; of 128, 512 and 1024, "
    "best on 13 drawn batches of prompts: 0.88 of the time with 128, 512 has 0.89"};

constexpr Costs kH200 = {
    "an H200",
    {32 << 20,
     "of 50 MB of second cache; 4 x 4096 tokens, 32 heads of 64, of which the last request's tiles "
     "go for all heads in turn, took 598 us and 585 so"},
    // portable: two CTAs a multiprocessor, 17 bytes/ns each.
    {
        {64, "one step; 8 requests of 1024 took 19.0 us, with chunks of 128 and more 23.0"},
        {96,
         "3 us of 17 bytes/ns; of 32 and 96, best or within noise on decodes of equal, uniform and "
         "zipf lengths"},
        {64,
         "2 us; of 0, 48, 64 and 128, likewise; without it 16 requests of 8192 took 176 us, with "
         "it 140"},
        {{{16, 16}, {64, 20}, {256, 32}},
         "decode moves 8 KB in 0.48 us; 128 rows multiply for 0.92 us at 300 TFLOP/s; 64 reuse "
         "less, so more than half of that"},
    },
    // hopper: a CTA has the multiprocessor for itself and streams twice as fast.
    {
        {64, "one step of decodes, as in the portable loop"},
        {192, "3 us of 34 bytes/ns"},
        {128, "2 us of 34 bytes/ns"},
        {{{32, 16}, {128, 16}},
         "decode moves 8 KB in 0.24 us, the share of a CTA when all of them do; 128 rows multiply "
         "for 0.21 us at 650 TFLOP/s"},
        kTallState,
    },
    // hopper_ragged: items of prompts begin and end slowly, since all consumers do it at once.
    {
        {64, "as with pages"},
        {320,
         "an item of prompts takes 6,700 clocks beside its steps of 2,300 (H200), as long as 372 "
         "tokens. Those clocks predict the fullest queue of 102 drawn batches: with 320 it is 0.75 "
         "to 1.02 of that with 192, with 372 up to 1.09, where splits are given up (predicted, "
         "not measured)"},
        {128, "as with pages"},
        {{{32, 16}, {128, 16}}, "as with pages"},
        kTallState,
    },
    // hopper_short: a tile of 64 rows alone, and other CTAs of the multiprocessor beside it.
    {
        {64, "one step"},
        {128, "reasoned: two steps"},
        {96, "reasoned: a state has half as many rows"},
        {{{64, 16}}, "one tile M"},
    },
    // portable_e4m3: half the bytes, so everything but memory counts for twice as many tokens.
    {
        {128, "reasoned: as many bytes as in 64 tokens of 16-bit keys"},
        {192, "reasoned: 3 us of 17 bytes/ns"},
        {128, "reasoned: 2 us of 17 bytes/ns"},
        {{{16, 16}, {64, 70}, {256, 95}},
         "reasoned: decode moves 4 KB in 0.24 us and converts them meanwhile (3.5 instructions an "
         "element, 0.13 us); in tall tiles every warp converts all of them, 0.5 us beside the "
         "products of 16-bit ones"},
    },
    // hopper_e4m3: the same.
    {
        {128, "reasoned: one step"},
        {384, "reasoned: 3 us of 34 bytes/ns"},
        {256, "reasoned: 2 us of 34 bytes/ns"},
        {{{32, 16}, {128, 29}},
         "reasoned: decode moves 4 KB in 0.12 us, the share of a CTA when all of them do; 128 rows "
         "multiply for 0.22 us"},
    },
    {kMlaChunk, kMlaItem, {96, "reasoned: a state is 2 KB a row, written and read: 2 us"}, kMlaKv},
    {kMlaChunk, kMlaItem, {192, "reasoned: a state is 2 KB a row, written and read: 4 us"}, kMlaKv},
    {
        kMlaChunk,
        {64, "reasoned: 3 us to fill and drain, at 50 ns a token"},
        {192, "reasoned: a state is 2 KB a row, written and read: 8 us"},
        {{{64, 16}}, "one tile M"},
    },
    {
        kMlaChunk,
        kMlaItem,
        {280, "reasoned: a state is 2 KB a row, written and read: 8 us, at 29 ns a token"},
        {{{64, 16}}, "one tile M"},
    },
};

// --- devices ---

constexpr const char* kNoTcgen05 = "one on tcgen05 does not exist yet";
constexpr const char* kUnknown = "the architecture is not in csrc/select/devices.cc";

// The first row that holds an architecture applies. Shared memory: CUDA programming guide, table of
// compute capabilities. An unknown device gets tiles that fit the parts around it.
constexpr CudaDevice kCudaDevices[] = {
    {"A100", 80, 80, 108, kPortable, &k164KB, &kH200, false, nullptr},
    {"A10, RTX 30", 86, 86, 84, kPortable, &k100KB, &kH200, false, nullptr},
    {"Orin", 87, 87, 16, kPortable, &k164KB, &kH200, false, nullptr},
    {"L40, RTX 40", 89, 89, 142, kPortable, &k100KB, &kH200, false, nullptr},
    {"H100, H200", 90, 90, 132, kHopper, &k228KB, &kH200, true, nullptr},
    {"B200", 100, 100, 148, kPortable, &k228KB, &kH200, false, kNoTcgen05},
    {"B300", 103, 103, 148, kPortable, &k228KB, &kH200, false, kNoTcgen05},
    {"Thor", 110, 110, 20, kPortable, &k228KB, &kH200, false, kNoTcgen05},
    {"RTX 50", 120, 120, 170, kPortable, &k100KB, &kH200, false, nullptr},
    {"GB10", 121, 121, 48, kPortable, &k100KB, &kH200, false, nullptr},
    {"unknown", 90, 119, 132, kPortable, &k228KB, &kH200, false, kUnknown},
    {"unknown", 0, 999, 132, kPortable, &k100KB, &kH200, false, kUnknown},
};

constexpr const char* kRatesWhy =
    "rates of a Zen 3 core at 3.2 GHz with AVX2; both scale together well enough on wider machines";

constexpr CpuNumbers kCpu = {
    {128,
     "one online softmax step; against 64 it is 5 % faster in prefill, where every step reads and "
     "writes o"},
    {256,
     "one online softmax step, after which sums of int8 products in i32 are added to o: prefill "
     "6.8 ms "
     "against 8.1 of steps of 128, decode of head_dim 256 2.4 against 2.9"},
    {768 << 10,
     "three quarters of 1 MiB of second cache hold q, o and scores; not of the machine at hand, as "
     "plans in files and exported programs go to others"},
    {4, "only decodes: a split is cheap, and a thread that starts late does less"},
    {1,
     "threads take items from each other's queues; further queues would split prefill tiles, whose "
     "states are large"},
    {256, "a split writes and reads one f32 row of o per query row: a few percent of 256 tokens"},
    {8, "loading q and storing o take 0.4 us, 16 tokens of one kv head 0.7"},
    {8, "as an item"},
    {11'000, kRatesWhy},
    {55'000, kRatesWhy},
    {75'000, kRatesWhy},
};

}  // namespace

const CudaDevice& FindCudaDevice(int64_t arch) {
  const CudaDevice* device = kCudaDevices;
  while (arch < device->first_arch || arch > device->last_arch) ++device;
  return *device;
}

const HopperTile& FindHopperTile(const AttentionSpec& spec) {
  const HopperOperands operands = spec.eight_bit_products ? HopperOperands::kFp8
                                  : spec.quantized()      ? HopperOperands::kDequantized
                                                          : HopperOperands::k16Bit;
  const HopperTile* found = nullptr;  // the last row of the operands, if head_dim_vo exceeds all of
                                      // them
  for (const HopperTile& tile : kHopperTiles) {
    if (tile.operands != operands) continue;
    found = &tile;
    if (spec.head_dim_vo <= tile.up_to_head_dim_vo) break;
  }
  return *found;
}

const char* CpuKernelName(int64_t dtype) {
  return dtype == kF32 ? "float32" : dtype == kBF16 ? "bfloat16" : "float16";
}

CpuNumbers CpuNumbersOf(int64_t dtype) {
  CpuNumbers cpu = kCpu;
  const auto tune = [&](const char* field, Number* number) {
    *number = TunedNumber(0, CpuKernelName(dtype), field, *number);
  };
  tune("decode_queues", &cpu.decode_queues);
  tune("min_chunk", &cpu.min_chunk);
  tune("item_cost", &cpu.item_cost);
  tune("split_cost", &cpu.split_cost);
  tune("bytes_per_us", &cpu.bytes_per_us);
  tune("low_flops_per_us", &cpu.low_flops_per_us);
  tune("flops_per_us", &cpu.flops_per_us);
  return cpu;
}

int64_t CpuReadFormat(const AttentionSpec& spec) {
  return spec.kv_format == kE4m3Format && !spec.fresh_kv ? kE4m3Format : kPlainFormat;
}

const CpuIsaRule* FindCpuIsaRule(const AttentionSpec& spec, const char* best) {
  // A row must have the same bits in a decode, a chunk and a long prompt. eight_bit_products is not
  // tuned.
  if (spec.schedule == kFixedSplit || spec.eight_bit_products) return nullptr;
  return FindTunedIsa(spec.dtype, CpuReadFormat(spec), best);
}

}  // namespace jax_attn
