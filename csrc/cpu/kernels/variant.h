// Runs a variant's program during a pass (pass_base.h). Internal linkage: see kernels.h.
//
// Values of rows come first, then those of keys and diagonals of each block, then logits of each
// row and block: a value is computed where it changes least often. The result of a lane does not
// depend on other lanes.
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/variant_ops.h"

namespace jax_attn {
namespace {

// The rows of a pass: of `num_heads` kv heads, each `rows` (tokens times group).
struct VariantRows {
  const AttentionParams* params;
  const WorkItem* items;
  i64 num_heads, rows, tile_kv;
};

template <class Isa>
class VariantRun {
 public:
  VariantRun() = default;
  // On a null scratch it only counts bytes. max_rows: over all heads; max_tokens: of one head.
  VariantRun(const VariantProgram* program, const VariantCode* code, i64 max_rows, i64 max_tokens,
             i64 max_heads, i64 tile_kv, char* scratch)
      : p_(program), c_(code), tile_kv_(tile_kv) {
    if (code == nullptr) return;
    row_lanes_ = RoundUp(max_rows, Isa::kWidth);
    diagonal_lanes_ = RoundUp(max_tokens + tile_kv, Isa::kWidth);
    facts_ = Take(scratch, kNumFacts * row_lanes_);
    natural_ = reinterpret_cast<float*>(Take(scratch, row_lanes_));
    mask_ = Take(scratch, tile_kv);
    rows_ = Take(scratch, code->num_slots[kRowHome] * row_lanes_);
    keys_ = Take(scratch, (code->num_slots[kKeyHome] + 2) * tile_kv);
    const i64 copies = code->diagonals_by_head ? max_heads : 1;
    diagonal_step_ = code->num_slots[kDiagHome] * diagonal_lanes_;
    diagonals_ = Take(scratch, copies * diagonal_step_ +
                                   (code->num_slots[kDiagHome] > 0 ? 2 * diagonal_lanes_ : 0));
    distances_ = diagonals_ + copies * diagonal_step_;
    logits_ = Take(scratch, code->num_slots[kLogitHome] * tile_kv);
    views_ = reinterpret_cast<const i32**>(Take(scratch, 2 * code->num_slots[kLogitHome]));
    added_ = reinterpret_cast<const char**>(Take(scratch, code->added < 0 ? 0 : 2 * row_lanes_));
  }

  size_t bytes() const { return bytes_; }
  explicit operator bool() const { return c_ != nullptr; }
  bool scales() const { return c_->scales; }
  bool has_mask() const { return c_->visible >= 0; }
  // Whether the mask may hide something of the current rows and block: see Sees.
  bool masks() const { return has_mask() && hides_; }
  void SetHides(bool hides) { hides_ = hides; }

  // scales: [rows of the pass]; natural logits are magnitude * scale * raw score. d_operands:
  // backward pass only, by operand, the sums to which AddElements adds.
  template <typename QueryRow>
  void Begin(const VariantRows& pass, float magnitude, const float* scales,
             const QueryRow& query_row, float* const* d_operands = nullptr) {
    pass_ = pass;
    d_operands_ = d_operands;
    const AttentionParams& params = *pass.params;
    const WorkItem& item = pass.items[0];
    const i64 group = params.group_size, num_rows = pass.num_heads * pass.rows;
    num_rows_ = num_rows;
    lanes_ = RoundUp(num_rows, Isa::kWidth);
    tokens_ = pass.rows / group;
    const i32 q_len = params.qo_indptr[item.request + 1] - params.qo_indptr[item.request];
    for (i64 i = 0; i < lanes_; ++i) {
      const i64 row = Min(i, num_rows - 1), h = row / pass.rows;
      const i64 token = row % pass.rows / group, g = row % group;
      const i32 kv_head = pass.items[h].kv_head;
      natural_[i] = magnitude * scales[row];
      Fact(kOpHead)[i] = static_cast<i32>(kv_head * group + g);
      Fact(kOpKvHead)[i] = params.mla ? 0 : kv_head;
      Fact(kOpRequest)[i] = item.request;
      Fact(kOpQPos)[i] = static_cast<i32>(item.q_pos + token);
      Fact(kOpQRow)[i] = static_cast<i32>(query_row(token));
      Fact(kOpQLen)[i] = q_len;
      Fact(kOpKvLen)[i] = params.kv_lens[item.request];
    }
    Run(c_->rows, kRowHome, 0, lanes_);
    for (i32 i = 0; i < c_->num_slots[kLogitHome]; ++i) views_[i] = logits_ + i * tile_kv_;
    if (c_->added >= 0) FindAddedRows();
  }

