#include "cpu/quantized_groups.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/product_kernels.h"
#include "cpu/simd/simd_types.h"
#include "cpu/threads/thread_scratch.h"
#include "spec.h"

namespace jax_attn {
namespace {

// Widened panels of a task, which should stay in the second cache.
constexpr int64_t kTaskBytes = 512 << 10;
constexpr int64_t kTaskPanels = 4;  // panels that kernels take at once for few rows

// What codes are: the values of those that are no integers, and the factors of exponents.
struct Tables {
  std::array<float, 256> e4m3, exponents;
  std::array<float, 16> e2m1 = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  Tables() {
    for (int i = 0; i < 256; ++i) {
      e4m3[i] = ToF32(E4m3{static_cast<uint8_t>(i)});
      exponents[i] = std::ldexp(1.0f, i - 127);
    }
  }
};

// What the 32 columns of a panel share in some rows of depth.
struct Columns {
  float scales[kWeightColumns], zeros[kWeightColumns];
};

// Widens `num` rows of codes, `pitch` bytes apart, to rows of a panel: kEach rows from a row of
// bytes. width: columns that exist. value(byte, i): what the i-th code of a byte is.
template <int kEach, typename Value>
void WidenRows(const uint8_t* codes, int64_t pitch, int64_t num, int64_t width,
               const Columns& columns, const Value& value, float* to) {
  uint8_t part[kWeightColumns] = {};
  for (int64_t row = 0; row < num; ++row, codes += pitch) {
    const uint8_t* from = codes;
    if (width < kWeightColumns) {
      std::memcpy(part, codes, width);
      from = part;
    }
    for (int i = 0; i < kEach; ++i, to += kWeightColumns) {
      for (int64_t c = 0; c < kWeightColumns; ++c) {
        to[c] = (value(from[c], i) - columns.zeros[c]) * columns.scales[c];
      }
    }
  }
}

// Widens a panel of the matrix of `group` to [depth, kWeightColumns].
void WidenPanel(const QuantizedGroupsParams& p, const Tables& tables, int64_t group, int64_t panel,
                float* to) {
  const int64_t each = p.is_int8 ? 1 : WeightsPerByte(p.format);
  const int64_t scale_rows = CeilDiv(p.depth, p.group_size);
  const int64_t first = panel * kWeightColumns;
  const int64_t width = std::min<int64_t>(kWeightColumns, p.columns - first);
  for (int64_t s = 0; s < scale_rows; ++s) {
    const int64_t begin = s * p.group_size, end = std::min(p.depth, begin + p.group_size);
    const int64_t at = (group * scale_rows + s) * p.columns + first;
    Columns columns = {};
    for (int64_t c = 0; c < width; ++c) {
      columns.scales[c] = p.has_exponents
                              ? tables.exponents[static_cast<const uint8_t*>(p.scales)[at + c]]
                              : static_cast<const float*>(p.scales)[at + c];
      if (p.zeros != nullptr) columns.zeros[c] = p.zeros[at + c];
    }
    const uint8_t* codes = p.codes + (group * p.depth + begin) / each * p.columns + first;
    const int64_t num = (end - begin) / each;
    float* rows = to + begin * kWeightColumns;
    if (p.is_int8) {
      WidenRows<1>(
          codes, p.columns, num, width, columns,
          [](uint8_t x, int) { return static_cast<float>(static_cast<int8_t>(x)); }, rows);
    } else if (p.format == kE4m3Weights) {
      WidenRows<1>(
          codes, p.columns, num, width, columns, [&](uint8_t x, int) { return tables.e4m3[x]; },
          rows);
    } else if (p.format == kInt4Weights) {
      WidenRows<2>(
          codes, p.columns, num, width, columns,
          [](uint8_t x, int i) { return static_cast<float>(i == 0 ? x & 15 : x >> 4); }, rows);
    } else {
      WidenRows<2>(
          codes, p.columns, num, width, columns,
          [&](uint8_t x, int i) { return tables.e2m1[i == 0 ? x & 15 : x >> 4]; }, rows);
    }
  }
}

}  // namespace

void QuantizedGroupsCpu(const QuantizedGroupsParams& p, TaskPool& pool) {
  static const Tables tables;
  const CpuProductKernels& kernels = *ActiveKernels().product[kF32];
  struct Part {
    int64_t group, row;
  };
  std::vector<Part> parts;
  int64_t row = 0;
  for (int64_t group = 0; group < p.num_groups; row += p.group_rows[group++]) {
    if (p.group_rows[group] > 0) parts.push_back({group, row});
  }
  std::memset(p.y + row * p.columns, 0, (p.num_rows - row) * p.columns * sizeof(float));
  const int64_t num_panels = CeilDiv(p.columns, kWeightColumns);
  const int64_t panel_floats = p.depth * kWeightColumns;
  const int64_t panel_bytes = panel_floats * static_cast<int64_t>(sizeof(float));
  const int64_t task_panels = std::clamp<int64_t>(kTaskBytes / panel_bytes, 1, kTaskPanels);
  const int64_t tasks_each = CeilDiv(num_panels, task_panels);
  ParallelFor(pool, static_cast<int64_t>(parts.size()) * tasks_each, [&](int64_t task) {
    const Part& part = parts[task / tasks_each];
    const int64_t begin = task % tasks_each * task_panels;
    const int64_t end = std::min(num_panels, begin + task_panels);
    auto* panels = static_cast<float*>(ThreadScratch(task_panels * panel_bytes));
    for (int64_t i = begin; i < end; ++i) {
      WidenPanel(p, tables, part.group, i, panels + (i - begin) * panel_floats);
    }
    ProductParams product = {};
    product.panels = panels - begin * panel_floats;  // where the matrix would begin
    product.y = p.y + part.row * p.columns;
    product.num_rows = p.group_rows[part.group];
    product.depth = p.depth;
    product.columns = p.columns;
    product.is_wide = true;
    kernels.run(product, p.x + part.row * p.depth, begin, end);
  });
}

}  // namespace jax_attn
