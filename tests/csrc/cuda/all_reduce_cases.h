// A group of emulated devices for the tests of all_reduce.cuh; include an emulation first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "checks.h"
#include "cuda/any/all_reduce.cuh"

namespace jax_attn {
namespace {

i64 g_limit = 20'000'000'000;  // of every wait, as GlobalTimer counts

enum Epilogue { kSum, kNormed, kQuantized };

template <int kElement, int kDevices, int kThreads, int kRowVectors, bool kTwo, Epilogue kThen>
struct AllReduceTraits {
  static constexpr int kArch = 90, kDtype = kElement, kNumDevices = kDevices;
  static constexpr int kNumThreads = kThreads, kVectors = kRowVectors;
  static constexpr bool kTwoShot = kTwo, kNorm = kThen != kSum, kQuantizes = kThen == kQuantized;
};

// What the devices of a group share. Slots are memory that nobody touches before it is needed.
struct Group {
  explicit Group(int num_devices) : faults(num_devices) {
    const i64 bytes = AllReduceMemory::Bytes(num_devices);
    for (int rank = 0; rank < num_devices; ++rank) {
      memory.push_back({static_cast<char*>(std::calloc(static_cast<size_t>(bytes), 1))});
    }
  }
  ~Group() {
    for (const AllReduceMemory& of : memory) std::free(of.begin);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  AllReduceHead& head(int rank) {
    return *reinterpret_cast<AllReduceHead*>(memory[static_cast<size_t>(rank)].begin);
  }
  int code(int rank) const { return static_cast<int>(faults[rank].code_and_peer & 0xffffffff); }

  std::vector<AllReduceMemory> memory;
  std::vector<AllReduceFault> faults;
};

template <int kElement>
std::vector<float> FloatsOf(const std::vector<char>& bytes) {
  constexpr int kBytes = Element<kElement>::kBytes;
  std::vector<float> floats;
  for (size_t at = 0; at < bytes.size(); at += kBytes) {
    float x;
    u16 bits;
    if constexpr (kBytes == 2) {
      std::memcpy(&bits, &bytes[at], 2);
      x = Element<kElement>::ToFloat(bits);
    } else {
      std::memcpy(&x, &bytes[at], 4);
    }
    floats.push_back(x);
  }
  return floats;
}

template <int kElement>
std::vector<char> BytesOf(const std::vector<float>& floats) {
  constexpr int kBytes = Element<kElement>::kBytes;
  std::vector<char> bytes(floats.size() * kBytes);
  for (size_t i = 0; i < floats.size(); ++i) {
    if constexpr (kBytes == 2) {
      const u32 bits = Element<kElement>::Pack(floats[i], 0.0f);
      std::memcpy(&bytes[i * 2], &bits, 2);
    } else {
      std::memcpy(&bytes[i * 4], &floats[i], 4);
    }
  }
  return bytes;
}

// One call: the arrays of all devices, and what they should become.
template <class Traits>
struct Call {
  static constexpr int kElement = Traits::kDtype, kDevices = Traits::kNumDevices;
  static constexpr int kBytes = Element<kElement>::kBytes;
  static constexpr float kEps = 1e-5f, kOffset = 1.0f;

  Call(Group& group, int num_rows, int columns, bool has_residual, int call, unsigned seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto array = [&](int size) {
      std::vector<float> x(static_cast<size_t>(size));
      for (float& value : x) value = normal(rng);
      return BytesOf<kElement>(x);
    };
    const int size = num_rows * columns;
    residual = array(size);
    weight = array(columns);
    for (int rank = 0; rank < kDevices; ++rank) {
      x.push_back(array(size));
      sum.emplace_back(size * kBytes, 0x5a);
      normed.emplace_back(Traits::kQuantizes ? size : size * kBytes, 0x5a);
      scales.emplace_back(num_rows, -1.0f);
    }
    for (int rank = 0; rank < kDevices; ++rank) {
      AllReduceParams p = {};
      p.x = x[rank].data();
      p.residual = has_residual ? residual.data() : nullptr;
      p.weight = weight.data();
      p.sum = sum[rank].data();
      p.normed = normed[rank].data();
      p.scales = scales[rank].data();
      std::copy(group.memory.begin(), group.memory.end(), p.memory);
      p.fault = &group.faults[rank];
      p.limit = g_limit;
      p.num_rows = num_rows, p.columns = columns, p.rank = rank, p.call = call;
      p.eps = kEps, p.norm_offset = kOffset;
      params.push_back(p);
    }
  }

