#include "spec.h"

#include "variant/words.h"

namespace jax_attn {
namespace {

int64_t ToWord(int64_t value) { return value; }
int64_t ToWord(double value) {
  int64_t word;
  std::memcpy(&word, &value, sizeof(word));
  return word;
}
void FromWord(int64_t word, int64_t& value) { value = word; }
void FromWord(int64_t word, double& value) { std::memcpy(&value, &word, sizeof(word)); }

}  // namespace

std::vector<int64_t> EncodeProblem(AttentionProblem problem) {
  std::vector<int64_t> words = {kProblemVersion};
  auto append = [&](const char*, auto& field) { words.push_back(ToWord(field)); };
  VisitFields(problem.spec, append);
  VisitFields(problem.config, append);
  for (const Transform& transform : problem.transforms) {
    const std::vector<int64_t> own = EncodeTransform(transform);
    words.push_back(static_cast<int64_t>(own.size()));
    words.insert(words.end(), own.begin(), own.end());
  }
  const std::vector<int64_t> program = EncodeProgram(problem.program);
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

Status DecodeProblem(const int64_t* words, size_t num_words, AttentionProblem* problem) {
  static const size_t num_fields = EncodeProblem({}).size();
  if (num_words < num_fields || words[0] != kProblemVersion) {
    return Status::Error(
        "expected the words of this jax_attn version, got those of another; export or compile the "
        "function again.");
  }
  const int64_t* at = words + 1;
  auto read = [&](const char*, auto& field) { FromWord(*at++, field); };
  VisitFields(problem->spec, read);
  VisitFields(problem->config, read);
  const int64_t* const end = words + num_words;
  struct {
    const int64_t* words;
    size_t num;
  } transforms[2];
  for (auto& transform : transforms) {
    // num_fields counts both numbers, so the first one is there.
    if (at >= end || *at < 0 || *at >= end - at) {
      return Status::Error("expected the words of transforms, got fewer.");
    }
    transform = {at + 1, static_cast<size_t>(*at)};
    at += 1 + *at;
  }
  JAX_ATTN_RETURN_IF_ERROR(DecodeProgram(at, static_cast<size_t>(end - at), &problem->program));
  for (int i = 0; i < 2; ++i) {
    JAX_ATTN_RETURN_IF_ERROR(
        DecodeTransform(transforms[i].words, transforms[i].num, problem->program.operands,
                        problem->program.num_operands, &problem->transforms[i]));
  }
  return Status::Ok();
}

}  // namespace jax_attn
