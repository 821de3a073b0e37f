#include "jit/compile_log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iomanip>
#include <sstream>
#include <tuple>
#include <utility>

namespace jax_attn {
namespace {

constexpr size_t kMaxFieldsInLine = 8;

std::atomic<bool> log_is_on{false};

const std::string* FindField(const KernelIdentity& identity, const std::string& name) {
  for (const KeyField& field : identity.fields) {
    if (field.name == name) return &field.value;
  }
  return nullptr;
}

// "dtype f16 -> bf16" for each field that differs. An entry that another version of this library
// wrote may lack a field or have one more.
std::vector<std::string> Differences(const KernelIdentity& from, const KernelIdentity& to) {
  std::vector<std::string> differences;
  for (const KeyField& field : to.fields) {
    const std::string* before = FindField(from, field.name);
    if (before != nullptr && *before == field.value) continue;
    differences.push_back(field.name + " " + (before == nullptr ? "absent" : *before) + " -> " +
                          field.value);
  }
  for (const KeyField& field : from.fields) {
    if (FindField(to, field.name) != nullptr) continue;
    differences.push_back(field.name + " " + field.value + " -> absent");
  }
  return differences;
}

// For equal fields.
std::string DescribeOtherBuild(const KernelIdentity& from, const KernelIdentity& to) {
  std::string text = "the same fields are cached";
  if (from.sources != to.sources) text += ", but the kernel sources changed";
  if (from.nvrtc == to.nvrtc) return text;
  const auto version = [](const KernelIdentity& x) { return x.nvrtc.substr(0, x.nvrtc.find(' ')); };
  text += from.sources != to.sources ? ", and NVRTC changed: " : ", but NVRTC changed: ";
  if (version(from) == version(to)) return text + "another build of " + version(to);
  return text + version(from) + " -> " + version(to);
}

void Print(const std::string& what, const std::string& name, double time, int digits,
           const std::string& why) {
  std::ostringstream line;
  line << "jax_attn: " << what << " " << name << " in " << std::fixed << std::setprecision(digits)
       << time << why << "\n";
  std::fputs(line.str().c_str(), stderr);
}

}  // namespace

void SetCompileLog(bool is_on) { log_is_on.store(is_on, std::memory_order_relaxed); }
bool CompileLogIsOn() { return log_is_on.load(std::memory_order_relaxed); }

std::string DescribeIdentity(const KernelIdentity& identity) {
  std::string lines = "op " + identity.op + "\n";
  for (const KeyField& field : identity.fields) {
    lines += "field " + field.name + " " + field.value + "\n";
  }
  return lines + "sources_sha256 " + identity.sources + "\nnvrtc " + identity.nvrtc + "\n";
}

KernelIdentity ParseIdentity(const std::string& lines) {
  KernelIdentity identity;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    const size_t space = line.find(' ');
    if (space == std::string::npos) continue;
    const std::string kind = line.substr(0, space), rest = line.substr(space + 1);
    if (kind == "op") identity.op = rest;
    if (kind == "sources_sha256") identity.sources = rest;
    if (kind == "nvrtc") identity.nvrtc = rest;
    if (kind != "field") continue;
    const size_t end = rest.find(' ');
    if (end == std::string::npos) continue;
    identity.fields.push_back({rest.substr(0, end), rest.substr(end + 1)});
  }
  return identity;
}

std::string DescribeNearest(const KernelIdentity& kernel,
                            const std::vector<KernelIdentity>& cached) {
  const KernelIdentity* nearest = nullptr;
  std::vector<std::string> differences;
  std::tuple<size_t, bool, bool> distance;
  for (const KernelIdentity& other : cached) {
    if (other.op != kernel.op) continue;
    std::vector<std::string> found = Differences(other, kernel);
    const std::tuple<size_t, bool, bool> its_distance = {
        found.size(), other.sources != kernel.sources, other.nvrtc != kernel.nvrtc};
    // At distance 0 is this very kernel, which another process has just cached.
    if (its_distance == std::tuple<size_t, bool, bool>()) continue;
    if (nearest != nullptr && its_distance >= distance) continue;
    nearest = &other;
    differences = std::move(found);
    distance = its_distance;
  }
  if (nearest == nullptr) return "no other " + kernel.op + " kernel is known";
  if (differences.empty()) return DescribeOtherBuild(*nearest, kernel);
  std::string text = "nearest key differs in: ";
  const size_t num_shown = std::min(differences.size(), kMaxFieldsInLine);
  for (size_t i = 0; i < num_shown; ++i) text += (i > 0 ? ", " : "") + differences[i];
  if (num_shown == differences.size()) return text;
  return text + " and " + std::to_string(differences.size() - num_shown) + " more fields";
}

void LogCompiled(const std::string& name, double milliseconds, const std::string& why) {
  Print("compiled", name, milliseconds / 1e3, 2, " s (" + why + ")");
}

void LogDiskHit(const std::string& name, double milliseconds) {
  Print("loaded", name, milliseconds, 1, " ms (disk cache: hit)");
}

}  // namespace jax_attn
