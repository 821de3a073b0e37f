#include "spec.h"

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
  return words;
}

bool DecodeProblem(const int64_t* words, size_t num_words, AttentionProblem* problem) {
  static const size_t expected = EncodeProblem({}).size();
  if (num_words != expected || words[0] != kProblemVersion) return false;
  ++words;
  auto read = [&](const char*, auto& field) { FromWord(*words++, field); };
  VisitFields(problem->spec, read);
  VisitFields(problem->config, read);
  return true;
}

}  // namespace jax_attn