  // Starts the block of keys at positions from `start` on, of which `valid` exist. is_masked:
  // whether the mask may hide any of it.
  void StartBlock(i64 start, Range valid, bool is_masked) {
    start_ = start;
    is_masked_ = is_masked;
    if (!is_masked && c_->logit == kRawScore) return;
    for (i64 j = 0; j < tile_kv_; ++j) keys_[j] = static_cast<i32>(start + j);
    if (c_->reads_kv_rows) FindKeyRows(start, valid, keys_ + tile_kv_);
    Run(c_->keys, kKeyHome, 0, tile_kv_);
    if (c_->num_slots[kDiagHome] == 0) return;
    // Lane e: key j and token t with j - t + tokens - 1 = e.
    const i64 lanes = RoundUp(tokens_ - 1 + tile_kv_, Isa::kWidth);
    const i64 first = pass_.items[0].q_pos + tokens_ - 1 - start;
    for (i64 e = 0; e < lanes; ++e) {
      distances_[e] = static_cast<i32>(first - e);
      distances_[diagonal_lanes_ + e] = 0;
    }
    const i64 heads = c_->diagonals_by_head ? pass_.num_heads * pass_.params->group_size : 1;
    for (head_ = 0; head_ < heads; ++head_) Run(c_->diagonals, kDiagHome, 0, lanes);
  }

  // How much of columns [begin, end) rows [first, last] see, from bounds of the mask's inputs: true
  // means that all is known to be seen (or hidden); false means nothing is known.
  struct Share {
    bool all, none;
  };
  Share Sees(i64 first, i64 last, i64 begin, i64 end) {
    if (c_->visible < 0 || !is_masked_) return {true, false};
    Bounds known[kNumCodeValues];
    for (i32 i = c_->mask.begin; i < c_->mask.end; ++i) {
      const CodeOp& op = c_->ops[i];
      Bounds args[3] = {};
      for (i32 a = 0; a < Min(op.num_args, 3); ++a) {
        args[a] = BoundsOf(op.args[a], known, first, last, begin, end);
      }
      known[op.value] = Combine(op, args);
    }
    const Bounds visible = BoundsOf(c_->visible, known, first, last, begin, end);
    return {visible.high < 0, visible.low == 0};
  }

  // Whether Add is equivalent to Transform without masks, for columns up to `end`.
  bool Adds(i64 end) const { return c_->added >= 0 && start_ + end <= added_length_; }

  JAX_ATTN_INLINE void Add(i64 row, i64 begin, i64 end, float* s) const {
    const char* from = added_[row] + start_ * added_bytes_;
    i64 ahead = row + kRowsAhead, block = start_;
    if (ahead >= num_rows_) {
      ahead = Min(ahead - num_rows_, num_rows_ - 1);
      block += tile_kv_;
    }
    const char* there = added_[ahead] + block * added_bytes_;
    for (i64 byte = begin * added_bytes_; byte < end * added_bytes_; byte += kCacheLine) {
      __builtin_prefetch(there + byte, 0, 3);
    }
    switch (added_type_) {
      case kOperandF32:
        return AddRow<Isa>(reinterpret_cast<const float*>(from), natural_[row], begin, end, s);
      case kOperandBF16:
        return AddRow<Isa>(reinterpret_cast<const Bf16*>(from), natural_[row], begin, end, s);
      default:
        return AddRow<Isa>(reinterpret_cast<const F16*>(from), natural_[row], begin, end, s);
    }
  }

