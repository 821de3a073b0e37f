#include "variant/transform_words.h"

#include <string>

namespace jax_attn {
namespace {

i32 LoadedType(i32 operand_type) {
  if (operand_type == kOperandBool) return kVariantBool;
  return operand_type == kOperandI32 || operand_type == kOperandU8 ? kVariantI32 : kVariantF32;
}

class Reader {
 public:
  Reader(const int64_t* words, size_t num_words, const ProgramOperand* operands, i32 num_operands,
         Transform* transform)
      : words_(words),
        num_words_(num_words),
        operands_(operands),
        num_operands_(num_operands),
        t_(*transform) {}

  Status Read() {
    i32 version, num_lines, num_results, num_pool;
    JAX_ATTN_RETURN_IF_ERROR(Take("version", kTransformVersion, kTransformVersion, &version));
    JAX_ATTN_RETURN_IF_ERROR(Take("elements of a vector", 1, kMaxTransformLanes, &t_.dim));
    JAX_ATTN_RETURN_IF_ERROR(Take("number of values", 1, kMaxTransformValues, &num_lines));
    JAX_ATTN_RETURN_IF_ERROR(Take("number of results", 1, kMaxTransformResults, &num_results));
    JAX_ATTN_RETURN_IF_ERROR(Take("number of constants", 0, kMaxTransformPool, &num_pool));
    const size_t expected = 5 + static_cast<size_t>(num_lines) * (5 + 3 * kMaxTransformArgs) +
                            3 * static_cast<size_t>(num_results) + static_cast<size_t>(num_pool);
    if (num_words_ != expected) {
      return Refuse("words", std::to_string(expected), static_cast<int64_t>(num_words_));
    }
    const int64_t* pool = words_ + expected - num_pool;
    for (i32 i = 0; i < num_pool; ++i) {
      if (pool[i] < INT32_MIN || pool[i] > INT32_MAX) return Refuse("constant", "32 bits", pool[i]);
      t_.pool.push_back(static_cast<i32>(pool[i]));
    }
    for (i32 i = 0; i < num_lines; ++i) JAX_ATTN_RETURN_IF_ERROR(ReadLine(i));
    int64_t lanes = 0;
    for (i32 i = 0; i < num_results; ++i) {
      TransformLanes result;
      JAX_ATTN_RETURN_IF_ERROR(ReadLanes("result", num_lines, &result));
      JAX_ATTN_RETURN_IF_ERROR(CheckType("result", t_.lines[result.value].type, kVariantF32));
      t_.results.push_back(result);
      lanes += result.length;
    }
    if (lanes != t_.dim) return Refuse("result", std::to_string(t_.dim) + " elements", lanes);
    return Status::Ok();
  }

 private:
  static Status Refuse(const std::string& what, const std::string& expected, int64_t got) {
    return Status::Error("transform: " + what + ": expected " + expected + ", got " +
                         std::to_string(got) + ".");
  }

  Status Take(const std::string& what, int64_t least, int64_t most, i32* to) {
    if (at_ >= num_words_) {
      return Refuse("words", "at least " + std::to_string(at_ + 1),
                    static_cast<int64_t>(num_words_));
    }
    const int64_t word = words_[at_++];
    if (word < least || word > most) {
      return Refuse(what, std::to_string(least) + " to " + std::to_string(most), word);
    }
    *to = static_cast<i32>(word);
    return Status::Ok();
  }

  // Lanes of one of the first num_values values.
  Status ReadLanes(const std::string& name, i32 num_values, TransformLanes* to) {
    JAX_ATTN_RETURN_IF_ERROR(Take(name + ": value before it", 0, num_values - 1, &to->value));
    const i32 length = t_.lines[to->value].length;
    JAX_ATTN_RETURN_IF_ERROR(Take(name + ": first lane", 0, length - 1, &to->offset));
    return Take(name + ": lanes", 1, length - to->offset, &to->length);
  }