  // The sums in the order of ranks.
  std::vector<char> WantedSum() const {
    std::vector<float> total = FloatsOf<kElement>(x[0]);
    for (int rank = 1; rank < kDevices; ++rank) {
      const std::vector<float> part = FloatsOf<kElement>(x[rank]);
      for (size_t i = 0; i < total.size(); ++i) total[i] += part[i];
    }
    total = FloatsOf<kElement>(BytesOf<kElement>(total));
    if (params[0].residual != nullptr) {
      const std::vector<float> before = FloatsOf<kElement>(residual);
      for (size_t i = 0; i < total.size(); ++i) total[i] += before[i];
    }
    return BytesOf<kElement>(total);
  }

  // All devices must have the same bits.
  bool IsRight() const {
    const int num_rows = params[0].num_rows, columns = params[0].columns;
    const std::vector<char> want = WantedSum();
    for (int rank = 0; rank < kDevices; ++rank) {
      if (sum[rank] != want || normed[rank] != normed[0] || scales[rank] != scales[0]) return false;
    }
    return !Traits::kNorm || IsNormRight(FloatsOf<kElement>(want), num_rows, columns);
  }

  // Whether every sum of a device is right or NaN.
  bool IsRightOrNan(int rank) const {
    const std::vector<float> want = FloatsOf<kElement>(WantedSum());
    const std::vector<float> got = FloatsOf<kElement>(sum[rank]);
    for (size_t i = 0; i < got.size(); ++i) {
      if (!std::isnan(got[i]) && got[i] != want[i]) return false;
    }
    return true;
  }

  bool IsNormRight(const std::vector<float>& total, int num_rows, int columns) const {
    const std::vector<float> of = FloatsOf<kElement>(weight);
    std::vector<float> got;
    if (!Traits::kQuantizes) got = FloatsOf<kElement>(normed[0]);
    const float tolerance = Traits::kQuantizes ? 0.07f : kBytes == 4 ? 1e-5f : 0.01f;
    for (int row = 0; row < num_rows; ++row) {
      double squares = 0;
      float largest = 0;
      for (int c = 0; c < columns; ++c) squares += std::pow(total[row * columns + c], 2.0);
      const double factor = 1 / std::sqrt(squares / columns + kEps);
      for (int c = 0; c < columns; ++c) {
        const int at = row * columns + c;
        const float want = static_cast<float>(total[at] * factor * (kOffset + of[c]));
        float value = 0;
        if constexpr (Traits::kQuantizes) {
          value = E4m3ToFloat(static_cast<unsigned char>(normed[0][at])) * scales[0][row];
        } else {
          value = got[at];
        }
        largest = std::max(largest, std::fabs(value));
        // Small quantized values have the precision of the smallest e4m3 times the scale.
        if (std::fabs(value - want) > tolerance * std::fabs(want) + 0.01f * tolerance) return false;
      }
      if (Traits::kQuantizes && std::fabs(largest / scales[0][row] - 448.0f) > 0.5f) return false;
    }
    return true;
  }

  bool HasNan(int rank) const {
    const std::vector<float> got = FloatsOf<kElement>(sum[rank]);
    return std::any_of(got.begin(), got.end(), [](float value) { return std::isnan(value); });
  }

  std::vector<char> residual, weight;
  std::vector<std::vector<char>> x, sum, normed;  // by rank
  std::vector<std::vector<float>> scales;
  std::vector<AllReduceParams> params;
};

}  // namespace
}  // namespace jax_attn
