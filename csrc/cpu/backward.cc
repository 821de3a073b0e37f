#include "cpu/backward.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/threads/thread_scratch.h"
#include "cpu/variant_code.h"

namespace jax_attn {
namespace {

// The most keys of a task, and the most rows if items may be joined. Large, because each task loads
// keys and rows again and adds their gradients to sums in memory; not larger, because tasks that
// write the same rows wait for each other.
constexpr int64_t kTaskKeys = 1024, kTaskRows = 512;

// One or several items of the plan, over a part of the span or of the step list.
struct Task {
  WorkItem item;
  i64 uses;  // of the first row, where the graph has SumUses: of the item's tokens, then of its
             // keys
};

// Which tasks write the same sums of a variant's operands.
enum class OperandSums { kNone, kOfHead, kOfAll };

// The tasks of a plan in the order in which sums are added up, and their dependencies. A task waits
// for earlier tasks that were the last to write any of its rows of d_q, or of d_k and d_v, or its
// sums of operands. So the result equals that of running the tasks one by one.
class TaskGraph {
 public:
  TaskGraph(const AttentionParams& p, int64_t tile_kv, int64_t num_kv_rows,
            OperandSums operand_sums)
      : p_(p), tile_kv_(tile_kv), operand_sums_(operand_sums) {
    std::vector<std::vector<WorkItem>> items(p.num_kv_heads);  // of a head
    for (i32 i = 0; i < p.header->num_items; ++i) {
      const WorkItem& item = p.items[i];
      if (item.qo_len > 0 && item.kv_begin < item.kv_end) items[item.kv_head].push_back(item);
    }
    for (std::vector<WorkItem>& of_head : items) JoinAll(&of_head);
    std::vector<Writer> tokens(p.max_qo_tokens), keys(num_kv_rows);
    unwritten_tokens_.resize(p.num_kv_heads * tokens.size());
    unwritten_keys_.resize(p.num_kv_heads * keys.size());
    for (size_t head = 0; head < items.size(); ++head) {
      std::fill(tokens.begin(), tokens.end(), Writer{});
      std::fill(keys.begin(), keys.end(), Writer{});
      if (operand_sums_ == OperandSums::kOfHead) last_of_operands_ = {};
      const size_t begin = tasks_.size();
      ListTasks(items[head]);
      for (size_t i = begin; i < tasks_.size(); ++i) Connect(static_cast<i32>(i), &tokens, &keys);
      const auto mark = [&](const std::vector<Writer>& rows, std::vector<uint8_t>* unwritten) {
        for (size_t i = 0; i < rows.size(); ++i) {
          (*unwritten)[head + i * items.size()] = rows[i].task < 0;
        }
      };
      mark(tokens, &unwritten_tokens_);
      mark(keys, &unwritten_keys_);
    }
  }

  size_t num_tasks() const { return tasks_.size(); }
  // The task, without sums and results.
  BackwardTask TaskOf(i32 task) const {
    const auto& [item, uses] = tasks_[task];
    return {item, nullptr, false, {}, {}, {}, &uses_[uses], &uses_[uses + item.qo_len]};
  }
  // 1 for rows of d_q, or of d_k and d_v, that no task writes: [rows, num_kv_heads].
  const std::vector<uint8_t>& unwritten_tokens() const { return unwritten_tokens_; }
  const std::vector<uint8_t>& unwritten_keys() const { return unwritten_keys_; }

  // Calls fn(task) for tasks that depend on no other task.
  template <typename Fn>
  void ForFirst(Fn&& fn) const {
    for (size_t i = 0; i < tasks_.size(); ++i) {
      if (waits_for_[i] == 0) fn(static_cast<i32>(i));
    }
  }

  // Calls fn(task) for those that only waited for `task`, which is finished.
  template <typename Fn>
  void Finish(i32 task, Fn&& fn) {
    for (i32 e = first_edge_[task]; e >= 0; e = edges_[e].next) {
      if (--waits_for_[edges_[e].to] == 0) fn(edges_[e].to);
    }
  }