  // Computes logits of columns [begin, end) of a row of the pass from its raw scores; a variant
  // that only masks leaves the scores. Columns that the row does not see become `hidden`. masks:
  // whether there may be such columns.
  void Transform(i64 row, i64 begin, i64 end, bool masks, float hidden, float* s) {
    At(row);
    raw_ = reinterpret_cast<i32*>(s);
    if (masks) Run(c_->mask, kLogitHome, begin, end);
    CodeRange range = masks ? c_->logits : c_->only_logits;
    // The last operation gives the logit, and writes it in place of the scores.
    const bool in_place = range.begin < range.end && c_->ops[range.end - 1].value == c_->logit;
    range.end -= in_place;
    Run(range, kLogitHome, begin, end);
    if (in_place) RunOp(c_->ops[range.end], begin, end, raw_ + begin);
    i32 bits;
    memcpy(&bits, &hidden, 4);
    bool is_vector[2] = {true, true};
    const i32* logit =
        in_place || c_->logit == kRawScore ? raw_ + begin : Find(c_->logit, begin, &is_vector[0]);
    if (masks) {
      const i32* visible = Find(c_->visible, begin, &is_vector[1]);
      CodeOp select = {kOpSelect, kVariantF32, kVariantF32, 0, 0, 3, {}};
      if (!is_vector[0] && !is_vector[1]) {
        Fill(*visible ? *logit : bits, begin, end);
      } else {
        FindFn<Isa>(select, is_vector[1] | is_vector[0] << 1)(raw_ + begin, visible, logit, &bits,
                                                              end - begin);
      }
    } else if (!is_vector[0]) {
      Fill(*logit, begin, end);
    } else if (logit != raw_ + begin) {
      memcpy(raw_ + begin, logit, static_cast<size_t>(end - begin) * 4);
    }
  }

  // Backward pass, instead of Transform: derivatives for [begin, end) by key, of the row with
  // scores s.
  struct Slopes {
    float* logits;
    float* of_score;  // d logit / d score
    i32* seen;        // 0 where the variant hides the key, else -1
  };
  void Differentiate(i64 row, i64 begin, i64 end, bool masks, float* s, const Slopes& to) {
    At(row);
    raw_ = reinterpret_cast<i32*>(s);
    if (masks) Run(c_->mask, kLogitHome, begin, end);
    Run(masks ? c_->logits : c_->only_logits, kLogitHome, begin, end);
    CopyLanes(c_->logit, begin, end, reinterpret_cast<i32*>(to.logits));
    if (c_->score >= 0) {
      CopyLanes(c_->score, begin, end, reinterpret_cast<i32*>(to.of_score));
    } else {
      for (i64 j = begin; j < end; ++j) to.of_score[j] = 1.0f;
    }
    if (masks) return CopyLanes(c_->visible, begin, end, to.seen);
    for (i64 j = begin; j < end; ++j) to.seen[j] = -1;
  }

  bool has_elements() const { return c_->num_elements > 0; }

  // Called after it, while s is unchanged: adds d_logits[j] * d logit / d element to the sums of
  // the operand elements that the row's keys [begin, end) read. d_logits: 0 where the row does not
  // see the key.
  void AddElements(i64 begin, i64 end, const float* d_logits) const {
    for (i32 i = 0; i < c_->num_elements; ++i) {
      const auto& element = c_->elements[i];
      Index indices[kMaxOperandRank];
      for (i32 a = 0; a < element.rank; ++a) {
        indices[a].at = Find(element.indices[a], begin, &indices[a].is_vector);
      }
      bool is_vector;
      const auto* partial =
          reinterpret_cast<const float*>(Find(element.partial, begin, &is_vector));
      AddToElements<Isa>(d_operands_[element.operand],
                         pass_.params->variant_operands[element.operand].dims, element.rank,
                         indices, partial, is_vector, d_logits + begin, end - begin);
    }
  }

  // Whether Mask gives the same result for both rows.
  bool MasksAlike(i64 a, i64 b) const {
    for (i32 i = 0; i < c_->num_mask_rows; ++i) {
      const i32* lanes = rows_ + c_->slot[c_->mask_rows[i]] * row_lanes_;
      if (lanes[a] != lanes[b]) return false;
    }
    const i64 group = pass_.params->group_size;
    return !c_->mask_has_diagonals ||
           (!c_->diagonals_by_head && a % pass_.rows / group == b % pass_.rows / group);
  }

  // By key, 0 in [begin, end) where the variant hides it from the row.
  const i32* Mask(i64 row, i64 begin, i64 end) {
    At(row);
    Run(c_->mask, kLogitHome, begin, end);  // no mask reads scores
    CopyLanes(c_->visible, begin, end, mask_);
    return mask_;
  }

