// Checks that every handler makes. Python has made the same checks at trace time with friendlier
// words; these guard executables that were exported, edited or built by another version.
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

// A result as a plain buffer, for the record of a call: ffi::Result gives its buffer only to
// non-const functions.
struct ResultBuffer : ffi::AnyBuffer {
  ResultBuffer(ffi::Result<ffi::AnyBuffer> result) : ffi::AnyBuffer(*result) {}  // NOLINT: implicit
};

// Adds the prefix, usually the op, to a status of code that does not know the op.
Status Prefixed(const std::string& prefix, const Status& status);

// "<type>[<dims>]", for error messages.
std::string ShapeOf(const ffi::AnyBuffer& buffer);

// Returns "op: argument: expected <type>[<dims>], got ..." unless the buffer has exactly this type
// and shape.
Status CheckBuffer(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                   ffi::DataType type, std::initializer_list<int64_t> dims);

// Checks rows of groups: each >= 0, with a sum of at most num_rows.
Status CheckGroupRows(const char* op, const int32_t* rows, int64_t num_groups, int64_t num_rows);

// Checks an optional operand of [num] f32 and gives its data, or null if absent. Absent operands
// may be arrays without elements, since XLA's optional operands must come last.
Status CheckFloats(const char* op, const char* argument,
                   const std::optional<ffi::AnyBuffer>& buffer, int64_t num);
const float* FloatsOf(const std::optional<ffi::AnyBuffer>& buffer);

// Element type of arrays of a format; dtype: the spec's.
ffi::DataType ToDataType(int64_t dtype, int64_t format = kPlainFormat);

// Decodes the "problem" attribute of every attention, append and plan call. This is the only
// decoder, and it runs CheckProblem: the result is always a valid problem.
Status ReadProblem(const char* op, ffi::Span<const int64_t> words, AttentionProblem* problem);

// A stage of a handler that needs the problem alone: stage(problem) returns a Status.
template <typename Stage>
ffi::Error RunStage(const char* op, ffi::Span<const int64_t> words, Stage stage) {
  AttentionProblem problem;
  const Status s = ReadProblem(op, words, &problem);
  return ToFfi(s.ok() ? stage(problem) : s);
}

// Binds the attributes of a call of a problem, after its other bindings. poison: see PoisonOnHost.
template <typename Binding>
auto BindProblem(Binding binding) {
  return std::move(binding).template Attr<ffi::Span<const int64_t>>("problem").template Attr<bool>(
      "poison");
}

// A paged cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim], or the same without
// num_layers, which then is 1: XLA would copy an array that is reshaped on its way to a result that
// aliases it.
struct Pool {
  int64_t num_layers = 1, num_pages = 1;
  bool is_stacked = false;
};
Status ReadPool(const char* op, const AttentionSpec& spec, const ffi::AnyBuffer& k_pages,
                Pool* pool);
// Checks keys, values or their gradients: pages of the pool, or ragged
// [max_kv_tokens, num_kv_heads, head_dim].
Status CheckKv(const char* op, const char* argument, const AttentionSpec& spec, const Pool& pool,
               const ffi::AnyBuffer& kv, int64_t head_dim);

// Checks the operands of a variant (types; no axis of length 0) and stores them where kernels read
// them.
Status CheckVariantOperands(const char* op, const VariantProgram& program,
                            const std::vector<ffi::AnyBuffer>& operands);
void SetVariantOperands(const std::vector<ffi::AnyBuffer>& operands, AttentionParams* p);

// Reads data, like the checks of plans (plan/check.h), so only CPU handlers call it;
// JAX_ATTN_CHECK=1 runs both on any device.
Status CheckLayer(const char* op, int32_t layer, int64_t num_layers);

// Requests huge pages for results of some MB, before they are written; does nothing on a system
// without them. Such results are often fresh memory in every call: with 4 KB pages, page faults
// took a fifth of the CPU time of a backward pass over 8,192 tokens in bf16.
void PreferHugePages(std::initializer_list<ffi::AnyBuffer> results);

// Fills results with 0xFF, NaN as floats, so that a test detects elements that a kernel did not
// write.
void PoisonOnHost(std::initializer_list<ffi::AnyBuffer> results);
Status PoisonOnDevice(std::initializer_list<ffi::AnyBuffer> results, CUstream_st* stream);

// Checks that a result is in the memory of an operand, as XLA was asked. They may be empty.
Status CheckSameMemory(const char* op, const char* name, const ffi::AnyBuffer& result,
                       const ffi::AnyBuffer& operand);

// Copies an operand to the result that XLA was asked to put in its memory, if it did not. On GPUs
// XLA may fuse slices of operands and of results into a call in a loop, and then the two are apart.
Status CopyToResult(const ffi::AnyBuffer& operand, ffi::AnyBuffer result, CUstream_st* stream);

}  // namespace jax_attn