 private:
  // The last task that wrote a row, and the index of its SumUse.
  struct Writer {
    i32 task = -1;
    i64 use = -1;
  };

  // Joins items where possible. A plan has its items in the order of its queues.
  void JoinAll(std::vector<WorkItem>* items) const {
    std::stable_sort(items->begin(), items->end(), [](const WorkItem& a, const WorkItem& b) {
      return std::pair(a.request, a.first_token) < std::pair(b.request, b.first_token);
    });
    size_t num = 0;
    for (const WorkItem& item : *items) {
      if (num == 0 || !Join(item, &(*items)[num - 1])) (*items)[num++] = item;
    }
    items->resize(num);
  }

  // Joins two items if the second continues the first: same request, and rows that see all of their
  // keys in one item. Not with step lists, because each item has its own list.
  bool Join(const WorkItem& next, WorkItem* item) const {
    const bool continues = p_.steps == nullptr && IsFinal(*item) && IsFinal(next) &&
                           item->first_token + item->qo_len == next.first_token &&
                           item->q_pos + item->qo_len == next.q_pos &&
                           item->kv_base == next.kv_base && item->request == next.request;
    if (!continues || (item->qo_len + next.qo_len) * p_.group_size > kTaskRows) return false;
    item->qo_len += next.qo_len;
    item->kv_begin = std::min(item->kv_begin, next.kv_begin);
    item->kv_end = std::max(item->kv_end, next.kv_end);
    return true;
  }

  // Lists the tasks of one head. In round t each item has the t-th part of its span, counted from a
  // start that differs from item to item. So the tasks of a round write different rows of d_k and
  // d_v, and few wait.
  void ListTasks(const std::vector<WorkItem>& items) {
    const auto parts = [&](const WorkItem& item) {
      return (item.kv_end - 1) / kTaskKeys - item.kv_begin / kTaskKeys + 1;
    };
    int64_t rounds = 0;
    for (const WorkItem& item : items) rounds = std::max(rounds, parts(item));
    for (int64_t round = 0; round < rounds; ++round) {
      for (size_t m = 0; m < items.size(); ++m) {
        WorkItem item = items[m];
        const int64_t num = parts(item);
        if (round >= num) continue;
        const int64_t part = item.kv_begin / kTaskKeys + (static_cast<int64_t>(m) + round) % num;
        item.kv_begin = static_cast<i32>(std::max<int64_t>(item.kv_begin, part * kTaskKeys));
        item.kv_end = static_cast<i32>(std::min<int64_t>(item.kv_end, (part + 1) * kTaskKeys));
        tasks_.push_back({item, static_cast<i64>(uses_.size())});
        int64_t num_keys = 0;
        ForKeys(item, [&](int64_t begin, int64_t end) { num_keys += end - begin; });
        uses_.resize(uses_.size() + item.qo_len + num_keys);
        waits_for_.push_back(0);
        first_edge_.push_back(-1);
        newest_successor_.push_back(-1);
      }
    }
  }

