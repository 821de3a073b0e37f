#include "ffi/checks.h"

#include <sys/mman.h>

#include <cstring>
#include <sstream>

#include "jit/kernels.h"
#include "plan/check.h"
#include "plan/rules/integers.h"

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
    case ffi::DataType::F8E5M2:
      return "float8_e5m2";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::U8:
      return "uint8";
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

std::string ShapeOf(const ffi::AnyBuffer& buffer) {
  return Shape(buffer.element_type(), buffer.dimensions());
}

Status CheckBuffer(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                   ffi::DataType type, std::initializer_list<int64_t> dims) {
  const auto got = buffer.dimensions();
  bool same = buffer.element_type() == type && got.size() == dims.size();
  size_t i = 0;
  for (auto dim = dims.begin(); same && dim != dims.end(); ++dim) same = got[i++] == *dim;
  if (same) return Status::Ok();
  return Status::Error(std::string(op) + ": " + argument + ": expected " + Shape(type, dims) +
                       ", got " + ShapeOf(buffer) + ".");
}

Status CheckGroupRows(const char* op, const int32_t* rows, int64_t num_groups, int64_t num_rows) {
  int64_t sum = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    sum += rows[group];
    if (rows[group] >= 0 && sum <= num_rows) continue;
    return Status::Error(
        std::string(op) + ": group_rows: expected numbers >= 0 with a sum of at most " +
        std::to_string(num_rows) + ", got " + std::to_string(rows[group]) + " for group " +
        std::to_string(group) + " and a sum of " + std::to_string(sum) + ".");
  }
  return Status::Ok();
}

Status CheckFloats(const char* op, const char* argument,
                   const std::optional<ffi::AnyBuffer>& buffer, int64_t num) {
  return FloatsOf(buffer) ? CheckBuffer(op, argument, *buffer, ffi::F32, {num}) : Status::Ok();
}

const float* FloatsOf(const std::optional<ffi::AnyBuffer>& buffer) {
  return buffer && buffer->element_count() > 0 ? static_cast<const float*>(buffer->untyped_data())
                                               : nullptr;
}

ffi::DataType ToDataType(int64_t dtype, int64_t format) {
  switch (format) {
    case kE4m3Format:
      return ffi::DataType::F8E4M3FN;
    case kE5m2Format:
      return ffi::DataType::F8E5M2;
    case kInt8Format:
      return ffi::DataType::S8;
    case kMxfp4Format:
    case kNvfp4Format:
    case kInt4Format:
      return ffi::DataType::U8;
    default:
      return dtype == kBF16  ? ffi::DataType::BF16
             : dtype == kF16 ? ffi::DataType::F16
                             : ffi::DataType::F32;
  }
}

Status ReadProblem(const char* op, ffi::Span<const int64_t> words, AttentionProblem* problem) {
  const std::string prefix = std::string(op) + ": attribute problem";
  JAX_ATTN_RETURN_IF_ERROR(Prefixed(prefix, DecodeProblem(words.begin(), words.size(), problem)));
  return Prefixed(prefix, CheckProblem(*problem));
}

Status ReadPool(const char* op, const AttentionSpec& spec, const ffi::AnyBuffer& k_pages,
                Pool* pool) {
  const auto dims = k_pages.dimensions();
  if (!spec.paged() || dims.size() < 4 || dims.size() > 5) {
    return Status::Error(std::string(op) +
                         ": k_pages: expected a paged cache of rank 4 or 5, got rank " +
                         std::to_string(dims.size()) + ".");
  }
  pool->is_stacked = dims.size() == 5;
  pool->num_layers = pool->is_stacked ? dims[0] : 1;
  pool->num_pages = dims[dims.size() - 4];
  // Kernels number the rows of a layer in 32 bits; with fresh_kv one of these bits tells which
  // array.
  const int64_t most = spec.fresh_kv ? int64_t{1} << 31 : (int64_t{1} << 32) - 2;
  if (pool->num_layers >= 1 && pool->num_layers <= kMaxInt32 &&
      pool->num_pages <= most / spec.page_size) {
    return Status::Ok();
  }
  return Status::Error(
      std::string(op) + ": k_pages: expected at least a layer, and up to " + std::to_string(most) +
      " token slots in each, got " + std::to_string(pool->num_layers) + " layers of " +
      std::to_string(pool->num_pages) + " pages of " + std::to_string(spec.page_size) + ".");
}