  Status ReadLine(i32 i) {
    const std::string name = "value " + std::to_string(i);
    TransformLine x = {};
    JAX_ATTN_RETURN_IF_ERROR(Take(name + ": operation", 0, kEndOfTransformOps - 1, &x.op));
    if (x.op >= kNumVariantOps && x.op < kFirstTransformOp) {
      return Refuse(name + ": operation", "one that exists", x.op);
    }
    JAX_ATTN_RETURN_IF_ERROR(Take(name + ": type", kVariantF32, kVariantBool, &x.type));
    JAX_ATTN_RETURN_IF_ERROR(Take(name + ": lanes", 1, kMaxTransformLanes, &x.length));
    JAX_ATTN_RETURN_IF_ERROR(Take(name + ": own", INT32_MIN, INT32_MAX, &x.own));
    JAX_ATTN_RETURN_IF_ERROR(
        Take(name + ": number of arguments", 0, kMaxTransformArgs, &x.num_args));
    for (i32 a = 0; a < kMaxTransformArgs; ++a) {
      if (a < x.num_args) {
        JAX_ATTN_RETURN_IF_ERROR(ReadLanes(name + ": argument", i, &x.args[a]));
        continue;
      }
      i32 zero;
      for (int word = 0; word < 3; ++word) {
        JAX_ATTN_RETURN_IF_ERROR(Take(name + ": what is no argument", 0, 0, &zero));
      }
    }
    JAX_ATTN_RETURN_IF_ERROR(x.op < kFirstTransformOp ? CheckElementwise(name, x)
                                                      : CheckVector(name, x));
    t_.lines.push_back(x);
    return Status::Ok();
  }

  i32 TypeOf(const TransformLanes& lanes) const { return t_.lines[lanes.value].type; }

  Status CheckArgs(const std::string& name, const TransformLine& x, i32 num) const {
    if (x.num_args == num) return Status::Ok();
    return Refuse(name + ": arguments", std::to_string(num), x.num_args);
  }

  Status CheckElementwise(const std::string& name, const TransformLine& x) const {
    for (i32 a = 0; a < x.num_args; ++a) {
      if (x.args[a].length != 1 && x.args[a].length != x.length) {
        return Refuse(name + ": lanes of an argument", "1 or " + std::to_string(x.length),
                      x.args[a].length);
      }
    }
    const VariantOpInfo& info = kVariantOps[x.op];
    switch (info.rule) {
      case kRuleConst:
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, 0));
        if (x.length != 1) return Refuse(name + ": lanes of a const", "1", x.length);
        if (x.type == kVariantBool && (x.own < 0 || x.own > 1)) {
          return Refuse(name, "a bool of 0 or 1", x.own);
        }
        return Status::Ok();
      case kRuleAt:
        if (x.op == kOpScore) return Refuse(name, "no score", x.op);
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, 0));
        if (x.length != 1) return Refuse(name + ": lanes of a fact", "1", x.length);
        return CheckType(name, x.type, kVariantI32);
      case kRuleDim:
        return Refuse(name, "no length of an operand", x.op);
      case kRuleLoad: {
        JAX_ATTN_RETURN_IF_ERROR(CheckOperand(name, x.own));
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, operands_[x.own].rank));
        if (x.num_args == 0 && x.length != 1) return Refuse(name + ": lanes", "1", x.length);
        for (i32 a = 0; a < x.num_args; ++a) {
          JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[a]), kVariantI32));
        }
        return CheckType(name, x.type, LoadedType(operands_[x.own].type));
      }
      default:
        break;
    }
    JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, info.num_args));
    const bool selects = info.rule == kRuleSelect;
    const i32 type = TypeOf(x.args[selects ? 1 : 0]);
    if ((info.types >> type & 1) == 0) return Refuse(name, "another type of argument", type);
    if (selects) JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[0]), kVariantBool));
    for (i32 a = selects ? 1 : 0; a < x.num_args; ++a) {
      JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[a]), type));
    }
    if (info.rule == kRuleCast) return Status::Ok();
    return CheckType(name, x.type, info.rule == kRuleCompare ? i32{kVariantBool} : type);
  }

  Status CheckVector(const std::string& name, const TransformLine& x) const {
    const auto in_pool = [&]() -> Status {
      if (x.own >= 0 && int64_t{x.own} + x.length <= static_cast<int64_t>(t_.pool.size())) {
        return Status::Ok();
      }
      return Refuse(name, "constants of the pool", x.own);
    };
    switch (x.op) {
      case kVectorX:
        if (x.own < 0 || int64_t{x.own} + x.length > t_.dim) {
          return Refuse(name + ": first element", "one of the vector", x.own);
        }
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, 0));
        return CheckType(name, x.type, kVariantF32);
      case kVectorIota:
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, 0));
        return CheckType(name, x.type, kVariantI32);
      case kVectorTable:
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, 0));
        JAX_ATTN_RETURN_IF_ERROR(in_pool());
        for (i32 i = 0; x.type == kVariantBool && i < x.length; ++i) {
          const i32 word = t_.pool[x.own + i];
          if (word < 0 || word > 1) return Refuse(name, "bools of 0 or 1", word);
        }
        return Status::Ok();
      case kVectorPick: {
        if (x.num_args == 0) return CheckArgs(name, x, 1);
        JAX_ATTN_RETURN_IF_ERROR(in_pool());
        i32 lanes = 0;
        for (i32 a = 0; a < x.num_args; ++a) {
          JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[a]), x.type));
          lanes += x.args[a].length;
        }
        for (i32 i = 0; i < x.length; ++i) {
          const i32 lane = t_.pool[x.own + i];
          if (lane < 0 || lane >= lanes) return Refuse(name, "lanes of its arguments", lane);
        }
        return Status::Ok();
      }
      case kVectorSum:
      case kVectorLargest:
      case kVectorSmallest:
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, 1));
        if (x.length != 1) return Refuse(name + ": lanes", "1", x.length);
        JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[0]), kVariantF32));
        return CheckType(name, x.type, kVariantF32);
      default: {  // products
        JAX_ATTN_RETURN_IF_ERROR(CheckOperand(name, x.own));
        const ProgramOperand& operand = operands_[x.own];
        if (operand.rank < 2) return Refuse(name + ": axes of a matrix", "2 or more", operand.rank);
        JAX_ATTN_RETURN_IF_ERROR(CheckType(name, LoadedType(operand.type), kVariantF32));
        JAX_ATTN_RETURN_IF_ERROR(CheckArgs(name, x, operand.rank - 1));
        JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[0]), kVariantF32));
        for (i32 a = 1; a < x.num_args; ++a) {
          JAX_ATTN_RETURN_IF_ERROR(CheckType(name, TypeOf(x.args[a]), kVariantI32));
          if (x.args[a].length != 1) return Refuse(name + ": index", "a scalar", x.args[a].length);
        }
        return CheckType(name, x.type, kVariantF32);
      }
    }
  }

  Status CheckOperand(const std::string& name, i32 operand) const {
    if (operand >= 0 && operand < num_operands_) return Status::Ok();
    return Refuse(name, "an operand below " + std::to_string(num_operands_), operand);
  }

  static Status CheckType(const std::string& name, i32 got, i32 expected) {
    if (got == expected) return Status::Ok();
    return Refuse(name, "type " + std::to_string(expected), got);
  }

  const int64_t* words_;
  const size_t num_words_;
  const ProgramOperand* operands_;
  const i32 num_operands_;
  size_t at_ = 0;
  Transform& t_;
};

}  // namespace