  void Connect(i32 task, std::vector<Writer>* tokens, std::vector<Writer>* keys) {
    const WorkItem& item = tasks_[task].item;
    const auto wait_for = [&](i32* last) {
      if (*last >= 0 && *last != task && newest_successor_[*last] != task) {
        newest_successor_[*last] = task;
        edges_.push_back({task, first_edge_[*last]});
        first_edge_[*last] = static_cast<i32>(edges_.size()) - 1;
        ++waits_for_[task];
      }
      *last = task;
    };
    i64 use = tasks_[task].uses;
    const auto write = [&](Writer* last) {
      if (last->use >= 0) uses_[last->use] &= static_cast<uint8_t>(~kEndsSum);
      uses_[use] = static_cast<uint8_t>(kEndsSum | (last->use >= 0 ? kAddsToSum : 0));
      last->use = use++;
      wait_for(&last->task);
    };
    if (operand_sums_ != OperandSums::kNone) wait_for(&last_of_operands_);
    for (i32 t = 0; t < item.qo_len; ++t) {
      write(&(*tokens)[QueryRow(item, p_.qo_indices, t)]);
    }
    ForKeys(item, [&](int64_t pos, int64_t end) {
      while (pos < end) {
        int64_t row = item.kv_base + pos, n = end - pos;
        if (p_.page_size > 0) {
          const int64_t slot = pos % p_.page_size;
          row = int64_t{p_.page_indices[item.kv_base + pos / p_.page_size]} * p_.page_size + slot;
          n = std::min(n, p_.page_size - slot);
        }
        for (int64_t i = 0; i < n; ++i) write(&(*keys)[row + i]);
        pos += n;
      }
    });
  }

  // Calls fn(begin, end) for the positions of keys that the kernel reads, in its order.
  template <typename Fn>
  void ForKeys(const WorkItem& item, Fn&& fn) const {
    const Range span = SpanOf(p_, item);
    if (p_.steps == nullptr) return fn(span.begin, span.end);
    for (int64_t i = item.kv_begin / tile_kv_; i * tile_kv_ < item.kv_end; ++i) {
      const i64 start = (p_.steps[i] >> 1) * tile_kv_;
      const i64 begin = std::max(span.begin, start), end = std::min(span.end, start + tile_kv_);
      if (begin < end) fn(begin, end);
    }
  }

  struct Edge {
    i32 to, next;  // next: another edge from the same task, -1: none
  };

  const AttentionParams& p_;
  const int64_t tile_kv_;
  const OperandSums operand_sums_;
  i32 last_of_operands_ = -1;
  std::vector<Task> tasks_;
  std::vector<uint8_t> uses_;  // SumUse of rows of tasks
  std::vector<uint8_t> unwritten_tokens_, unwritten_keys_;
  std::vector<i32> waits_for_;         // number of unfinished tasks that it waits for
  std::vector<i32> first_edge_;        // first edge of each task
  std::vector<i32> newest_successor_;  // the successor to which the last edge was added
  std::vector<Edge> edges_;
};

// Runs the tasks of a graph on the threads that call Work: always the first task in the list that
// is ready. A thread waits only while another one is in the middle of a task.
class Runner {
 public:
  Runner(TaskGraph* graph, const std::function<void(i32)>& run)
      : graph_(graph), run_(run), left_(graph->num_tasks()) {
    graph->ForFirst([&](i32 task) { Push(task); });
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return left_ == 0 || !ready_.empty(); });
      if (left_ == 0) return;
      std::pop_heap(ready_.begin(), ready_.end(), std::greater<i32>());
      const i32 task = ready_.back();
      ready_.pop_back();
      lock.unlock();
      run_(task);
      lock.lock();
      --left_;
      graph_->Finish(task, [&](i32 next) { Push(next); });
      changed_.notify_all();
    }
  }

 private:
  void Push(i32 task) {
    ready_.push_back(task);
    std::push_heap(ready_.begin(), ready_.end(), std::greater<i32>());
  }

  TaskGraph* const graph_;
  const std::function<void(i32)>& run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<i32> ready_;  // a heap
  size_t left_;
};

// Calls fn(begin, end) for pieces of [0, n), rows of `row` elements, that are worth waking a thread
// for.
void ForPieces(TaskPool& pool, int64_t n, int64_t row,
               const std::function<void(int64_t, int64_t)>& fn) {
  const int64_t piece = std::max<int64_t>(1, (1 << 18) / row);
  ParallelFor(pool, (n + piece - 1) / piece,
              [&](int64_t i) { fn(i * piece, std::min(n, (i + 1) * piece)); });
}

// Number of rows of one layer of k and v.
int64_t KvRows(const AttentionSpec& spec, int64_t num_pages) {
  return spec.paged() ? num_pages * spec.page_size : spec.max_kv_tokens;
}