Status CheckKv(const char* op, const char* argument, const AttentionSpec& spec, const Pool& pool,
               const ffi::AnyBuffer& kv, int64_t head_dim) {
  const ffi::DataType type = ToDataType(spec.dtype, spec.kv_format);
  const int64_t heads = spec.num_stored_heads();
  if (!spec.paged()) {
    return CheckBuffer(op, argument, kv, type, {spec.max_kv_tokens, heads, head_dim});
  }
  head_dim = StoredDim(spec.kv_format, head_dim);
  if (!pool.is_stacked) {
    return CheckBuffer(op, argument, kv, type, {pool.num_pages, spec.page_size, heads, head_dim});
  }
  return CheckBuffer(op, argument, kv, type,
                     {pool.num_layers, pool.num_pages, spec.page_size, heads, head_dim});
}

Status CheckVariantOperands(const char* op, const VariantProgram& program,
                            const std::vector<ffi::AnyBuffer>& operands) {
  static constexpr ffi::DataType kTypes[] = {ffi::F32, ffi::BF16, ffi::F16, ffi::S32,
                                             ffi::U8,  ffi::PRED};  // indexed by OperandType
  for (size_t i = 0; i < operands.size(); ++i) {
    const ProgramOperand& expected = program.operands[i];
    const auto dims = operands[i].dimensions();
    bool fits = operands[i].element_type() == kTypes[expected.type] &&
                static_cast<i32>(dims.size()) == expected.rank;
    for (const int64_t dim : dims) fits = fits && dim >= 1 && dim <= kMaxInt32;
    if (!fits) {
      return Status::Error(std::string(op) + ": variant_operands: expected operand " +
                           std::to_string(i) + " with the dtype and the " +
                           std::to_string(expected.rank) +
                           " axes that the variant says, none of length 0, got another array.");
    }
  }
  return Status::Ok();
}

void SetVariantOperands(const std::vector<ffi::AnyBuffer>& operands, AttentionParams* p) {
  for (size_t i = 0; i < operands.size(); ++i) {
    VariantOperand& operand = p->variant_operands[i];
    operand.data = operands[i].untyped_data();
    const auto dims = operands[i].dimensions();
    for (size_t axis = 0; axis < dims.size(); ++axis) {
      operand.dims[axis] = static_cast<i32>(dims[axis]);
    }
  }
}

Status CheckLayer(const char* op, int32_t layer, int64_t num_layers) {
  if (layer >= 0 && layer < num_layers) return Status::Ok();
  return Status::Error(std::string(op) + ": layer: expected an index in [0, " +
                       std::to_string(num_layers) + "), got " + std::to_string(layer) + ".");
}

void PreferHugePages(std::initializer_list<ffi::AnyBuffer> results) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096, kHugePage = 2 << 20;
  for (const ffi::AnyBuffer& result : results) {
    const auto address = reinterpret_cast<uintptr_t>(result.untyped_data());
    const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
    const uintptr_t end = (address + result.size_bytes()) / kPage * kPage;
    if (begin + 2 * kHugePage <= end) {  // otherwise a huge page may not fit
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    }
  }
#endif
}

void PoisonOnHost(std::initializer_list<ffi::AnyBuffer> results) {
  for (const ffi::AnyBuffer& result : results) {
    std::memset(result.untyped_data(), 0xFF, result.size_bytes());
  }
}

Status CheckSameMemory(const char* op, const char* name, const ffi::AnyBuffer& result,
                       const ffi::AnyBuffer& operand) {
  if (operand.size_bytes() == 0 || result.untyped_data() == operand.untyped_data()) {
    return Status::Ok();
  }
  return Status::Error(std::string(op) + ": " + name +
                       ": expected the memory of the operand, got other memory.");
}

Status CopyToResult(const ffi::AnyBuffer& operand, ffi::AnyBuffer result, CUstream_st* stream) {
  return CopyBytes(result.untyped_data(), operand.untyped_data(), operand.size_bytes(), stream);
}

Status PoisonOnDevice(std::initializer_list<ffi::AnyBuffer> results, CUstream_st* stream) {
  for (const ffi::AnyBuffer& result : results) {
    JAX_ATTN_RETURN_IF_ERROR(FillBytes(result.untyped_data(), 0xFF, result.size_bytes(), stream));
  }
  return Status::Ok();
}

}  // namespace jax_attn
