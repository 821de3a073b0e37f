#include "jit/source_text.h"

#include <cstdio>
#include <cstring>

namespace jax_attn {

std::string HexText(i32 bits) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08xu", static_cast<unsigned>(bits));
  return text;
}

std::string FloatText(float x) {
  i32 bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return "F32(" + HexText(bits) + ")";
}

const char* TypeText(i32 type) {
  return type == kVariantF32 ? "float" : type == kVariantI32 ? "int" : "bool";
}
const char* ElementText(i32 operand_type) {
  static constexpr const char* kNames[] = {"OfF32", "OfBF16", "OfF16", "OfI32", "OfU8", "OfBool"};
  return kNames[operand_type];
}
const char* OpText(i32 op) {
  static constexpr const char* kNames[kNumVariantOps] = {
#define JAX_ATTN_OP(name, word, rule, num_args, types) #name,
      JAX_ATTN_VARIANT_OPS(JAX_ATTN_OP)
#undef JAX_ATTN_OP
  };
  return kNames[op];
}

std::string ConstantText(i32 type, i32 bits) {
  if (type == kVariantF32) return "F32(" + HexText(bits) + ")";
  if (type == kVariantBool) return bits != 0 ? "true" : "false";
  return "static_cast<int>(" + HexText(bits) + ")";
}

std::string CastText(i32 type) {
  return type == kVariantF32 ? "ToFloat" : type == kVariantI32 ? "ToInt" : "ToBool";
}

}  // namespace jax_attn