// Whether different heads of k and v read different elements: some axis of the index is the head.
bool IsByHead(const VariantGradient& gradient, i32 element, const AttentionParams& p) {
  const VariantProgram& program = gradient.program;
  const Instruction& load = program.instructions[gradient.elements[element].load];
  for (i32 axis = 0; axis < NumValueArgs(program, load); ++axis) {
    const i32 op = program.instructions[load.args[1 + axis]].op;
    const i32 length = p.variant_operands[load.args[0]].dims[axis];
    if ((op == kOpHead && length >= p.num_qo_heads) ||
        (op == kOpKvHead && length >= p.num_kv_heads)) {
      return true;
    }
  }
  return false;
}

OperandSums SumsOf(const VariantGradient& gradient, const AttentionParams& p,
                   const std::vector<BackwardResults::OfOperand>& results) {
  if (results.empty()) return OperandSums::kNone;
  const std::vector<i32> operands = OperandsOf(gradient);
  for (i32 i = 0; i < gradient.num_elements; ++i) {
    const i32 operand = gradient.program.instructions[gradient.elements[i].load].args[0];
    const auto at = std::find(operands.begin(), operands.end(), operand) - operands.begin();
    const bool has_own = results[at].num_copies == p.num_kv_heads;
    if (!has_own && !IsByHead(gradient, i, p)) return OperandSums::kOfAll;
  }
  return OperandSums::kOfHead;
}

}  // namespace

std::vector<i32> OperandsOf(const VariantGradient& gradient) {
  std::vector<i32> operands;
  for (i32 i = 0; i < gradient.num_elements; ++i) {
    operands.push_back(gradient.program.instructions[gradient.elements[i].load].args[0]);
  }
  std::sort(operands.begin(), operands.end());
  operands.erase(std::unique(operands.begin(), operands.end()), operands.end());
  return operands;
}

int64_t BackwardSums(const AttentionSpec& spec, int64_t num_pages) {
  if (spec.dtype == kF32) return 0;
  return spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_qk +
         KvRows(spec, num_pages) * spec.num_kv_heads * (spec.head_dim_qk + spec.head_dim_vo);
}

