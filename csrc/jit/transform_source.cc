#include "jit/transform_source.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "jit/source_text.h"

namespace jax_attn {
namespace {

constexpr i32 kLanes = 32;  // of a warp

i32 RegistersOf(i32 length) { return (length + kLanes - 1) / kLanes; }

class Writer {
 public:
  Writer(const TransformView& transform, std::string name)
      : t_(transform), name_(std::move(name)) {}

  std::string Write() {
    std::ostringstream body;
    for (i32 i = 0; i < t_.num_lines; ++i) WriteLine(i, &body);
    WriteResult(&body);
    std::ostringstream out;
    WritePool(&out);
    out << "struct " << name_ << " {\n"
        << "  static constexpr bool kIsPresent = true;\n\n"
        << "  template <class Facts>\n"
        << "  __device__ __forceinline__ static void Run(const AttentionParams& p, const Facts& at,"
        << " int lane,\n      float (&x)[" << RegistersOf(t_.dim) << "]) {\n"
        << body.str() << "  }\n};\n";
    return out.str();
  }

 private:
  const TransformLine& At(i32 value) const { return t_.lines[value]; }

  void WritePool(std::ostringstream* out) const {
    i32 end = 0;
    for (i32 i = 0; i < t_.num_lines; ++i) {
      const TransformLine& x = At(i);
      if (x.op == kVectorTable || x.op == kVectorPick) end = std::max(end, x.own + x.length);
    }
    if (end == 0) return;
    *out << "__device__ const int " << name_ << "Pool[] = {";
    for (i32 i = 0; i < end; ++i) {
      *out << (i % 8 == 0 ? "\n    " : " ") << "static_cast<int>(" << HexText(t_.pool[i]) << "),";
    }
    *out << "\n};\n\n";
  }

  // The pool's entry for lanes from `first` on, where those from `end` on do not matter.
  std::string Entry(i32 first, i32 end) const {
    std::string index = "lane + " + std::to_string(first);
    if (first + kLanes > end) {
      index = "jax_attn::Min(" + index + ", " + std::to_string(end - 1) + ")";
    }
    return name_ + "Pool[" + index + "]";
  }

  static std::string Register(i32 value, i32 j) {
    return "v" + std::to_string(value) + "_" + std::to_string(j);
  }

  // Whether each use computes the value again.
  bool IsInline(const TransformLine& x) const {
    return x.op == kOpConst || x.op == kVectorIota || x.op == kVectorTable;
  }

  // Lanes [first, first + 32) of a value, in the lanes of a warp. first may be negative. Lanes
  // outside of the value do not matter.
  std::string FromLane(i32 value, i32 first) const {
    const TransformLine& x = At(value);
    if (x.op == kVectorIota) return "(lane + " + std::to_string(first) + ")";
    if (x.op == kVectorTable) {
      const std::string entry =
          first < 0
              ? name_ + "Pool[jax_attn::Max(jax_attn::Min(lane + " + std::to_string(first) + ", " +
                    std::to_string(x.length - 1) + "), 0) + " + std::to_string(x.own) + "]"
              : Entry(x.own + first, x.own + x.length);
      return x.type == kVariantF32    ? "F32(static_cast<u32>(" + entry + "))"
             : x.type == kVariantBool ? "(" + entry + " != 0)"
                                      : entry;
    }
    const i32 by = (first % kLanes + kLanes) % kLanes, low = (first - by) / kLanes;
    const i32 last = RegistersOf(x.length) - 1;
    const auto clamped = [&](i32 j) { return Register(value, std::clamp(j, 0, last)); };
    if (by == 0) return clamped(low);
    return "Shifted<" + std::to_string(by) + ">(" + clamped(low) + ", " + clamped(low + 1) +
           ", lane)";
  }

  // Register j of an argument.
  std::string Arg(const TransformLanes& lanes, i32 j) const {
    const TransformLine& x = At(lanes.value);
    if (lanes.length > 1) return FromLane(lanes.value, lanes.offset + j * kLanes);
    if (x.op == kOpConst) return ConstantText(x.type, x.own);
    if (x.op == kVectorIota) return std::to_string(lanes.offset);
    if (x.length == 1) return Register(lanes.value, 0);
    const std::string from = x.op == kVectorTable
                                 ? FromLane(lanes.value, lanes.offset / kLanes * kLanes)
                                 : Register(lanes.value, lanes.offset / kLanes);
    return "OfLane(" + from + ", " + std::to_string(lanes.offset % kLanes) + ")";
  }

  void WriteLine(i32 i, std::ostringstream* out) const {
    const TransformLine& x = At(i);
    if (IsInline(x)) return;
    for (i32 j = 0; j < RegistersOf(x.length); ++j) {
      if (x.op == kVectorPick) {
        WritePick(i, j, out);
        continue;
      }
      *out << "    const " << TypeText(x.type) << " " << Register(i, j) << " = " << Expression(x, j)
           << ";\n";
    }
  }