 private:
  // Bounds of integers; for bool, -1 is true.
  struct Bounds {
    i64 low, high;
  };
  static constexpr Bounds kUnknown = {-(i64{1} << 31), (i64{1} << 31) - 1};

  static Bounds OfLanes(const i32* lanes, i64 n) {
    i32 low = lanes[0], high = lanes[0];
    for (i64 i = 0; i < n; ++i) {
      low = lanes[i] < low ? lanes[i] : low;
      high = lanes[i] > high ? lanes[i] : high;
    }
    return {low, high};
  }

  // Values of other homes are known; the bits of f32 mean nothing to Combine.
  Bounds BoundsOf(i32 value, const Bounds* known, i64 first, i64 last, i64 begin, i64 end) const {
    const i64 slot = c_->slot[value];
    switch (c_->home[value]) {
      case kRowHome:
        return OfLanes(rows_ + slot * row_lanes_ + first, last - first + 1);
      case kKeyHome:
        return OfLanes(keys_ + (2 + slot) * tile_kv_ + begin, end - begin);
      case kDiagHome: {
        const i64 group = pass_.params->group_size;
        const i64 lane = tokens_ - 1 - last % pass_.rows / group;
        const i64 n = last % pass_.rows / group - first % pass_.rows / group + end - begin;
        const i64 heads = c_->diagonals_by_head ? pass_.num_heads * group : 1;
        Bounds all = {kUnknown.high, kUnknown.low};
        for (i64 head = 0; head < heads; ++head) {
          const i32* lanes = diagonals_ + head * diagonal_step_ + slot * diagonal_lanes_;
          const Bounds one = OfLanes(lanes + lane + begin, n);
          all = {Min(all.low, one.low), Max(all.high, one.high)};
        }
        return all;
      }
      default:
        return known[value];
    }
  }

  static Bounds Combine(const CodeOp& op, const Bounds* x) {
    const bool is_bool = op.type == kVariantBool;
    const Bounds unknown = is_bool ? Bounds{-1, 0} : kUnknown, yes = {-1, -1}, no = {0, 0};
    const Bounds a = x[0], b = x[1], c = x[2];
    if (op.type == kVariantF32 || op.arg_type == kVariantF32) {
      return op.op == kOpSelect && is_bool ? Select(a, b, c) : unknown;
    }
    const auto if_fits = [&](i64 low, i64 high) {
      return low >= kUnknown.low && high <= kUnknown.high ? Bounds{low, high} : unknown;
    };
    switch (op.op) {
      case kOpEq:
        if (a.high < b.low || b.high < a.low) return no;
        return a.low == a.high && b.low == b.high ? yes : unknown;
      case kOpNe:
        if (a.high < b.low || b.high < a.low) return yes;
        return a.low == a.high && b.low == b.high ? no : unknown;
      case kOpLt:
        return a.high < b.low ? yes : a.low >= b.high ? no : unknown;
      case kOpLe:
        return a.high <= b.low ? yes : a.low > b.high ? no : unknown;
      case kOpAnd:
        return is_bool ? Bounds{Max(a.low, b.low), Max(a.high, b.high)} : unknown;
      case kOpOr:
        return is_bool ? Bounds{Min(a.low, b.low), Min(a.high, b.high)} : unknown;
      case kOpNot:
        return Bounds{-1 - a.high, -1 - a.low};
      case kOpSelect:
        return Select(a, b, c);
      case kOpAdd:
        return if_fits(a.low + b.low, a.high + b.high);
      case kOpSub:
        return if_fits(a.low - b.high, a.high - b.low);
      case kOpNeg:
        return if_fits(-a.high, -a.low);
      case kOpMin:
        return {Min(a.low, b.low), Min(a.high, b.high)};
      case kOpMax:
        return {Max(a.low, b.low), Max(a.high, b.high)};
      default:
        return unknown;
    }
  }

  static Bounds Select(Bounds which, Bounds yes, Bounds no) {
    if (which.high < 0) return yes;
    if (which.low == 0) return no;
    return {Min(yes.low, no.low), Max(yes.high, no.high)};
  }

  static constexpr i32 kNumFacts = kOpKvLen - kOpHead + 1;

  i32* Take(char* scratch, i64 count) {
    i32* at = reinterpret_cast<i32*>(scratch + bytes_);
    bytes_ += static_cast<size_t>(RoundUp(count * 4, kCacheLine));
    return at;
  }

