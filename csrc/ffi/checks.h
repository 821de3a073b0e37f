// What every handler checks, in one place. Python has checked the same at trace time with
// friendlier words; these checks guard executables that were exported, edited or built by another
// version.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spec.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

struct CUstream_st;

namespace jax_attn {

namespace ffi = xla::ffi;

ffi::Error ToFfi(const Status& status);

// A result, for a record of a call: ffi::Result gives its buffer to no const function.
struct ResultBuffer : ffi::AnyBuffer {
  ResultBuffer(ffi::Result<ffi::AnyBuffer> result) : ffi::AnyBuffer(*result) {}  // NOLINT: implicit
};

// The status of something that does not know the op.
Status Prefixed(const std::string& prefix, const Status& status);

// "<type>[<dims>]", for refusals.
std::string ShapeOf(const ffi::AnyBuffer& buffer);

// "op: argument: expected <type>[<dims>], got ..." unless the buffer has exactly this type and
// shape.
Status CheckBuffer(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                   ffi::DataType type, std::initializer_list<int64_t> dims);

// An optional operand, which may also be absent as an array without elements: XLA's optional
// operands are the last ones. Its shape, [num] f32, and its data or null.
Status CheckFloats(const char* op, const char* argument,
                   const std::optional<ffi::AnyBuffer>& buffer, int64_t num);
const float* FloatsOf(const std::optional<ffi::AnyBuffer>& buffer);

// What arrays of a format are made of; dtype: the spec's.
ffi::DataType ToDataType(int64_t dtype, int64_t format = kPlainFormat);

// The "problem" attribute of every attention, append and plan call, as the only place that decodes
// it: whatever the words were, the problem is one that CheckProblem accepts.
Status ReadProblem(const char* op, ffi::Span<const int64_t> words, AttentionProblem* problem);

// A stage of a handler that needs the problem alone: stage(problem) returns a Status.
template <typename Stage>
ffi::Error RunStage(const char* op, ffi::Span<const int64_t> words, Stage stage) {
  AttentionProblem problem;
  const Status s = ReadProblem(op, words, &problem);
  return ToFfi(s.ok() ? stage(problem) : s);
}

// The attributes of a call of a problem, after what else it binds. poison: see PoisonOnHost.
template <typename Binding>
auto BindProblem(Binding binding) {
  return std::move(binding).template Attr<ffi::Span<const int64_t>>("problem").template Attr<bool>(
      "poison");
}

// A paged cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], or without num_layers,
// which then is 1: XLA would copy what is reshaped on the way to a result that aliases it.
struct Pool {
  int64_t num_layers = 1, num_pages = 1;
  bool is_stacked = false;
};
Status ReadPool(const char* op, const AttentionSpec& spec, const ffi::AnyBuffer& k_pages,
                Pool* pool);
Status CheckPages(const char* op, const char* argument, const AttentionSpec& spec, const Pool& pool,
                  const ffi::AnyBuffer& pages, int64_t head_dim);

// The operands of a variant: their types, and that no axis has length 0; and to where kernels read
// them.
Status CheckVariantOperands(const char* op, const VariantProgram& program,
                            const std::vector<ffi::AnyBuffer>& operands);
void SetVariantOperands(const std::vector<ffi::AnyBuffer>& operands, AttentionParams* p);

// Reads data, as the checks of plans do (plan/check.h), so only CPU handlers call it;
// JAX_ATTN_CHECK=1 does both on any device.
Status CheckLayer(const char* op, int32_t layer, int64_t num_layers);

// Asks for huge pages under results of some MB, before they are written; does nothing on a system
// without them. Such results often are fresh memory in every call: pages of 4 KB took a fifth of
// the processor time of a backward pass over 8,192 tokens in bf16.
void PreferHugePages(std::initializer_list<ffi::AnyBuffer> results);

// Fills results with 0xFF, NaN as floats, so that a test sees whatever a kernel leaves unwritten.
void PoisonOnHost(std::initializer_list<ffi::AnyBuffer> results);
Status PoisonOnDevice(std::initializer_list<ffi::AnyBuffer> results, CUstream_st* stream);

}  // namespace jax_attn