  std::string Expression(const TransformLine& x, i32 j) const {
    switch (x.op) {
      case kVectorX:
        return FromX(x.own + j * kLanes);
      case kVectorSum:
        return Reduction("SumOf", x.args[0]);
      case kVectorLargest:
        return Reduction("LargestOf", x.args[0]);
      case kVectorSmallest:
        return Reduction("SmallestOf", x.args[0]);
      default:
        break;
    }
    if (kVariantOps[x.op].rule == kRuleAt)
      return std::string("at.") + kVariantOps[x.op].word + "()";
    if (kVariantOps[x.op].rule == kRuleLoad) return LoadText(x, j);
    if (kVariantOps[x.op].rule == kRuleCast)
      return CastText(x.type) + "(" + Arg(x.args[0], j) + ")";
    std::string text = std::string(OpText(x.op)) + "(";
    for (i32 a = 0; a < x.num_args; ++a) text += (a > 0 ? ", " : "") + Arg(x.args[a], j);
    return text + ")";
  }

  // 32 elements of the row from `first` on.
  std::string FromX(i32 first) const {
    const i32 by = first % kLanes, low = first / kLanes;
    const i32 high = std::min(low + 1, RegistersOf(t_.dim) - 1);
    const std::string x = "x[" + std::to_string(low) + "]";
    if (by == 0) return x;
    return "Shifted<" + std::to_string(by) + ">(" + x + ", x[" + std::to_string(high) + "], lane)";
  }

  std::string Reduction(const std::string& op, const TransformLanes& lanes) const {
    std::string text;
    for (i32 j = 0; j < RegistersOf(lanes.length); ++j) {
      std::string own = Arg(lanes, j);
      const i32 left = lanes.length - j * kLanes;
      if (left < kLanes)
        own = "Counted<" + op + ">(" + own + ", lane < " + std::to_string(left) + ")";
      text = j == 0 ? own : op + "::Do(" + text + ", " + own + ")";
    }
    return "Reduced<" + op + ">(" + text + ")";
  }

  std::string LoadText(const TransformLine& x, i32 j) const {
    const std::string operand = std::to_string(x.own);
    const std::string element = ElementText(t_.operands[x.own].type);
    std::string offset;
    for (i32 a = 0; a < x.num_args; ++a) {
      const std::string index = std::to_string(a) + ", " + Arg(x.args[a], j) + ")";
      offset += a > 0 ? " + " : "";
      offset += a + 1 == x.num_args
                    ? "InLastAxis<" + operand + ">(p, " + index
                    : "InAxis<" + operand + ", " + std::to_string(x.num_args) + ">(p, " + index;
    }
    return "Load<" + element + ">(Elements<" + operand + ", " + element + ">(p, 0), " +
           (offset.empty() ? "0" : offset) + ")";
  }

  void WritePick(i32 i, i32 j, std::ostringstream* out) const {
    const TransformLine& x = At(i);
    const std::string to = Register(i, j), from = to + "_from";
    *out << "    const int " << from << " = " << Entry(x.own + j * kLanes, x.own + x.length)
         << ";\n    " << TypeText(x.type) << " " << to << " = " << Arg(x.args[0], 0) << ";\n";
    i32 begin = 0;
    for (i32 a = 0; a < x.num_args; ++a) {
      for (i32 r = 0; r < RegistersOf(x.args[a].length); ++r) {
        // The last register may reach into the places of the next argument, which then takes its
        // own.
        *out << "    " << to << " = Taken(" << to << ", " << Arg(x.args[a], r) << ", " << from
             << " - " << begin + r * kLanes << ");\n";
      }
      begin += x.args[a].length;
    }
  }

  void WriteResult(std::ostringstream* out) const {
    for (i32 j = 0; j < RegistersOf(t_.dim); ++j) {
      i32 begin = 0;
      std::string text;
      for (i32 r = 0; r < t_.num_results; ++r) {
        const TransformLanes& lanes = t_.results[r];
        const i32 end = begin + lanes.length;
        if (begin < (j + 1) * kLanes && end > j * kLanes) {
          const std::string own = lanes.length == 1
                                      ? Arg(lanes, 0)
                                      : FromLane(lanes.value, lanes.offset + j * kLanes - begin);
          const std::string name = "y" + std::to_string(j) + "_" + std::to_string(r);
          *out << "    const float " << name << " = " << own << ";\n";
          text = text.empty() ? name
                              : "lane + " + std::to_string(j * kLanes) + " < " +
                                    std::to_string(begin) + " ? " + text + " : " + name;
        }
        begin = end;
      }
      *out << "    const float y" << j << " = " << text << ";\n";
    }
    for (i32 j = 0; j < RegistersOf(t_.dim); ++j) *out << "    x[" << j << "] = y" << j << ";\n";
  }

  const TransformView& t_;
  const std::string name_;
};

}  // namespace

std::string TransformText(const TransformView& transform, const std::string& name) {
  return Writer(transform, name).Write();
}

}  // namespace jax_attn