  i32* Fact(i32 op) { return facts_ + (op - kOpHead) * row_lanes_; }

  void At(i64 row) {
    row_ = row;
    if (c_->num_slots[kDiagHome] == 0) return;  // nothing reads the other diagonal values
    const i64 group = pass_.params->group_size;
    token_ = row % pass_.rows / group;
    head_ = c_->diagonals_by_head ? row / pass_.rows * group + row % group : 0;
  }

  void CopyLanes(i32 value, i64 begin, i64 end, i32* to) const {
    bool is_vector;
    const i32* from = Find(value, begin, &is_vector);
    for (i64 j = begin; j < end; ++j) to[j] = is_vector ? from[j - begin] : *from;
  }

  void Fill(i32 bits, i64 begin, i64 end) {
    for (i64 j = begin; j < end; ++j) raw_[j] = bits;
  }

  // For code with `added`: finds the elements of each row for the key at position 0.
  void FindAddedRows() {
    const CodeOp& load = c_->ops[c_->added];
    const VariantOperand& operand = pass_.params->variant_operands[load.operand];
    const i32 key_axis = load.num_args - 1;
    added_type_ = p_->operands[load.operand].type;
    added_bytes_ = added_type_ == kOperandF32 ? 4 : 2;
    added_length_ = operand.dims[key_axis];
    for (i64 row = 0; row < lanes_; ++row) {
      i64 at = 0;
      for (i32 a = 0; a < key_axis; ++a) {
        const i64 index = rows_[c_->slot[load.args[a]] * row_lanes_ + row];
        at = at * operand.dims[a] + Clamp(index, operand.dims[a]);
      }
      added_[row] = static_cast<const char*>(operand.data) + at * added_length_ * added_bytes_;
    }
  }

  void FindKeyRows(i64 start, Range valid, i32* to) const {
    const AttentionParams& params = *pass_.params;
    const WorkItem& item = pass_.items[0];
    for (i64 t = valid.begin; t < valid.end; ++t) {
      const i64 position = start + t;
      if (params.page_size == 0) {
        to[t] = static_cast<i32>(item.kv_base + position);
      } else {
        const i64 page = params.page_indices[item.kv_base + position / params.page_size];
        to[t] = static_cast<i32>(page * params.page_size + position % params.page_size);
      }
    }
    for (i64 t = 0; t < valid.begin; ++t) to[t] = to[valid.begin];
    for (i64 t = valid.end; t < tile_kv_; ++t) to[t] = to[valid.begin];
  }

  // Finds a value from lane `begin` on, in the form that an operation of the running section takes.
  const i32* Find(i32 value, i64 begin, bool* is_vector) const {
    *is_vector = true;
    if (value == kRawScore) return raw_ + begin;
    if (value == kDistance) return distances_ + begin;
    if (value == kZeroDistance) return distances_ + diagonal_lanes_ + begin;
    if (value == kScoreScale) {
      *is_vector = false;
      return reinterpret_cast<const i32*>(natural_ + row_);
    }
    const i64 slot = c_->slot[value];
    switch (c_->home[value]) {
      case kRowHome:
        if (section_ == kRowHome) return rows_ + slot * row_lanes_ + begin;
        *is_vector = false;
        return rows_ + slot * row_lanes_ + RowOfSection();
      case kKeyHome:
        return keys_ + (2 + slot) * tile_kv_ + begin;
      case kDiagHome: {
        const i32* lanes = diagonals_ + head_ * diagonal_step_ + slot * diagonal_lanes_;
        return lanes + (section_ == kDiagHome ? 0 : tokens_ - 1 - token_) + begin;
      }
      default:
        return views_[slot] + begin;
    }
  }

  // The row whose values the running section reads.
  i64 RowOfSection() const {
    if (section_ == kLogitHome) return row_;
    if (section_ == kKeyHome) return 0;
    const i64 group = pass_.params->group_size;
    return head_ / group * pass_.rows + head_ % group;
  }

  void Run(CodeRange range, ValueHome section, i64 begin, i64 end) {
    section_ = section;
    for (i32 i = range.begin; i < range.end; ++i) {
      const CodeOp& op = c_->ops[i];
      bool of_value;
      const i32* to = section == kLogitHome ? logits_ + c_->slot[op.value] * tile_kv_ + begin
                                            : Find(op.value, begin, &of_value);
      RunOp(op, begin, end, const_cast<i32*>(to));
    }
  }

