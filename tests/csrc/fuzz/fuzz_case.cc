#include "fuzz/fuzz_case.h"

#include <algorithm>
#include <cstdarg>
#include <sstream>

#include "plan/check.h"
#include "select/select.h"
#include "variant/variant_programs.h"

namespace jax_attn::fuzz {
namespace {

constexpr int64_t kLimit = int64_t{1} << 30;

template <typename T>
T Pick(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}
int64_t PickNumber(Random& random, std::initializer_list<int64_t> values) {
  return Pick<int64_t>(random, values);
}
bool OneIn(Random& random, int n) { return random() % n == 0; }
int64_t Below(Random& random, int64_t n) { return static_cast<int64_t>(random() % n); }

int32_t Wrap(int64_t x) { return static_cast<int32_t>(static_cast<uint32_t>(x)); }

// A number at a border of its range, or any number.
int64_t Border(Random& random) {
  const int64_t at = PickNumber(random, {0, 1, 2, 16, 127, 128, 1 << 20, kLimit / 2, kLimit,
                                         kLimit + kLimit / 2, 2 * kLimit - 1});
  const int64_t x = at + Below(random, 5) - 2;
  return std::clamp<int64_t>(OneIn(random, 3) ? -x : x, -2 * kLimit, 2 * kLimit - 1);
}

// CUDA copies quantized values in vectors of 16 bytes: makes pages whole vectors, or drops the
// format.
void SettleCodesOnCuda(AttentionSpec* spec) {
  if (spec->dtype == kF32) spec->dtype = kBF16;
  spec->head_dim_qk = std::max<int64_t>(spec->head_dim_qk, 16);
  spec->head_dim_vo = std::max<int64_t>(spec->head_dim_vo, 16);
  if (spec->paged() && spec->page_size % 16 != 0) spec->page_size = 16;
}

AttentionSpec RandomSpec(Random& random) {
  AttentionSpec spec;
  spec.num_kv_heads = PickNumber(random, {1, 1, 2, 3, 4, 8});
  spec.num_qo_heads = spec.num_kv_heads * PickNumber(random, {1, 1, 2, 4, 5, 7, 16});
  spec.head_dim_qk = PickNumber(random, {8, 64, 128, 256});
  spec.head_dim_vo = OneIn(random, 4) ? 64 : spec.head_dim_qk;
  spec.dtype = Pick<int64_t>(random, {kBF16, kF16, kF32});
  spec.arch = PickNumber(random, {0, 0, 80, 90, 90, 120});
  if (OneIn(random, 6) && spec.dtype != kF32) {
    spec.kv_format = kE4m3Format;
    spec.q_format = OneIn(random, 2) ? kE4m3Format : kPlainFormat;
    spec.head_dim_qk = spec.head_dim_vo = 128;
  } else if (OneIn(random, 8) && (spec.dtype != kF32 || spec.arch == 0)) {
    spec.mla = 1;
    spec.num_kv_heads = 1;
    spec.num_qo_heads = PickNumber(random, {1, 16, 64, 128});
    spec.head_dim_qk = 576;
    spec.head_dim_vo = 512;
    SettleHeadBlocks(&spec);
    if (OneIn(random, 3)) spec.kv_format = PickNumber(random, {kE4m3Format, kE5m2Format});
  }
  spec.window_left =
      PickNumber(random, {-1, -1, -1, 0, 1, 63, 300, 5000, kLimit - 1, kLimit, 2 * kLimit - 1});
  spec.window_right =
      PickNumber(random, {0, 0, -1, -1, 1, 40, 5000, kLimit - 1, kLimit, 2 * kLimit - 1});
  spec.page_size = PickNumber(
      random, {0, 0, 1, 3, 16, 16, 64, 1000, 1 << 20, kLimit - 1, kLimit, 2 * kLimit - 1});
  spec.num_pages = PickNumber(random, {-1, -1, 1, 100, 1 << 20, 2 * kLimit - 1});
  if (!spec.paged()) spec.num_pages = -1;
  spec.schedule = Pick<int64_t>(random, {kBalanced, kBalanced, kAuto, kFixedSplit, kNoSplit});
  spec.share_prefixes = spec.paged() && spec.schedule != kNoSplit && OneIn(random, 2);
  if (OneIn(random, 6) && !spec.quantized() && !spec.mla) {
    spec.kv_format = PickNumber(
        random, {kE4m3Format, kE5m2Format, kInt8Format, kMxfp4Format, kNvfp4Format, kInt4Format});
    if (!spec.paged()) spec.kv_format = std::min<int64_t>(spec.kv_format, kE5m2Format);
    if (spec.arch != 0) SettleCodesOnCuda(&spec);
  }
  spec.fresh_kv = spec.paged() && !spec.mla && spec.q_format == kPlainFormat && OneIn(random, 4);
  spec.eight_bit_products =
      OneIn(random, 2) && (spec.arch == 0 ? spec.kv_format == kInt8Format
                                          : spec.arch == 90 && spec.kv_format == kE4m3Format &&
                                                !spec.fresh_kv && spec.head_dim_vo <= 192);
  spec.num_processors = PickNumber(random, {1, 1, 2, 3, 7, 16, 132});
  if (spec.schedule == kFixedSplit) {
    const int64_t step = SelectAttention(spec).tile_kv;
    spec.kv_split = step * PickNumber(random, {1, 2, 3, 8, 1000});
    if (OneIn(random, 3)) {
      spec.kv_split =
          (PickNumber(random, {kLimit / 2, kLimit, kLimit + step, 2 * kLimit - 1}) / step) * step;
    }
  }
  return spec;
}

struct Lengths {
  int64_t qo_len, kv_len;
};

std::vector<Lengths> RandomLengths(const AttentionSpec& spec, Random& random) {
  const int64_t batch_size = PickNumber(random, {0, 1, 1, 2, 2, 3, 5, 9, 24});
  // Pages are listed, so long requests must have long pages; ragged rows end below 2^31.
  int64_t most = spec.paged() ? std::min(kLimit - 1, spec.page_size * 300) : kLimit - 1;
  if (!spec.paged() && batch_size > 1) most = 2 * (kLimit - 1) / batch_size;
  const int64_t kind = Below(random, 5), longest = PickNumber(random, {1, 20, 300, 5000, 60000});
  const bool long_queries = OneIn(random, 50);
  std::vector<Lengths> lengths;
  for (int64_t r = 0; r < batch_size; ++r) {
    Lengths l;
    l.kv_len = Below(random, longest + 1);
    if (kind == 1 || (kind == 2 && OneIn(random, 2))) l.kv_len = most - Below(random, 3);
    if (kind == 3) l.kv_len = PickNumber(random, {0, 1, most, most / 2, 1 << 26, 1 << 28});
    l.kv_len = std::clamp<int64_t>(l.kv_len, 0, most);
    l.qo_len = PickNumber(random, {0, 1, 1, 1, 1, 2, 7, 63, 64, 65, 129, 300});
    if (spec.share_prefixes && kind < 3) {  // enough sharing that it pays
      l.qo_len = PickNumber(random, {0, 1, 1, 1, 1, 1, 2, 7});
      l.kv_len = std::min(most, most / 2 + Below(random, most / 2 + 1));
    }
    if (long_queries) l.qo_len = Below(random, 10000);
    lengths.push_back(l);
  }
  return lengths;
}

void AddRequests(const std::vector<Lengths>& lengths, Random& random, Case* c) {
  const AttentionSpec& spec = c->spec;
  const int64_t page = std::max<int64_t>(1, spec.page_size);
  int64_t kv_rows = 0;
  for (const Lengths& l : lengths) kv_rows += spec.paged() ? 0 : l.kv_len;
  // Ragged rows may begin anywhere.
  const int64_t first_row = 2 * kLimit - 1 - kv_rows - 2 * static_cast<int64_t>(lengths.size());
  c->kv_indptr[0] = !spec.paged() && OneIn(random, 4) && first_row > 0
                        ? static_cast<int32_t>(first_row)
                        : static_cast<int32_t>(Below(random, 3));
  const int64_t limit = spec.num_pages < 0 ? 2 * kLimit : spec.num_pages;
  const bool shares = spec.share_prefixes || OneIn(random, 8);
  const int64_t group = PickNumber(random, {2, 3, 100});
  if (spec.paged()) c->page_indices.assign(c->kv_indptr[0], -5);
  for (size_t r = 0; r < lengths.size(); ++r) {
    const Lengths& l = lengths[r];
    const int64_t spare = Below(random, 3), used = (l.kv_len + page - 1) / page;
    const int64_t same = OneIn(random, 2) ? used : Below(random, used + 1);
    const int64_t common = shares && r % group > 0 ? same : 0;
    const int64_t before = r == 0 ? 0 : c->kv_indptr[r - 1];
    const int64_t before_end = c->kv_indptr[r];
    for (int64_t i = 0; i < used + spare && spec.paged(); ++i) {
      int64_t id = OneIn(random, 50) ? limit - 1 : Below(random, std::min<int64_t>(limit, 1 << 20));
      if (i < common && before + i < before_end) id = c->page_indices[before + i];
      if (i >= used) id = Border(random);
      c->page_indices.push_back(Wrap(id));
    }
    c->qo_indptr.push_back(static_cast<int32_t>(c->qo_indptr.back() + l.qo_len));
    c->kv_lens.push_back(static_cast<int32_t>(l.kv_len));
    c->kv_indptr.push_back(static_cast<int32_t>(c->kv_indptr.back() + used + spare));
  }
  for (int64_t i = Below(random, 4); i > 0 && spec.paged(); --i) c->page_indices.push_back(-9);
}

void AddOffsets(Random& random, Case* c) {
  for (int64_t r = 0; r < c->batch_size(); ++r) {
    const int64_t qo_len = c->qo_indptr[r + 1] - c->qo_indptr[r];
    const int64_t first = PickNumber(
        random, {c->kv_lens[r] - qo_len, -kLimit + 1, kLimit - qo_len, -qo_len, c->kv_lens[r], 0});
    c->q_offsets.push_back(Wrap(std::clamp(first, -kLimit + 1, kLimit - qo_len)));
  }
}

// Nested prefixes that consecutive requests have in common, or anything.
void AddLevels(Random& random, Case* c) {
  const int64_t batch = c->batch_size();
  c->told = true;
  c->num_levels = static_cast<int32_t>(PickNumber(random, {0, 1, 1, 2, 3, 8}));
  c->num_prefixes = static_cast<int32_t>(PickNumber(random, {1, 1, 2, 3, 9}));
  if (c->num_levels == 0) c->num_prefixes = 0;
  std::vector<int32_t> borders = {0, static_cast<int32_t>(batch)};
  for (int32_t level = 0; level < c->num_levels; ++level) {
    while (static_cast<int32_t>(borders.size()) < c->num_prefixes + 1 && OneIn(random, 2)) {
      borders.push_back(static_cast<int32_t>(Below(random, batch + 1)));
    }
    std::sort(borders.begin(), borders.end());
    std::vector<int32_t> padded = borders;
    padded.resize(c->num_prefixes + 1, static_cast<int32_t>(batch));
    c->request_indptr.insert(c->request_indptr.end(), padded.begin(), padded.end());
    for (int32_t i = 0; i < c->num_prefixes; ++i) {
      int64_t len = kLimit - 1;
      for (int32_t r = padded[i]; r < padded[i + 1]; ++r) {
        len = std::min<int64_t>(len, c->kv_lens[r]);
        if (r == padded[i]) continue;
        const auto page = [&](int32_t of, int64_t p) {
          return c->page_indices[c->kv_indptr[of] + p];
        };
        int64_t same = 0;
        while (same * c->spec.page_size < len && page(r, same) == page(r - 1, same)) ++same;
        len = std::min(len, same * c->spec.page_size);
      }
      if (OneIn(random, 20)) len += Below(random, 3) - 1;
      c->prefix_lens.push_back(Wrap(len));
    }
  }
}

// Breaks the case, at a random place, so that planners should refuse it.
void Spoil(Random& random, Case* c) {
  std::vector<std::vector<int32_t>*> arrays = {&c->qo_indptr, &c->kv_lens, &c->kv_indptr};
  for (auto* array : {&c->page_indices, &c->q_offsets, &c->request_indptr, &c->prefix_lens}) {
    if (!array->empty()) arrays.push_back(array);
  }
  for (int64_t n = 1 + Below(random, 3); n > 0; --n) {
    std::vector<int32_t>& array = *arrays[random() % arrays.size()];
    if (array.empty()) continue;
    int32_t& x = array[random() % array.size()];
    x = Wrap(OneIn(random, 2)   ? x + Border(random)
             : OneIn(random, 8) ? static_cast<int64_t>(random())
                                : Border(random));
  }
  if (OneIn(random, 8)) c->page_indices.resize(Below(random, c->page_indices.size() + 1));
}

void SettleCapacities(Random& random, Case* c) {
  AttentionSpec& spec = c->spec;
  const int64_t tokens = std::max<int64_t>(1, c->qo_indptr.back());
  const int64_t kv = std::max<int64_t>(0, c->kv_indptr.back());
  spec.max_batch = std::max<int64_t>(1, c->batch_size() + Below(random, 3) - OneIn(random, 40));
  spec.max_qo_tokens = std::min<int64_t>(tokens, 1 << 20) + Below(random, 3);
  if (OneIn(random, 40)) spec.max_qo_tokens = std::max<int64_t>(1, spec.max_qo_tokens - 2);
  if (spec.paged()) {
    spec.max_kv_pages = std::min<int64_t>(kv, 1 << 16) + Below(random, 3);
  } else {
    spec.max_kv_tokens = std::min(kv + Below(random, 3), 2 * kLimit - 1);
  }
  if (OneIn(random, 3)) c->num_ctas = PickNumber(random, {1, 1, 2, 2, 3, 13, 24, 64, 352});
  if (OneIn(random, 6)) c->max_items = 1 + Below(random, OneIn(random, 2) ? 20 : 2000);
  if (OneIn(random, 8)) c->max_partial_rows = 1 + Below(random, 5000);
  if (spec.schedule == kFixedSplit) {  // its default depends on the kv capacity
    c->max_items = 1 + Below(random, 3000);
    c->max_partial_rows = 1 + Below(random, 2000000);
    if (OneIn(random, 2)) c->max_partial_rows = 2 * kLimit - 1;
  }
  // More query tokens than any plan of a test can have items for.
  if (OneIn(random, 100)) {
    spec.max_qo_tokens = 2 * kLimit - 1;
    c->max_items = 1 + Below(random, 3000);
    c->qo_indptr.back() = Wrap(PickNumber(random, {2 * kLimit - 1, kLimit, kLimit - 1, 1 << 24}));
  }
}

// Whether plans with step lists may share prefixes.
bool SharesLists(const AttentionSpec& spec) { return spec.balances(); }

// Adds a block map for step lists, dense or sparse; now and then with too few rows, columns or
// steps (capacity).
void AddMap(Random& random, Case* c) {
  AttentionSpec& spec = c->spec;
  if (!SharesLists(spec)) spec.share_prefixes = 0;
  c->q_block = static_cast<int32_t>(PickNumber(random, {1, 7, 16, 64, 128, 1000}));
  c->kv_block = static_cast<int32_t>(PickNumber(random, {16, 33, 64, 128, 1000}));
  const int64_t longest =
      c->kv_lens.empty() ? 0 : *std::max_element(c->kv_lens.begin(), c->kv_lens.end());
  c->map_columns = (longest + c->kv_block - 1) / c->kv_block + Below(random, 2);
  if (OneIn(random, 20)) c->map_columns = Below(random, c->map_columns + 1);
  int64_t rows = (spec.max_qo_tokens + c->q_block - 1) / c->q_block + Below(random, 2);
  if (OneIn(random, 20)) rows = Below(random, rows + 1);
  const int sparsity = static_cast<int>(PickNumber(random, {1, 2, 5, 100}));
  // The leading columns that all queries see.
  const int64_t seen = spec.share_prefixes ? c->map_columns - Below(random, 5) : 0;
  for (int64_t i = 0; i < rows * c->map_columns; ++i) {
    const uint8_t some = OneIn(random, 2) ? kSomeVisible : kSomeVisible | kSomeHidden;
    const bool is_seen = i % c->map_columns < seen && !OneIn(random, 1000);
    c->map_classes.push_back(is_seen                   ? uint8_t{kSomeVisible}
                             : OneIn(random, sparsity) ? some
                                                       : uint8_t{kSomeHidden});
  }
  spec.max_steps = PickNumber(random, {1, 30, 3000, 3000, 3000});
}

Case SmallCase(Random& random);

}  // namespace

PlanInputs Case::inputs() const {
  PlanInputs in = {};
  in.qo_indptr = qo_indptr.data();
  in.kv_lens = kv_lens.data();
  in.kv_indptr = kv_indptr.data();
  in.page_indices = page_indices.data();
  in.q_offsets = q_offsets.empty() ? nullptr : q_offsets.data();
  in.batch_size = batch_size();
  in.num_page_indices = static_cast<i64>(page_indices.size());
  return in;
}

PrefixLevels Case::levels() const {
  return {request_indptr.data(), prefix_lens.data(), num_levels, num_prefixes};
}

BlockMap Case::map() const {
  const auto num_classes = static_cast<int64_t>(map_classes.size());
  return {map_classes.data(), map_columns > 0 ? num_classes / map_columns : 0, map_columns, q_block,
          kv_block};
}

Status PlanOf(const Case& c, const AttentionProblem& problem, int32_t* plan) {
  const PrefixLevels levels = c.levels();
  const BlockMap map = c.map();
  return Plan(problem, c.inputs(), c.told ? &levels : nullptr, plan,
              c.spec.max_steps > 0 ? &map : nullptr);
}

std::string Text(const char* format, ...) {
  char text[1000];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

AttentionProblem MakeProblem(const Case& c) {
  AttentionProblem problem;
  problem.spec = c.spec;
  problem.config = SelectAttention(c.spec);
  if (c.num_ctas > 0) problem.config.num_ctas = c.num_ctas;
  problem.config.max_items = c.max_items;
  problem.config.max_partial_rows = c.max_partial_rows;
  FillCapacities(&problem);
  if (!DecodeProgram(c.program.data(), c.program.size(), &problem.program).ok()) std::abort();
  return problem;
}

Case MakeCase(bool is_damaged, uint64_t seed, uint64_t index) {
  std::seed_seq mixed = {seed, seed >> 32, index, index >> 32, uint64_t{is_damaged}};
  Random random(mixed);
  if (is_damaged) return SmallCase(random);
  Case c;
  c.spec = RandomSpec(random);
  const bool listed = OneIn(random, 8);
  if (listed && !c.spec.mla && OneIn(random, 4)) {  // most other cases have nothing to share
    c.spec.kv_split = 0;
    c.spec.page_size = PickNumber(random, {1, 16, 64});
    c.spec.schedule = Pick<int64_t>(random, {kBalanced, kAuto});
    c.spec.share_prefixes = 1;
  }
  if (listed && !SharesLists(c.spec)) c.spec.share_prefixes = 0;
  std::vector<Lengths> lengths = RandomLengths(c.spec, random);
  for (Lengths& l : lengths) {  // few enough steps to check each, for every token
    if (!listed) continue;
    // With shared prefixes lengths stay similar, so that sharing pays.
    const int64_t kv_len = c.spec.share_prefixes ? std::min<int64_t>(l.kv_len, 3000) : l.kv_len;
    l = {l.qo_len % 301, kv_len % 3001};
  }
  AddRequests(lengths, random, &c);
  if (OneIn(random, 3)) AddOffsets(random, &c);
  if (c.spec.share_prefixes && OneIn(random, 2)) AddLevels(random, &c);
  SettleCapacities(random, &c);
  if (listed && c.spec.max_qo_tokens < 1 << 20) AddMap(random, &c);
  if (OneIn(random, 4)) Spoil(random, &c);
  if (OneIn(random, c.spec.max_steps > 0 ? 4 : 100)) c.device_seed = Below(random, 1 << 30);
  return c;
}

// ---- text

std::string ToText(const Case& c) {
  std::ostringstream out;
  out << "part " << (c.is_damaged ? "damaged" : "batches") << "\n";
  AttentionSpec spec = c.spec, plain;
  std::vector<std::string> values;
  VisitFields(plain, [&](const char*, auto& field) { values.push_back(std::to_string(field)); });
  size_t i = 0;
  VisitFields(spec, [&](const char* name, auto& field) {
    const std::string value = std::to_string(field);
    if (value != values[i++]) out << "spec." << name << " " << value << "\n";
  });
  const auto number = [&](const char* name, int64_t value, int64_t usual) {
    if (value != usual) out << name << " " << value << "\n";
  };
  number("num_ctas", c.num_ctas, 0);
  number("max_items", c.max_items, 0);
  number("max_partial_rows", c.max_partial_rows, 0);
  number("device_seed", c.device_seed, -1);
  number("told", c.told, 0);
  number("q_block", c.q_block, 0);
  number("kv_block", c.kv_block, 0);
  number("map_columns", c.map_columns, 0);
  number("num_levels", c.num_levels, 0);
  number("num_prefixes", c.num_prefixes, 0);
  const auto list = [&](const char* name, const auto& values) {
    if (values.empty()) return;
    out << name;
    for (const int64_t x : values) out << " " << x;
    out << "\n";
  };
  list("qo_indptr", c.qo_indptr);
  list("kv_lens", c.kv_lens);
  list("kv_indptr", c.kv_indptr);
  list("page_indices", c.page_indices);
  list("q_offsets", c.q_offsets);
  list("request_indptr", c.request_indptr);
  list("prefix_lens", c.prefix_lens);
  list("map_classes", c.map_classes);
  list("program", c.program);
  for (const auto& [word, value] : c.words) out << "word " << word << " " << value << "\n";
  if (!c.expect.empty()) out << "expect " << c.expect << "\n";
  return out.str();
}

bool FromText(const std::string& text, Case* c) {
  *c = {};
  c->qo_indptr.clear();
  c->kv_indptr.clear();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream in(line);
    std::string name;
    if (line.empty() || line[0] == '#' || !(in >> name)) continue;
    bool known = false;
    VisitFields(c->spec, [&](const char* field_name, auto& field) {
      if (name == std::string("spec.") + field_name) known = static_cast<bool>(in >> field);
    });
    const auto number = [&](const char* field_name, auto* field) {
      if (name == field_name) known = static_cast<bool>(in >> *field);
    };
    number("num_ctas", &c->num_ctas);
    number("max_items", &c->max_items);
    number("max_partial_rows", &c->max_partial_rows);
    number("device_seed", &c->device_seed);
    number("told", &c->told);
    number("q_block", &c->q_block);
    number("kv_block", &c->kv_block);
    number("map_columns", &c->map_columns);
    number("num_levels", &c->num_levels);
    number("num_prefixes", &c->num_prefixes);
    const auto list = [&](const char* field_name, auto* field) {
      if (name != field_name) return;
      known = true;
      using Element = typename std::remove_pointer_t<decltype(field)>::value_type;
      for (int64_t x; in >> x;) field->push_back(static_cast<Element>(x));
    };
    list("qo_indptr", &c->qo_indptr);
    list("kv_lens", &c->kv_lens);
    list("kv_indptr", &c->kv_indptr);
    list("page_indices", &c->page_indices);
    list("q_offsets", &c->q_offsets);
    list("request_indptr", &c->request_indptr);
    list("prefix_lens", &c->prefix_lens);
    list("map_classes", &c->map_classes);
    list("program", &c->program);
    if (name == "part") {
      std::string part;
      known = in >> part && (part == "damaged" || part == "batches");
      c->is_damaged = part == "damaged";
    }
    if (name == "expect") known = static_cast<bool>(std::getline(in >> std::ws, c->expect));
    if (name == "word") {
      std::pair<int64_t, int32_t> word;
      known = static_cast<bool>(in >> word.first >> word.second);
      c->words.push_back(word);
    }
    if (!known) return false;
  }
  const size_t n = c->kv_lens.size();
  VariantProgram program;
  if (!DecodeProgram(c->program.data(), c->program.size(), &program).ok()) return false;
  return c->qo_indptr.size() == n + 1 && c->kv_indptr.size() == n + 1 &&
         (c->q_offsets.empty() || c->q_offsets.size() == n) &&
         c->request_indptr.size() == static_cast<size_t>(c->num_levels) * (c->num_prefixes + 1) &&
         c->prefix_lens.size() == static_cast<size_t>(c->num_levels) * c->num_prefixes;
}

// ---- smaller cases

namespace {

void RemoveRequest(size_t r, Case* c) {
  const int64_t qo_len = int64_t{c->qo_indptr[r + 1]} - c->qo_indptr[r];
  const int64_t kv_begin = c->kv_indptr[r], kv_end = c->kv_indptr[r + 1];
  for (size_t i = r + 1; i < c->qo_indptr.size(); ++i) {
    c->qo_indptr[i] = Wrap(c->qo_indptr[i] - qo_len);
    c->kv_indptr[i] = Wrap(c->kv_indptr[i] - (kv_end - kv_begin));
  }
  c->qo_indptr.erase(c->qo_indptr.begin() + r + 1);
  c->kv_indptr.erase(c->kv_indptr.begin() + r + 1);
  c->kv_lens.erase(c->kv_lens.begin() + r);
  if (!c->q_offsets.empty()) c->q_offsets.erase(c->q_offsets.begin() + r);
  if (kv_begin >= 0 && kv_begin <= kv_end &&
      kv_end <= static_cast<int64_t>(c->page_indices.size())) {
    c->page_indices.erase(c->page_indices.begin() + kv_begin, c->page_indices.begin() + kv_end);
  }
  for (int32_t& border : c->request_indptr) border -= border > static_cast<int32_t>(r);
}

}  // namespace

std::vector<Case> Smaller(const Case& c) {
  std::vector<Case> cases;
  const auto add = [&](auto change) {
    Case smaller = c;
    change(&smaller);
    if (ToText(smaller) != ToText(c)) cases.push_back(std::move(smaller));
  };
  for (size_t n = c.words.size() / 2; n > 0; n /= 2) {
    for (size_t i = 0; i + n <= c.words.size(); i += n) {
      add([&](Case* s) { s->words.erase(s->words.begin() + i, s->words.begin() + i + n); });
    }
  }
  if (c.is_damaged) {  // the words belong to this very plan
    for (size_t i = 0; i < c.words.size(); ++i) {
      for (int32_t value : {0, 1, -1, c.words[i].second / 2}) {
        add([&](Case* s) { s->words[i].second = value; });
      }
    }
    return cases;
  }
  for (size_t r = 0; r < c.kv_lens.size(); ++r) add([&](Case* s) { RemoveRequest(r, s); });
  add([](Case* s) { s->device_seed = -1; });
  add([](Case* s) {
    s->spec.max_steps = s->q_block = s->kv_block = 0;
    s->map_columns = 0;
    s->map_classes.clear();
  });
  add([](Case* s) { s->q_offsets.clear(); });
  add([](Case* s) {
    s->told = false;
    s->num_levels = s->num_prefixes = 0;
    s->request_indptr.clear();
    s->prefix_lens.clear();
  });
  for (auto field : {&Case::num_ctas, &Case::max_items, &Case::max_partial_rows}) {
    add([&](Case* s) { s->*field = 0; });
  }
  for (auto field : {&AttentionSpec::window_left, &AttentionSpec::window_right}) {
    add([&](Case* s) { s->spec.*field = -1; });
  }
  for (auto field : {&AttentionSpec::share_prefixes, &AttentionSpec::fresh_kv,
                     &AttentionSpec::eight_bit_products, &AttentionSpec::dtype,
                     &AttentionSpec::arch, &AttentionSpec::kv_format}) {
    add([&](Case* s) { s->spec.*field = 0; });
  }
  add([](Case* s) { s->spec.num_qo_heads = s->spec.num_kv_heads = 1; });
  add([](Case* s) { s->spec.num_qo_heads = s->spec.num_kv_heads; });
  add([](Case* s) { s->spec.num_processors = 1; });
  for (size_t r = 0; r < c.kv_lens.size(); ++r) {
    for (int64_t len : {int64_t{0}, int64_t{1}, int64_t{c.kv_lens[r]} / 2}) {
      if (len < c.kv_lens[r]) add([&](Case* s) { s->kv_lens[r] = static_cast<int32_t>(len); });
    }
    const int64_t qo_len = int64_t{c.qo_indptr[r + 1]} - c.qo_indptr[r];
    for (int64_t len : {int64_t{0}, int64_t{1}, qo_len / 2}) {
      if (len >= qo_len) continue;
      add([&](Case* s) {
        for (size_t i = r + 1; i < s->qo_indptr.size(); ++i) {
          s->qo_indptr[i] = Wrap(s->qo_indptr[i] - (qo_len - len));
        }
      });
    }
  }
  return cases;
}

namespace {

// A CPU plan, small enough to run, and some changes to its words. The words are chosen without
// RunDamaged's knowledge: any section, single words, groups, neighbours.
Case SmallCase(Random& random) {
  Case c;
  c.is_damaged = true;
  AttentionSpec& spec = c.spec;
  spec.num_kv_heads = PickNumber(random, {1, 1, 2, 3});
  spec.num_qo_heads = spec.num_kv_heads * PickNumber(random, {1, 1, 2, 4});
  spec.head_dim_qk = spec.head_dim_vo = PickNumber(random, {8, 8, 16});
  spec.dtype = Pick<int64_t>(random, {kF32, kF32, kBF16});
  spec.window_left = PickNumber(random, {-1, -1, 0, 20});
  spec.window_right = PickNumber(random, {0, 0, -1, 3});
  spec.page_size = PickNumber(random, {0, 1, 4, 16, 16, 16});
  spec.num_pages = spec.paged() && OneIn(random, 2) ? kPoolPages : -1;
  spec.schedule = Pick<int64_t>(random, {kBalanced, kBalanced, kAuto, kFixedSplit, kNoSplit});
  spec.share_prefixes = spec.paged() && spec.schedule != kNoSplit && OneIn(random, 2);
  spec.fresh_kv = spec.paged() && OneIn(random, 4);
  if (OneIn(random, 4)) {
    spec.kv_format = PickNumber(
        random, {kE4m3Format, kE5m2Format, kInt8Format, kMxfp4Format, kNvfp4Format, kInt4Format});
    if (!spec.paged()) spec.kv_format = std::min<int64_t>(spec.kv_format, kE5m2Format);
  }
  if (OneIn(random, 4)) {
    const auto seed = static_cast<unsigned>(random() % 1000);
    const std::vector<NamedProgram> published = VariantPrograms();
    const VariantProgram program =
        OneIn(random, 2) ? RandomProgram(seed) : published[seed % published.size()].program;
    c.program = EncodeProgram(program);
    if (NeedsOwnRows(program)) spec.share_prefixes = 0;
  }
  spec.eight_bit_products = c.program.empty() && spec.kv_format == kInt8Format && OneIn(random, 2);
  spec.num_processors = PickNumber(random, {1, 2, 4});
  spec.sm_scale = 0.25;
  if (spec.schedule == kFixedSplit) spec.kv_split = SelectAttention(spec).tile_kv;
  std::vector<Lengths> lengths;
  const int64_t longest = PickNumber(random, {10, 100, 700});
  int64_t prefix = 0;
  for (int64_t n = Below(random, 5); n >= 0; --n) {
    const int64_t qo_len = PickNumber(random, {0, 1, 1, 1, 2, 9, 70});
    lengths.push_back({qo_len, qo_len + Below(random, longest)});
  }
  AddRequests(lengths, random, &c);
  for (int32_t& id : c.page_indices) id = id & (kPoolPages - 1);
  if (spec.share_prefixes) {
    prefix = Below(random, 1 + lengths[0].kv_len / spec.page_size);
    for (size_t r = 1; r < lengths.size(); ++r) {
      const int64_t used = (lengths[r].kv_len + spec.page_size - 1) / spec.page_size;
      for (int64_t i = 0; i < std::min(prefix, used); ++i) {
        c.page_indices[c.kv_indptr[r] + i] = c.page_indices[c.kv_indptr[0] + i];
      }
    }
  }
  spec.max_batch = c.batch_size() + Below(random, 2);
  spec.max_qo_tokens = std::max<int64_t>(1, c.qo_indptr.back() + Below(random, 2));
  if (spec.paged()) {
    spec.max_kv_pages = c.kv_indptr.back() + Below(random, 2);
  } else {  // rows that do not begin at 2^31
    const int32_t first = c.kv_indptr[0] > 5 ? c.kv_indptr[0] : 0;
    for (int32_t& x : c.kv_indptr) x -= first;
    spec.max_kv_tokens = c.kv_indptr.back() + Below(random, 2);
  }
  if (spec.schedule == kFixedSplit) {
    c.max_items = 3000;
    c.max_partial_rows = 10000;
  }

  if (OneIn(random, 4)) AddMap(random, &c);

  const AttentionProblem problem = MakeProblem(c);
  const PlanLayout layout = MakePlanLayout(problem);
  std::vector<int32_t> plan(layout.num_words);
  if (!PlanOf(c, problem, plan.data()).ok()) return c;
  PlanHeader header;
  std::copy_n(plan.data() + layout.header, sizeof(header) / 4, reinterpret_cast<int32_t*>(&header));
  // Live words of each section: nothing reads the words after them.
  const std::pair<int64_t, int64_t> sections[] = {
      {layout.header, sizeof(PlanHeader) / 4},
      {layout.queue_indptr, problem.config.num_ctas + 1},
      {layout.qo_indptr, header.batch_size + 1},
      {layout.kv_lens, header.batch_size},
      {layout.kv_indptr, header.batch_size + 1},
      {layout.merge_groups, header.num_merge_groups * 8},
      {layout.partial_rows, header.num_partials},
      {layout.qo_indices, header.num_shared_tokens},
      {layout.items, header.num_items * 12},
      {layout.items, header.num_items * 12},
      {layout.steps, header.num_steps},
      {layout.page_indices, spec.paged() ? header.nnz_kv : 0}};
  const auto some_word = [&]() -> int64_t {
    for (;;) {
      if (OneIn(random, 40)) return Below(random, layout.num_words);
      const auto& [begin, size] = sections[random() % std::size(sections)];
      if (size > 0) return begin + Below(random, size);
    }
  };
  const auto change = [&](int64_t word, int64_t value) { c.words.emplace_back(word, Wrap(value)); };
  for (int64_t n = PickNumber(random, {1, 1, 1, 2, 2, 3, 8}); n > 0; --n) {
    const int64_t word = some_word(), other = some_word();
    switch (random() % 8) {
      case 0:
      case 1:
        change(word, int64_t{plan[word]} + PickNumber(random, {-1, 1}));
        break;
      case 2:
        change(word, int64_t{plan[word]} ^ int64_t{1} << (random() % 32));
        break;
      case 3:
        change(word, Border(random));
        break;
      case 4:  // the same field of a neighbour, as if records were mixed up
        for (int64_t stride : {1, 8, 12}) {
          if (word + stride < layout.num_words && OneIn(random, 2)) {
            change(word, plan[word + stride]);
          }
        }
        break;
      case 5:
        change(word, plan[other]);
        change(other, plan[word]);
        break;
      case 6:  // whole records are swapped
        if (header.num_items > 1) {
          const int64_t a = layout.items + 12 * Below(random, header.num_items);
          const int64_t b = layout.items + 12 * Below(random, header.num_items);
          for (int64_t i = 0; i < 12; ++i) {
            change(a + i, plan[b + i]);
            change(b + i, plan[a + i]);
          }
        }
        break;
      default:
        change(word, 0);
    }
  }
  return c;
}

}  // namespace

}  // namespace jax_attn::fuzz
