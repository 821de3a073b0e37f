// The kernel configuration on CUDA devices: which main loop, which tiles. Rules that follow from a
// kernel's registers and instructions are here; tables of tiles and costs are in devices.cc.
// build_tools/check_kernels.py verifies registers and shared memory for every combination.
#include <algorithm>

#include "select/devices.h"
#include "select/select.h"
#include "select/tuning.h"

namespace jax_attn {
namespace {

// Puts values into a configuration, and records their reasons if the caller wants them.
class Choice {
 public:
  Choice(const AttentionSpec& spec, KernelConfig* config, Reasons* reasons)
      : spec(spec), device(FindCudaDevice(spec.arch)), config(*config), reasons_(reasons) {}

  void Because(const char* what, const std::string& why) {
    if (reasons_ != nullptr) reasons_->emplace_back(what, why);
  }
  int64_t Take(const char* what, const Number& number) {
    Because(what, number.why);
    return number.value;
  }
  int64_t Take(const char* what, const Steps& steps, int64_t size) {
    Because(what, steps.why);
    return steps.At(size);
  }
  void TakeTiles(std::initializer_list<int64_t> rows, const std::string& why) {
    config.num_tiles = 0;
    for (int64_t r : rows) config.tile_q[config.num_tiles++] = r;
    Because("tile_q", why);
  }

  const AttentionSpec& spec;
  const CudaDevice& device;
  KernelConfig& config;

