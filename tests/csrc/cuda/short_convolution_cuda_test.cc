// Short convolutions without a GPU: cuda/any/short_convolution.cuh runs in emulation and must match
// the sum in f64, and states must be copies.
#include "emulation/cuda_emulation.h"
// The header above stands in for CUDA and must come first.
#include "cuda/any/short_convolution.cuh"
#include "cuda/linear_attention_cuda_cases.h"
#include "part.h"

namespace jax_attn {
namespace {

template <int kOfDtype, int kTaps, bool kSilu>
struct ConvolutionTraits {
  static constexpr int kArch = 90, kDtype = kOfDtype, kWidth = kTaps;
  static constexpr bool kHasSilu = kSilu;
};

struct ConvolutionCase {
  std::vector<LinearRequest> requests;
  int num_slots, padding, chunk_tokens;
};

template <class Traits>
void RunCase(const ConvolutionCase& c, int channels, int tile_rows, int row_tiles) {
  constexpr int kDtype = Traits::kDtype, kWidth = Traits::kWidth, kPast = kWidth - 1, kLayers = 2;
  PlanWords plan = MakeStatePlan(c.requests, c.chunk_tokens, 2);
  plan.layer = 1;
  const int tokens = plan.words[kStatePlanTokens], max_tokens = tokens + c.padding;
  std::mt19937 rng(static_cast<unsigned>(tokens * 31 + channels + kWidth));
  std::normal_distribution<float> normal;
  TypedArray x(kDtype, i64{max_tokens} * channels), y = x;
  for (i64 i = 0; i < i64{tokens} * channels; ++i) x.Set(i, normal(rng));
  std::vector<float> weight(channels * kWidth), bias(channels);
  for (float& w : weight) w = normal(rng);
  for (float& b : bias) b = normal(rng);
  const i64 of_slot = i64{kPast} * channels, layer = c.num_slots * of_slot;
  TypedArray states(kDtype, kLayers * c.num_slots * of_slot);
  for (const LinearRequest& r : c.requests) {
    for (i64 i = 0; r.read_slot >= 0 && i < of_slot; ++i) {
      states.Set(layer + r.read_slot * of_slot + i, normal(rng));
    }
  }
  const TypedArray before = states, fresh_y = y;
  std::vector<double> want_y(i64{max_tokens} * channels, 0.0);
  std::vector<double> want_states(states.size());
  std::vector<bool> is_written(states.size());
  int row = 0;
  for (const LinearRequest& r : c.requests) {
    // Inputs of a channel from the oldest of the state on.
    const auto input = [&](int at, int channel) {
      if (at >= kPast) return x.Get(i64{row + at - kPast} * channels + channel);
      if (r.read_slot < 0) return 0.0;
      return before.Get(layer + r.read_slot * of_slot + i64{at} * channels + channel);
    };
    for (int channel = 0; channel < channels; ++channel) {
      for (int t = 0; t < r.length; ++t) {
        double sum = static_cast<double>(bias[channel]);
        for (int i = 0; i < kWidth; ++i) {
          sum += static_cast<double>(weight[channel * kWidth + i]) * input(t + i, channel);
        }
        want_y[i64{row + t} * channels + channel] =
            Traits::kHasSilu ? sum / (1 + std::exp(-sum)) : sum;
      }
      const auto write = [&](int slot, int position) {
        for (int i = 0; slot >= 0 && i < kPast; ++i) {
          const i64 at = layer + slot * of_slot + i64{i} * channels + channel;
          want_states[at] = input(position + i, channel);
          is_written[at] = true;
        }
      };
      write(r.write_slot, r.commit < 0 ? r.length : r.commit);
      for (const auto& [position, slot] : r.checkpoints) write(slot, position);
    }
    row += r.length;
  }

  ShortConvolutionParams p = {};
  p.x = x.data();
  p.weight = weight.data();
  p.bias = bias.data();
  p.states = states.data();
  p.y = y.data();
  p.plan = ParamsOf(plan, max_tokens, c.num_slots, kLayers);
  p.num_channels = channels;
  p.tile_rows = tile_rows;
  p.row_tiles = row_tiles;
  using Body = ShortConvolutionBody<Traits>;
  const int of_cta = ConvolutionVector(kDtype, kWidth, channels) * Body::kNumThreads;
  const int ctas = plan.max_chunks * row_tiles * CeilDiv(channels, of_cta);
  const auto launch = [&] {
    emulation::machine.Launch(ctas, Body::kNumThreads, 1, [&] { Body::Run(p); });
  };
  launch();

  const double rounding = kDtype == kElementBf16  ? 0x1p-8
                          : kDtype == kElementF16 ? 0x1p-11
                                                  : 0x1p-20;
  int wrong = 0;
  for (size_t i = 0; i < want_y.size(); ++i) {
    wrong += !(std::abs(y.Get(i) - want_y[i]) <= (rounding + 2e-6) * (1 + std::abs(want_y[i])));
  }
  for (size_t i = 0; i < states.size(); ++i) {
    wrong += is_written[i] ? states.Get(i) != want_states[i] : !states.SameBits(i, before);
  }
  const TypedArray after = states;
  plan.words[kStatePlanFault] = 1;
  for (size_t i = 0; i < y.size(); ++i) y.Set(i, 1.0f);
  launch();
  for (size_t i = 0; i < y.size(); ++i) wrong += !std::isnan(y.Get(i));
  for (size_t i = 0; i < states.size(); ++i) wrong += !states.SameBits(i, after);
  if (wrong == 0) return;
  ++g_failures;
  std::printf("FAILED type %d, width %d, %d channels, %zu requests, %d tokens: %d values differ\n",
              kDtype, kWidth, channels, c.requests.size(), tokens, wrong);
}

template <class Traits>
void RunTraits(int channels) {
  g_part.has_asked = true;
  if constexpr (InPart<Traits>()) {
    std::vector<ConvolutionCase> cases;
    // Decode: in place, from zeros, to nowhere, empty requests.
    cases.push_back(
        {{{1, 0, 0}, {1, -1, 1}, {1, 2, -1}, {0, 3, 4}, {0, -1, -1}, {2, 5, 5}}, 7, 3, 64});
    // Drafts, of which some are committed.
    cases.push_back({{{8, 0, 0, 3}, {5, 1, 2, 0}, {7, -1, 3, 7}, {2, 4, 4, 1}}, 5, 0, 64});
    // Prompts, with checkpoints before the first inputs have gone out of the window.
    cases.push_back(
        {{{70, 0, 1, -1, {{0, 3}, {1, 0}, {2, 5}, {40, 4}}}, {1, 2, 2}, {33, -1, 6}}, 8, 5, 16});
    // A request of more chunks than a CTA has threads.
    std::vector<std::pair<int, int>> many;
    for (int i = 0; i < 140; ++i) many.push_back({i, i + 1});
    cases.push_back({{{2, -1, 142}, {140, 0, 0, -1, many}, {3, -1, 141}}, 143, 1, 64});
    cases.push_back({{}, 1, 2, 64});
    for (const ConvolutionCase& c : cases) {
      if (!TakesCase<Traits>()) continue;
      RunCase<Traits>(c, channels, 8, 1);
      RunCase<Traits>(c, channels, 16, 4);
    }
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  RunTraits<ConvolutionTraits<kElementBf16, 4, true>>(40);
  RunTraits<ConvolutionTraits<kElementBf16, 4, false>>(13);  // no whole vectors
  RunTraits<ConvolutionTraits<kElementF32, 4, true>>(20);
  RunTraits<ConvolutionTraits<kElementF16, 8, true>>(12);
  RunTraits<ConvolutionTraits<kElementF32, 8, false>>(3);
  RunTraits<ConvolutionTraits<kElementBf16, 1, true>>(8);
  RunTraits<ConvolutionTraits<kElementF16, 2, false>>(1040);  // more than a CTA has
  if (g_failures == 0) std::printf("short_convolution_cuda_test: ok\n");
  return g_failures != 0;
}
