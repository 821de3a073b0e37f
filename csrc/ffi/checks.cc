#include "ffi/checks.h"

#include <cstring>
#include <sstream>

#include "jit/kernels.h"
#include "plan/check.h"
#include "plan/rules.h"

namespace jax_attn {
namespace {

const char* TypeName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::DataType::S32:
      return "int32";
    default:
      return "another type";
  }
}

template <typename Dims>
std::string Shape(ffi::DataType type, const Dims& dims) {
  std::ostringstream text;
  text << TypeName(type) << "[";
  const char* separator = "";
  for (int64_t dim : dims) {
    text << separator << dim;
    separator = ", ";
  }
  text << "]";
  return text.str();
}

}  // namespace

ffi::Error ToFfi(const Status& status) {
  return status.ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(status.message);
}

Status Prefixed(const std::string& prefix, const Status& status) {
  return status.ok() ? status : Status::Error(prefix + ": " + status.message);
}

Status CheckBuffer(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                   ffi::DataType type, std::initializer_list<int64_t> dims) {
  const auto got = buffer.dimensions();
  bool same = buffer.element_type() == type && got.size() == dims.size();
  size_t i = 0;
  for (auto dim = dims.begin(); same && dim != dims.end(); ++dim) same = got[i++] == *dim;
  if (same) return Status::Ok();
  return Status::Error(std::string(op) + ": " + argument + ": expected " + Shape(type, dims) +
                       ", got " + Shape(buffer.element_type(), got) + ".");
}

Status CheckFloats(const char* op, const char* argument,
                   const std::optional<ffi::AnyBuffer>& buffer, int64_t num) {
  return FloatsOf(buffer) ? CheckBuffer(op, argument, *buffer, ffi::F32, {num}) : Status::Ok();
}

const float* FloatsOf(const std::optional<ffi::AnyBuffer>& buffer) {
  return buffer && buffer->element_count() > 0 ? static_cast<const float*>(buffer->untyped_data())
                                               : nullptr;
}

ffi::DataType ToDataType(int64_t dtype) {
  return dtype == kBF16   ? ffi::DataType::BF16
         : dtype == kF16  ? ffi::DataType::F16
         : dtype == kE4M3 ? ffi::DataType::F8E4M3FN
                          : ffi::DataType::F32;
}

Status ReadProblem(const char* op, ffi::Span<const int64_t> words, AttentionProblem* problem) {
  const std::string prefix = std::string(op) + ": attribute problem";
  if (!DecodeProblem(words.begin(), words.size(), problem)) {
    return Status::Error(prefix +
                         ": expected the words of this jax_attn version, got those of another; "
                         "export or compile the function again.");
  }
  return Prefixed(prefix, CheckProblem(*problem));
}

Status CheckPool(const char* op, const AttentionSpec& spec, int64_t num_layers, int64_t num_pages) {
  // Kernels number the rows of a layer in 32 bits; with fresh_kv one of them says which array.
  const int64_t most = spec.fresh_kv ? int64_t{1} << 31 : (int64_t{1} << 32) - 2;
  if (num_layers >= 1 && num_layers <= kMaxInt32 && num_pages <= most / spec.page_size) {
    return Status::Ok();
  }
  return Status::Error(std::string(op) + ": k_pages: expected at least a layer, and up to " +
                       std::to_string(most) + " token slots in each, got " +
                       std::to_string(num_layers) + " layers of " + std::to_string(num_pages) +
                       " pages of " + std::to_string(spec.page_size) + ".");
}

Status CheckLayer(const char* op, int32_t layer, int64_t num_layers) {
  if (layer >= 0 && layer < num_layers) return Status::Ok();
  return Status::Error(std::string(op) + ": layer: expected an index in [0, " +
                       std::to_string(num_layers) + "), got " + std::to_string(layer) + ".");
}

void PoisonOnHost(std::initializer_list<ffi::AnyBuffer> results) {
  for (const ffi::AnyBuffer& result : results) {
    std::memset(result.untyped_data(), 0xFF, result.size_bytes());
  }
}

Status PoisonOnDevice(std::initializer_list<ffi::AnyBuffer> results, CUstream_st* stream) {
  for (const ffi::AnyBuffer& result : results) {
    Status s = FillBytes(result.untyped_data(), 0xFF, result.size_bytes(), stream);
    if (!s.ok()) return s;
  }
  return Status::Ok();
}

}  // namespace jax_attn