  // Writes the value of [begin, end) to `to`, or leaves it where an operand has it.
  void RunOp(const CodeOp& op, i64 begin, i64 end, i32* to) {
    const i64 n = end - begin;
    switch (op.op) {
      case kOpConst: {
        const i32 bits = op.type == kVariantBool ? -op.operand : op.operand;
        for (i64 j = 0; j < n; ++j) to[j] = bits;
        return;
      }
      case kOpDim: {
        const i32 length = pass_.params->variant_operands[op.operand].dims[op.args[0]];
        for (i64 j = 0; j < n; ++j) to[j] = length;
        return;
      }
      case kOpHead:
      case kOpKvHead:
      case kOpRequest:
      case kOpQPos:
      case kOpQRow:
      case kOpQLen:
      case kOpKvLen:
        memcpy(to, Fact(op.op) + begin, static_cast<size_t>(n) * 4);
        return;
      case kOpKvPos:
      case kOpKvRow:
        memcpy(to, keys_ + (op.op == kOpKvRow ? tile_kv_ : 0) + begin, static_cast<size_t>(n) * 4);
        return;
      default:
        break;
    }
    const i32* args[kMaxOperandRank] = {};
    bool is_vector[kMaxOperandRank] = {};
    for (i32 a = 0; a < op.num_args; ++a) args[a] = Find(op.args[a], begin, &is_vector[a]);
    if (op.op == kOpLoad) {
      Index indices[kMaxOperandRank];
      for (i32 a = 0; a < op.num_args; ++a) {
        const bool is_position = p_->instructions[op.args[a]].op == kOpKvPos;
        indices[a] = {args[a], is_vector[a], is_position && is_vector[a]};
      }
      const i32 type = p_->operands[op.operand].type;
      const VariantOperand& operand = pass_.params->variant_operands[op.operand];
      const i32* at =
          LoadOperand<Isa>(type, operand, op.num_args, indices, n, &last_[op.operand], to);
      if (section_ == kLogitHome && to != raw_ + begin) {
        views_[c_->slot[op.value]] = at - begin;
      } else if (at != to) {
        memcpy(to, at, static_cast<size_t>(n) * 4);
      }
      return;
    }
    const int vectors = is_vector[0] | is_vector[1] << 1 | is_vector[2] << 2;
    FindFn<Isa>(op, vectors)(to, args[0], args[1], args[2], n);
  }

  const VariantProgram* p_ = nullptr;
  const VariantCode* c_ = nullptr;
  size_t bytes_ = 0;
  i64 tile_kv_ = 0, row_lanes_ = 0, diagonal_lanes_ = 0, diagonal_step_ = 0;
  i32* facts_ = nullptr;          // [facts, row_lanes] facts of the rows
  float* natural_ = nullptr;      // [row_lanes] scales
  i32* mask_ = nullptr;           // [tile_kv]
  i32* rows_ = nullptr;           // [slots, row_lanes]
  i32* keys_ = nullptr;           // [2 + slots, tile_kv] kv_pos, kv_row, values
  i32* diagonals_ = nullptr;      // [heads or 1, slots, diagonal_lanes]
  i32* distances_ = nullptr;      // [2, diagonal_lanes] q_pos - kv_pos, zeros
  i32* logits_ = nullptr;         // [slots, tile_kv]
  const i32** views_ = nullptr;   // [slots] where each value of the logits is
  const char** added_ = nullptr;  // [row_lanes] see FindAddedRows
  i32 added_type_ = 0;
  i64 added_bytes_ = 0, added_length_ = 0;  // of one element; keys of one row

  VariantRows pass_ = {};
  float* const* d_operands_ = nullptr;
  bool is_masked_ = true, hides_ = true;
  i64 num_rows_ = 0, lanes_ = 0, tokens_ = 0, start_ = 0;
  ValueHome section_ = kNoHome;
  i64 row_ = 0, token_ = 0, head_ = 0;
  i32* raw_ = nullptr;
  intptr_t last_[kMaxVariantOperands] = {};  // of one operand: see LoadElements
};

}  // namespace
}  // namespace jax_attn