TransformView Transform::View(const VariantProgram& program) const {
  return {dim,
          static_cast<i32>(lines.size()),
          static_cast<i32>(results.size()),
          lines.data(),
          results.data(),
          pool.data(),
          program.operands};
}

Status DecodeTransform(const int64_t* words, size_t num_words, const ProgramOperand* operands,
                       i32 num_operands, Transform* transform) {
  *transform = Transform{};
  if (num_words == 0) return Status::Ok();
  Status s = Reader(words, num_words, operands, num_operands, transform).Read();
  if (!s.ok()) *transform = Transform{};
  return s;
}

std::vector<int64_t> EncodeTransform(const Transform& t) {
  if (!t.present()) return {};
  std::vector<int64_t> words = {kTransformVersion, t.dim, static_cast<int64_t>(t.lines.size()),
                                static_cast<int64_t>(t.results.size()),
                                static_cast<int64_t>(t.pool.size())};
  const auto append = [&](const TransformLanes& lanes) {
    words.insert(words.end(), {lanes.value, lanes.offset, lanes.length});
  };
  for (const TransformLine& x : t.lines) {
    words.insert(words.end(), {x.op, x.type, x.length, x.own, x.num_args});
    for (const TransformLanes& arg : x.args) append(arg);
  }
  for (const TransformLanes& result : t.results) append(result);
  words.insert(words.end(), t.pool.begin(), t.pool.end());
  return words;
}

bool NeedsOwnRows(const Transform& transform) {
  for (const TransformLine& x : transform.lines) {
    if (IsOfOwnRows(x.op)) return true;
  }
  return false;
}

}  // namespace jax_attn