 private:
  Reasons* reasons_;
};

// Room for what CTAs keep in shared memory beside rows: a few words a warp, and the merge's
// scratch.
constexpr int64_t kOtherBytes = 2048;

constexpr const char* kOneTileM =
    "fixed_split: one tile M, whatever the capacities, so that a row is computed the same way in "
    "every batch";

// Why the portable loop is used though a faster one is possible; null: it is the right one.
const char* NoOwnLoop(const CudaDevice& device, int64_t q_format) {
  if (q_format != kPlainFormat && device.main_loop == kHopper) {
    return "the one on wgmma takes queries of float8_e4m3fn with eight_bit_products=True alone";
  }
  return device.no_own_loop;
}

int64_t LargerHeadDim(const AttentionSpec& spec) {
  return std::max(spec.head_dim_qk, spec.head_dim_vo);
}

// Whether rows are too long for sm80/attention.cuh and sm90/attention.cuh.
bool IsWide(const AttentionSpec& spec) {
  return !spec.mla && spec.dtype != kF32 && LargerHeadDim(spec) > kWideHeadDim;
}

// Whether sm90/attention.cuh computes the spec.
bool RunsHopperLoop(const CudaDevice& device, const AttentionSpec& spec) {
  return device.main_loop == kHopper && !spec.mla && spec.dtype != kF32 && !IsWide(spec) &&
         !(spec.quantized() && spec.fresh_kv) &&
         (spec.q_format == kPlainFormat || spec.eight_bit_products);
}

// Shared memory of any/attention_f32.cuh.
int64_t F32Bytes(const Tiles& tiles, const AttentionSpec& spec, int64_t rows) {
  const int64_t dims = spec.head_dim_qk + spec.head_dim_vo;
  const int64_t step = tiles.f32_step_tokens.At(dims), slots = tiles.f32_ring_slots.At(dims);
  return 4 * (rows * (spec.head_dim_qk + 4 + step) + slots * step * (dims + 8)) + kOtherBytes;
}

// Rows of a prefill tile of sm80/attention.cuh with 4 warps. With wide values o takes head_dim_vo
// registers a thread in warps of 32 rows: beyond 128 no room is left for the logits.
int64_t PrefillRows(const Tiles& tiles, const AttentionSpec& spec) {
  return spec.head_dim_vo > 128 ? 64 : tiles.prefill_rows.At(spec.head_dim_qk);
}

// Whether 128 rows of sm80/attention.cuh fit the shared memory: 8 warps of 16 rows, whose steps
// have 64 tokens, since each warp loads at least 8.
bool FitsTallTile(const Tiles& tiles, const AttentionSpec& spec) {
  const auto pitch = [](int64_t row_bytes) { return row_bytes + 32; };
  const int64_t dim = LargerHeadDim(spec);
  const int64_t step = 64 * pitch(spec.kv_row_bytes(dim));
  const int64_t dequantized = DequantizesRows(spec.kv_format) ? 64 * pitch(2 * dim) : 0;
  return 128 * pitch(2 * spec.head_dim_qk) + 2 * step + dequantized + kOtherBytes <=
         tiles.smem_bytes;
}

// The plain FFMA kernel: eight threads a row, a few rows and tokens at a time. It is simple, and
// fast enough.
void SelectF32(Choice& c) {
  const Tiles& tiles = *c.device.tiles;
  const int64_t dims = c.spec.head_dim_qk + c.spec.head_dim_vo;
  c.Because("main_loop", "portable, FFMA: float32 has no tensor core kernel");
  int64_t rows = 16;
  while (rows < c.spec.group_size()) rows *= 2;
  c.TakeTiles({rows}, "eight threads a row, the query heads of a kv head side by side");
  c.config.num_warps = rows / 4;
  c.config.tile_kv = c.Take("tile_kv", tiles.f32_step_tokens, dims);
  c.config.num_stages = c.Take("num_stages", tiles.f32_ring_slots, dims);
  c.config.num_ctas = rows <= 32 && 2 * F32Bytes(tiles, c.spec, rows) <= tiles.smem_bytes ? 2 : 1;
  c.Because(
      "num_ctas",
      "one CTA computes while the other waits, unless it has enough warps, or all of the memory");
}

void SelectTensorCore(Choice& c) {
  const Tiles& tiles = *c.device.tiles;
  const AttentionSpec& spec = c.spec;
  const char* why = NoOwnLoop(c.device, spec.q_format);
  if (why == nullptr && c.device.main_loop == kHopper) {
    why = RunsHopperLoop(c.device, spec)
              ? "the one on wgmma has no transforms of k and v: wgmma reads rows as TMA wrote them"
              : "the one on wgmma takes no quantized keys and values with fresh_kv";
  }
  c.Because("main_loop", std::string("portable (sm80/attention.cuh, mma.sync)") +
                             (why != nullptr ? std::string(": ") + why : ""));
  const int64_t prefill = PrefillRows(tiles, spec);
  c.config.tile_kv = c.Take("tile_kv", tiles.step_tokens, spec.head_dim_qk);
  // In warps of 16 rows, 128 logits have no room beyond 192.
  if (spec.head_dim_vo > 192) c.config.tile_kv = 32;
  c.config.num_warps = 4;  // 2 CTAs a multiprocessor: 255 registers a thread
  if (spec.group_size() > 64) {
    if (prefill < 128) {
      c.config.num_warps = 8;
      c.config.tile_kv = 64;
    }
    c.TakeTiles({128}, "a tile holds all heads of a token");
  } else if (spec.schedule == kFixedSplit) {
    c.TakeTiles({64}, kOneTileM);
  } else if (spec.max_steps > 0 && c.config.tile_kv != 16 * c.config.num_warps) {
    c.TakeTiles({prefill}, "max_steps: decodes would take other steps than step lists have");
  } else if (spec.group_size() <= 16) {
    c.TakeTiles(
        {16, prefill},
        std::string("decode: one mma.sync tile, the warps split the kv tokens; a tile "
                    "between the two would cost half as much compile time again. Prefill: ") +
            tiles.prefill_rows.why);
  } else if (prefill > 64) {
    c.TakeTiles({64, prefill}, "64: few tokens of more than 16 heads; more rows: prefill");
  } else {
    c.TakeTiles({prefill}, tiles.prefill_rows.why);
  }
  const int64_t dim = LargerHeadDim(spec), row_bytes = spec.kv_row_bytes(dim);
  if (DequantizesRows(spec.kv_format)) {
    const int64_t slots = tiles.ring_slots.At(dim) - 1;  // slots of 16-bit rows
    c.config.num_stages = std::clamp<int64_t>(slots * 2 * dim / row_bytes, 2, 6);
    c.Because("num_stages",
              "the memory of the 16-bit ring: one slot of it has the step that is multiplied, the "
              "others hold quantized rows; beyond 6 nothing is gained");
  } else {
    // As many bytes in flight for any type: head dims are counted in 16-bit elements.
    c.config.num_stages = c.Take("num_stages", tiles.ring_slots, row_bytes / 2);
  }
  c.config.num_ctas = c.Take("num_ctas", tiles.ctas, dim);
  if (c.config.num_warps > 4) c.config.num_ctas = 1;  // they may use all registers
}

constexpr Number kTallChunk = {
    256,
    "reasoned: a state of 128 rows is written and read in the time of as many tokens; 641 tokens, "
    "4 / 1 heads of 256, took 76 us in chunks of 64 (H200)"};

// Whether requests are so short that a kernel with one consumer and several CTAs a multiprocessor
// is faster: one CTA computes while another begins or ends an item, and small tiles are dealt more
// evenly. Measured on an H200 (docs/notes/prefill.md): with 200 keys -13 to -20 %, with 256 -2 %,
// with 512 and more +6 to +26 %.
constexpr int64_t kMostShortKeys = 256;
bool IsShort(const AttentionSpec& spec, const VariantProgram* program) {
  return spec.typical_kv_len > 0 && spec.typical_kv_len <= kMostShortKeys && !spec.paged() &&
         !spec.quantized() && LargerHeadDim(spec) <= 128 && spec.group_size() <= 64 &&
         spec.schedule != kFixedSplit && spec.max_steps == 0 &&
         (program == nullptr || !program->present);
}

void SelectHopperShort(Choice& c) {
  c.config.main_loop = kHopper;
  c.config.num_warps = kHopperShortWarps;
  c.config.tile_kv = 64;
  c.Because("tile_kv",
            "as many tokens as rows, so that a CTA's share of the memory holds its ring");
  c.TakeTiles({64}, "typical_kv_len: short requests have one consumer, of 64 rows");
  c.config.num_ctas = HopperCtasPerSm(c.config.num_warps, LargerHeadDim(c.spec));
  c.Because("num_ctas", "as many as registers and shared memory hold");
}

void SelectHopper(Choice& c, const VariantProgram* program) {
  c.Because(
      "main_loop",
      "hopper (sm90/attention.cuh, wgmma): 16-bit types on " + std::string(c.device.name) +
          (c.spec.eight_bit_products ? ", and e4m3 as it is (sm90/fp8_matmul.cuh)"
           : c.spec.quantized()      ? ", to which quantized values are converted in shared memory "
                                       "(sm90/quantized_producer.cuh)"
                                     : ""));
  // No batch of the plan has more rows of a kv head, so no tile needs them, even with shared
  // prefixes.
  const bool only_decodes = !c.spec.quantized() && c.spec.schedule != kFixedSplit &&
                            c.spec.group_size() <= kHopperDecodeRows &&
                            c.spec.max_qo_tokens * c.spec.group_size() <= kHopperDecodeRows;
  if (!only_decodes && IsShort(c.spec, program)) return SelectHopperShort(c);
  c.config.main_loop = kHopper;
  const HopperTile& tile = FindHopperTile(c.spec);
  c.config.num_warps = only_decodes ? 16 : 4 * (tile.producers + tile.consumers);
  c.config.tile_kv = tile.step_tokens(c.spec.head_dim_qk);
  c.Because("tile_kv", tile.why);
  const int64_t prefill = 64 * tile.consumers;
  // A wgmma has 64 rows; sm90/decode.cuh swaps its operands, so that rows of q are its columns.
  if (c.spec.group_size() > 64) {
    c.TakeTiles({prefill}, "a tile holds all heads of a token");
  } else if (c.spec.schedule == kFixedSplit) {
    c.TakeTiles({64}, kOneTileM);
  } else if (only_decodes) {
    c.TakeTiles({kHopperDecodeRows},
                "max_qo_tokens: no batch has more rows of a kv head, so a kernel of a third of the "
                "code will do: two producers, for K and for V, and two consumers");
  } else if (c.spec.group_size() <= kHopperDecodeRows && !c.spec.eight_bit_products) {
    c.TakeTiles({kHopperDecodeRows, prefill},
                "32: one consumer, tokens and columns of v are the 64 rows of a wgmma; more: all, "
                "with 64 rows each, or one where there are no more");
  } else {
    c.TakeTiles({64, prefill}, "64: one consumer; more: all, with 64 rows each");
  }
  c.config.num_ctas = 1;
  c.Because("num_ctas", "its warpgroups fill a multiprocessor");
  // A single tile keeps min_chunk, also one of 128 rows for group_size > 64: it has the decodes.
  if (c.config.num_tiles > 1) c.config.min_tall_chunk = c.Take("min_tall_chunk", kTallChunk);
}

constexpr const char* kMlaCtasWhy =
    "the steps and q of one CTA fill a multiprocessor's shared memory";

// sm80/wide.cuh: up to `most_rows` rows, in steps of step_tokens.
void TakeWideTiles(Choice& c, const Number& most_rows, const Number& step_tokens) {
  const int64_t group = c.spec.group_size();
  if (c.spec.schedule == kFixedSplit) {
    c.TakeTiles({most_rows.value}, kOneTileM);
  } else if (group <= most_rows.value / 2) {
    c.TakeTiles({group <= 16 ? 16 : 32, most_rows.value}, most_rows.why);
  } else {
    c.TakeTiles({most_rows.value}, most_rows.why);
  }
  c.config.tile_kv = c.Take("tile_kv", step_tokens);
  c.config.num_warps = 8;   // o takes 128 registers a thread for 64 rows of 512 columns
  c.config.num_stages = 0;  // as many as fit
  c.config.num_ctas = 1;
  c.Because("num_ctas", kMlaCtasWhy);
}

void SelectWide(Choice& c) {
  c.Because(
      "main_loop",
      "portable (sm80/wide.cuh, mma.sync): rows of more than 256 elements, for which no other "
      "loop exists");
  TakeWideTiles(c, c.device.tiles->wide_rows, c.device.tiles->wide_step_tokens);
}

// Whether sm90/mla_decode.cuh can compute the spec's rows, in blocks of at most kColumnHeads heads.
constexpr int64_t kColumnHeads = 32;
bool RunsHopperMlaDecode(const CudaDevice& device, const AttentionSpec& spec) {
  return device.main_loop == kHopper && spec.dtype != kF32 && spec.head_dim_qk % 64 == 0 &&
         spec.head_dim_vo % 64 == 0;
}

void SelectMla(Choice& c, bool rows_may_differ) {
  const Tiles& tiles = *c.device.tiles;
  const AttentionSpec& spec = c.spec;
  const int64_t group = spec.group_size();
  const bool hopper = c.device.main_loop == kHopper && spec.dtype != kF32;
  if (group <= kColumnHeads && RunsHopperMlaDecode(c.device, spec)) {
    c.Because("main_loop",
              "hopper (sm90/mla_decode.cuh, wgmma): up to 32 heads are columns of its products");
    c.config.main_loop = kHopper;
    c.config.num_warps = 12;
    c.config.num_ctas = 1;
    c.Because("num_ctas", kMlaCtasWhy);
    if (spec.schedule == kFixedSplit || group > 16) {
      c.TakeTiles({32}, spec.schedule == kFixedSplit ? kOneTileM : "as many columns of a product");
    } else {
      c.TakeTiles({16, 32}, "16: one token of 16 heads; 32: two of them for the same bytes");
    }
    c.config.tile_kv = 64;
    c.Because("tile_kv", "tokens are the rows of a wgmma");
    return;
  }
  if (hopper && group > 32 && rows_may_differ) {
    c.Because("main_loop",
              "portable (sm80/wide.cuh, mma.sync): a mask of the user's, or no softmax, with more "
              "than 32 heads, where sm90/mla.cuh takes every value that lies in a step");
  } else if (hopper && group > 32 && spec.head_dim_qk % 64 == 0 && spec.head_dim_vo % 128 == 0) {
    c.Because("main_loop", "hopper (sm90/mla.cuh, wgmma): blocks of more than 32 heads");
    c.config.main_loop = kHopper;
    c.config.num_warps = 12;
    c.config.num_ctas = 1;
    c.Because("num_ctas", kMlaCtasWhy);
    c.TakeTiles({64}, "the rows of a wgmma");
    c.config.tile_kv = 64;
    c.Because("tile_kv", "two steps of 74 KB fit beside 64 rows of q");
    return;
  } else {
    c.Because("main_loop",
              "portable (sm80/wide.cuh, mma.sync): other devices, and head dims that are not whole "
              "blocks of 64 columns");
  }
  TakeWideTiles(c, tiles.mla_rows, tiles.mla_step_tokens);
}

// The kernel's name, as in kCudaKernelNames, and its costs.
std::pair<const char*, const KernelCosts*> CostsOf(const Choice& c) {
  const Costs& costs = *c.device.costs;
  const bool hopper = c.config.main_loop == kHopper;
  if (c.spec.quantized() && !c.spec.mla && !IsWide(c.spec)) {
    if (hopper) return {"hopper_e4m3", &costs.hopper_e4m3};
    return {"portable_e4m3", &costs.portable_e4m3};
  }
  if (!c.spec.mla && !IsWide(c.spec)) {
    if (hopper && HopperHasOneConsumer(c.config.num_warps)) {
      return {"hopper_short", &costs.hopper_short};
    }
    if (hopper && !c.spec.paged() && LargerHeadDim(c.spec) <= 128) {
      return {"hopper_ragged", &costs.hopper_ragged};
    }
    if (hopper) return {"hopper", &costs.hopper};
    return {"portable", &costs.portable};
  }
  const int64_t rows = c.config.tile_q[0];
  if (hopper && rows == 64) return {"mla_hopper", &costs.mla_hopper};
  if (rows <= 16) return {"mla_16", &costs.mla_16};
  if (rows <= 32) return {"mla_32", &costs.mla_32};
  return {"mla_64", &costs.mla_64};
}

void TakeCosts(Choice& c) {
  const auto [kernel, costs] = CostsOf(c);
  const auto take = [&, kernel = kernel](const char* field, const Number& number) {
    return c.Take(field, TunedNumber(c.spec.arch, kernel, field, number));
  };
  c.config.min_chunk = take("min_chunk", costs->min_chunk);
  c.config.item_cost = take("item_cost", costs->item_cost);
  c.config.split_cost = take("split_cost", costs->split_cost);
  if (costs->tall_split_cost.why != nullptr) {
    c.config.tall_split_cost = take("tall_split_cost", costs->tall_split_cost);
  }
  const char* why = costs->kv_cost.why;
  for (int i = 0; i < c.config.num_tiles; ++i) {
    const std::string field = "kv_cost_" + std::to_string(i);
    const Number built_in = {costs->kv_cost.At(c.config.tile_q[i]), costs->kv_cost.why};
    const Number number = TunedNumber(c.spec.arch, kernel, field, built_in);
    c.config.kv_cost[i] = number.value;
    if (number.why != built_in.why) why = number.why;
  }
  c.Because("kv_cost", why);
  const Number& cached = c.device.costs->cached_bytes;
  c.config.cached_tokens =
      cached.value / (c.spec.num_kv_heads * (c.spec.kv_row_bytes(c.spec.head_dim_qk) +
                                             c.spec.kv_row_bytes(c.spec.head_dim_vo)));
  c.Because("cached_tokens", cached.why);
}

std::string CostsFrom(const CudaDevice& device) {
  return std::string("costs measured on ") + device.costs->measured_on;
}

std::string DescribeDevice(const CudaDevice& device) {
  std::string text = std::string(device.name) + ", " + device.tiles->name + " of shared memory; " +
                     CostsFrom(device);
  return device.is_measured ? text : text + ", not on this device";
}

}  // namespace

int64_t LargestCudaHeadDim(const AttentionSpec& spec) {
  // sm80/wide.cuh takes no e4m3 queries, and quantizes no fresh rows. A row with scales of its own
  // is quantized by one warp, eight elements a lane.
  const bool has_wide = spec.q_format == kPlainFormat && !spec.eight_bit_products &&
                        (!spec.quantized() || !spec.fresh_kv) &&
                        FormatOf(spec.kv_format).scale_bytes == 0;
  return has_wide ? 512 : kWideHeadDim;
}

int64_t LargestCudaGroup(const AttentionSpec& spec) {
  const CudaDevice& device = FindCudaDevice(spec.arch);
  const Tiles& tiles = *device.tiles;
  if (IsWide(spec)) return tiles.wide_rows.value;
  if (spec.dtype == kF32) {
    int64_t rows = 128;
    while (rows > 16 && F32Bytes(tiles, spec, rows) > tiles.smem_bytes) rows /= 2;
    return rows;
  }
  const bool fits =
      RunsHopperLoop(device, spec) || PrefillRows(tiles, spec) == 128 || FitsTallTile(tiles, spec);
  return fits ? 128 : 64;
}

int64_t DefaultProcessors(int64_t arch) { return FindCudaDevice(arch).num_processors; }

int64_t LargestCudaBackwardHeadDim(int64_t arch) {
  // 48 rows of 1,024 columns in 16 bits and 32 in f32, beside the sums of a variant's operands.
  constexpr int64_t kWideBytes = 136 * 1024;
  return FindCudaDevice(arch).tiles->smem_bytes >= kWideBytes ? 512 : kWideHeadDim;
}

bool RunsHopperBackward(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  // No register is left for a variant or for step lists.
  return FindCudaDevice(spec.arch).main_loop == kHopper && spec.dtype != kF32 &&
         !problem.program.present && spec.max_steps == 0 && !IsWide(spec);
}

std::string DescribeFallback(int64_t arch, int64_t q_format) {
  const CudaDevice& device = FindCudaDevice(arch);
  const char* why = NoOwnLoop(device, q_format);
  if (why == nullptr) return "";
  return "sm_" + std::to_string(arch) + " (" + device.name +
         "): the portable main loop (mma.sync) serves, with " + CostsFrom(device) + ": " + why +
         ".";
}

int64_t MostHeadsOfBlock(const AttentionSpec& spec) {
  const CudaDevice& device = FindCudaDevice(spec.arch);
  // sm90/mla.cuh has no registers left to convert quantized rows, and the portable loop takes
  // longer than four blocks of 32 heads (docs/notes/mla.md).
  if (spec.quantized() && RunsHopperMlaDecode(device, spec)) return kColumnHeads;
  return device.tiles->mla_rows.value;
}

void SelectCuda(const AttentionSpec& spec, KernelConfig* config, Reasons* reasons,
                const VariantProgram* program, bool transforms) {
  *config = KernelConfig{};
  Choice c(spec, config, reasons);
  c.Because("device", DescribeDevice(c.device));
  if (spec.mla) {
    SelectMla(c, program != nullptr && program->present &&
                     (program->visible >= 0 || !program->normalizes));
  } else if (spec.dtype == kF32) {
    SelectF32(c);
  } else if (RunsHopperLoop(c.device, spec) && !transforms) {
    SelectHopper(c, program);
  } else if (IsWide(spec)) {
    SelectWide(c);
  } else {
    SelectTensorCore(c);
  }
  config->num_ctas *= std::max<int64_t>(1, spec.num_processors);  // fills the device once
  config->heads_per_unit = 1;
  TakeCosts(c);
}

}  // namespace jax_attn
