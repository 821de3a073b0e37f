#include "cpu/linear_attention.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/simd/simd_types.h"
#include "cpu/threads/thread_scratch.h"

namespace jax_attn {
namespace {

// v heads of a q and k head in one task, which share products of q and k.
constexpr i64 kTaskHeads = 4;
// Tasks a thread, so that all have something to do to the end.
constexpr i64 kTasksPerThread = 4;
// Elements of states times tokens that are not worth waking a thread for.
constexpr i64 kAloneElements = 64 << 10;

struct Request {
  const StateChunk* chunks;
  i64 num_chunks, num_tokens;
};

std::vector<Request> RequestsOf(const StateChunk* chunks, i64 num_chunks) {
  std::vector<Request> requests;
  for (i64 i = 0; i < num_chunks; ++i) {
    if (i == 0 || chunks[i].is_first) requests.push_back({chunks + i, 0, 0});
    ++requests.back().num_chunks;
    requests.back().num_tokens += chunks[i].length;
  }
  // Long ones first, so that no thread begins one when the others are done.
  std::stable_sort(requests.begin(), requests.end(),
                   [](const Request& a, const Request& b) { return a.num_tokens > b.num_tokens; });
  return requests;
}

}  // namespace

void LinearAttentionCpu(int64_t dtype, const LinearParams& p, const StateChunk* chunks,
                        int64_t num_chunks, TaskPool& pool) {
  const std::vector<Request> requests = RequestsOf(chunks, num_chunks);
  if (requests.empty()) return;
  const i64 group = p.num_v_heads / p.num_qk_heads, wanted = kTasksPerThread * pool.num_threads();
  const i64 num = static_cast<i64>(requests.size());
  i64 heads = std::min(group, kTaskHeads), columns = p.dim_v;
  while (heads > 1 && num * p.num_qk_heads * CeilDiv(group, heads) < wanted)
    heads = (heads + 1) / 2;
  while (columns > kLinearColumns &&
         num * p.num_qk_heads * CeilDiv(group, heads) * CeilDiv(p.dim_v, columns) < wanted) {
    columns = RoundUp(columns / 2, kLinearColumns);
  }
  std::vector<LinearTask> tasks;
  i64 tokens = 0;
  for (const Request& request : requests) {
    tokens += request.num_tokens;
    for (i64 qk_head = 0; qk_head < p.num_qk_heads; ++qk_head) {
      for (i64 head = 0; head < group; head += heads) {
        for (i64 column = 0; column < p.dim_v; column += columns) {
          const i64 first = qk_head * group + head;
          tasks.push_back({request.chunks, request.num_chunks, qk_head, first,
                           std::min(first + heads, (qk_head + 1) * group), column,
                           std::min(column + columns, p.dim_v)});
        }
      }
    }
  }
  InlinePool alone;
  const i64 elements = (tokens + num) * p.num_v_heads * p.dim_k * p.dim_v;
  const CpuLinearKernels& kernels = ActiveLinearKernels().attend[dtype];
  ParallelFor(elements < kAloneElements ? alone : pool, static_cast<int64_t>(tasks.size()),
              [&](int64_t i) {
                void* scratch = ThreadScratch(kernels.scratch_bytes(p, tasks[i]));
                kernels.run(p, tasks[i], scratch);
              });
}

void LinearAttentionBackwardCpu(int64_t dtype, const LinearBackwardParams& p,
                                const StateChunk* chunks, int64_t num_chunks, TaskPool& pool) {
  std::vector<Request> requests = RequestsOf(chunks, num_chunks);
  if (requests.empty()) return;
  // Requests that read the same slot add to the same gradient: one task has them, in their order.
  const auto slot_of = [](const Request& request) { return request.chunks->read_slot; };
  std::stable_sort(requests.begin(), requests.end(), [&](const Request& a, const Request& b) {
    const bool is_shared = slot_of(a) >= 0 && slot_of(a) == slot_of(b);
    return is_shared ? a.chunks < b.chunks : slot_of(a) < slot_of(b);
  });
  const i64 most = p.forward.has_channel_decay ? kChannelChunkTokens : kChunkTokens;
  std::vector<std::vector<StatePiece>> pieces(requests.size());
  std::vector<std::pair<size_t, size_t>> groups;  // of requests
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool is_shared =
        i > 0 && slot_of(requests[i]) >= 0 && slot_of(requests[i]) == slot_of(requests[i - 1]);
    if (!is_shared) groups.push_back({i, i});
    groups.back().second = i + 1;
    for (i64 c = 0; c < requests[i].num_chunks; ++c) {
      const StateChunk& chunk = requests[i].chunks[c];
      i64 done = 0;
      do {
        const i64 num = std::min<i64>(most, chunk.length - done);
        const bool is_last = done + num == chunk.length;
        pieces[i].push_back({chunk.begin + done, num, is_last ? chunk.write_slot : -1});
        done += num;
      } while (done < chunk.length);
    }
  }
  const i64 group = p.forward.num_v_heads / p.forward.num_qk_heads;
  const CpuLinearBackwardKernels& kernels = ActiveLinearKernels().backward[dtype];
  ParallelFor(pool, static_cast<int64_t>(groups.size()) * p.forward.num_qk_heads, [&](int64_t t) {
    const auto [begin, end] = groups[t / p.forward.num_qk_heads];
    const i64 head = t % p.forward.num_qk_heads;
    for (size_t i = begin; i < end; ++i) {
      const LinearBackwardTask task = {{requests[i].chunks, requests[i].num_chunks, head,
                                        head * group, (head + 1) * group, 0, p.forward.dim_v},
                                       pieces[i].data(),
                                       static_cast<i64>(pieces[i].size())};
      kernels.run(p, task, ThreadScratch(kernels.scratch_bytes(p, task)));
    }
  });
}

}  // namespace jax_attn