void BackwardCpu(const AttentionProblem& problem, const VariantGradient& gradient,
                 const BackwardParams& operands, const BackwardResults& results, TaskPool& pool) {
  const AttentionSpec& spec = problem.spec;
  BackwardParams params = operands;
  const AttentionParams& p = params.forward;
  const CpuBackwardKernels& kernels = *ActiveKernels().backward[spec.dtype];
  CpuGeometry geometry = MakeGeometry(problem.config);
  geometry.max_rows = std::max<i64>(geometry.max_rows, kTaskRows);
  VariantCode code;
  if (problem.program.present) {
    MakeVariantCode(gradient.program, spec.logits_soft_cap > 0, &gradient, &code);
    geometry.program = &gradient.program;
    geometry.code = &code;
  }
  const int64_t kv_rows = KvRows(spec, p.num_pages), layer = p.layer ? *p.layer : 0;
  TaskGraph graph(p, geometry.tile_kv, kv_rows, SumsOf(gradient, p, results.operands));
  // One result: the elements of a layer and of all layers, which layer the sums go to, and which of
  // its rows no task writes.
  struct Result {
    void* data;
    int64_t size, num_layers, layer;
    const std::vector<uint8_t>& unwritten;
  };
  const int64_t kv_heads = kv_rows * spec.num_kv_heads, num_layers = p.page_size ? p.num_layers : 1;
  const Result all[] = {
      {results.d_q, spec.max_qo_tokens * spec.num_qo_heads * spec.head_dim_qk, 1, 0,
       graph.unwritten_tokens()},
      {results.d_k, kv_heads * spec.head_dim_qk, num_layers, layer, graph.unwritten_keys()},
      {results.d_v, kv_heads * spec.head_dim_vo, num_layers, layer, graph.unwritten_keys()},
  };
  const int64_t element = ElementBytes(spec.dtype);
  // Rows of head 0, and the distance to those of the next head. Sums that are not results are
  // stored head by head, so that those of a task are contiguous.
  BackwardRows rows[3];
  int64_t next_sums[3], next_results[3];
  float* sums = results.sums;
  for (int i = 0; i < 3; ++i) {
    const Result& r = all[i];
    char* const data = static_cast<char*>(r.data);
    char* const own = data + r.layer * r.size * element;
    const auto num_rows = static_cast<int64_t>(r.unwritten.size());  // of all heads
    const int64_t row = num_rows > 0 ? r.size / num_rows : 1, whole = row * spec.num_kv_heads;
    next_results[i] = row * element;
    if (spec.dtype == kF32) {
      rows[i] = {reinterpret_cast<float*>(own), whole, own, whole};
      next_sums[i] = row;
    } else {
      rows[i] = {sums, row, own, whole};
      next_sums[i] = r.size / spec.num_kv_heads;
      sums += r.size;
    }
    const auto clear = [&](char* from, int64_t size) {
      ForPieces(pool, size, 1, [&](int64_t begin, int64_t end) {
        std::memset(from + begin * element, 0, (end - begin) * element);
      });
    };
    clear(data, r.layer * r.size);
    clear(own + r.size * element, (r.num_layers - r.layer - 1) * r.size);
    ForPieces(pool, num_rows, row, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        if (r.unwritten[at]) std::memset(own + at * row * element, 0, row * element);
      }
    });
  }
  for (const BackwardResults::OfOperand& r : results.operands) {
    ForPieces(pool, r.num_copies * r.size, 1, [&](int64_t begin, int64_t end) {
      std::memset(r.data + begin, 0, (end - begin) * sizeof(float));
    });
  }
  // Their sums are found first, since a task has only some keys of a row.
  std::vector<RowSum> far_rows;
  const int64_t num_rows = spec.max_qo_tokens * spec.num_qo_heads;
  if (!p.sums_weights && std::any_of(params.lse, params.lse + num_rows, IsFarLse)) {
    far_rows.assign(num_rows, {-std::numeric_limits<float>::infinity(), 0.0f});
  }
  bool finds_sums = !far_rows.empty();
  const std::vector<i32> read = OperandsOf(gradient);
  const std::function<void(i32)> run = [&](i32 index) {
    BackwardTask task = graph.TaskOf(index);
    task.far_rows = far_rows.empty() ? nullptr : far_rows.data();
    task.finds_sums = finds_sums;
    BackwardRows* const of_task_rows[] = {&task.d_q, &task.d_k, &task.d_v};
    for (int i = 0; i < 3; ++i) {
      *of_task_rows[i] = rows[i];
      of_task_rows[i]->sums += task.item.kv_head * next_sums[i];
      of_task_rows[i]->results =
          static_cast<char*>(rows[i].results) + task.item.kv_head * next_results[i];
    }
    BackwardParams of_task = params;
    for (size_t i = 0; i < read.size(); ++i) {
      const BackwardResults::OfOperand& r = results.operands[i];
      of_task.d_operands[read[i]] = r.data + (r.num_copies > 1 ? task.item.kv_head * r.size : 0);
    }
    kernels.run(of_task, geometry, task, ThreadScratch(kernels.scratch_bytes(p, geometry)));
  };
  const auto run_all = [&](TaskGraph* tasks) {
    Runner runner(tasks, run);
    ParallelFor(pool, std::min<int64_t>(pool.num_threads(), tasks->num_tasks()),
                [&](int64_t) { runner.Work(); });
  };
  if (finds_sums) {
    TaskGraph tasks = graph;
    run_all(&tasks);
    finds_sums = false;
  }
  run_all(&graph);
}

}  // namespace jax_attn
