// A fuzzer of the planners and of the code that runs their plans.
//
//   fuzz_plan batches|damaged [--seconds=N] [--cases=N] [--seed=S] [--out=FOLDER]
//   fuzz_plan --replay=FILE_OR_FOLDER
//
// batches: specs and batches at and beyond every limit, some of them with step lists. Each
//   plan is checked against the definition of a correct plan (fuzz_cover.cc), and each refusal must
//   be justified. One case in a hundred, and one in four of those with lists, also goes to the
//   device planner, in emulation.
// damaged: words of good plans are changed, for all formats, with variants and step lists. Either
//   CheckPlan refuses them, or attention, its gradients and append run over them. Build with
//   JAX_ATTN_SANITIZE=address to detect bad accesses.
//
// A worker process runs case after case. Each case is a function of the seed and its number, so a
// crash or a hang of the worker is a finding like any other. A failure is made smaller and written
// to a file, which --replay runs again; put it into tests/data/fuzz, which ctest replays.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "fuzz/fuzz_case.h"
#include "plan/check.h"

namespace jax_attn::fuzz {
namespace {

constexpr int kFound = 3;            // exit status of a worker that found an error
constexpr int kSecondsOfACase = 60;  // a case that takes longer counts as hanging

// Shared by the worker and the process that watches it.
struct Shared {
  volatile uint64_t index;  // of the running case
  volatile uint64_t num_done;
  char what[2000];  // description of the error found
  struct Count {
    char name[40];
    uint64_t count;
  } counts[64];
};
Shared* shared;

void Count(const std::string& name) {
  for (Shared::Count& c : shared->counts) {
    if (c.name[0] == 0) std::strncpy(c.name, name.c_str(), sizeof(c.name) - 1);
    if (std::strncmp(c.name, name.c_str(), sizeof(c.name) - 1) != 0) continue;
    ++c.count;
    return;
  }
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs fn in its own process. Returns how it died, or the error it reports, or "".
template <typename Fn>
std::string InProcess(Fn&& fn, double seconds) {
  shared->what[0] = 0;
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return "fork failed";
  if (pid == 0) {
    const std::string wrong = fn();
    std::strncpy(shared->what, wrong.c_str(), sizeof(shared->what) - 1);
    std::fflush(nullptr);
    _exit(wrong.empty() ? 0 : kFound);
  }
  int status = 0;
  uint64_t last = ~uint64_t{0};
  double since = Now();
  while (waitpid(pid, &status, WNOHANG) == 0) {
    usleep(2000);
    const uint64_t now = shared->num_done;
    if (now != last) {
      last = now;
      since = Now();
    } else if (Now() - since > seconds) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return Text("hangs: more than %.0f s", seconds);
    }
  }
  if (WIFSIGNALED(status)) return Text("died of signal %d", WTERMSIG(status));
  if (WEXITSTATUS(status) == kFound) return shared->what;
  if (WEXITSTATUS(status) != 0) return Text("exited with %d", WEXITSTATUS(status));
  return "";
}

std::string RunAlone(const Case& c) {
  return InProcess(
      [&] {
        std::string outcome;
        return RunCase(c, &outcome);
      },
      kSecondsOfACase);
}

// Shrinks the case for as long as a smaller one fails, too.
Case Shrink(Case c, std::string* wrong) {
  const double end = Now() + 120;
  for (bool smaller = true; smaller && Now() < end;) {
    smaller = false;
    for (const Case& candidate : Smaller(c)) {
      const std::string still = Now() < end ? RunAlone(candidate) : "";
      if (still.empty()) continue;
      c = candidate;
      *wrong = still;
      smaller = true;
      break;
    }
  }
  return c;
}

int Fuzz(bool is_damaged, uint64_t seed, uint64_t num_cases, double seconds,
         const std::string& folder) {
  const double begin = Now();
  std::printf("fuzz_plan %s --seed=%llu\n", is_damaged ? "damaged" : "batches",
              static_cast<unsigned long long>(seed));
  std::string wrong = InProcess(
      [&]() -> std::string {
        for (uint64_t i = 0; i < num_cases && Now() < begin + seconds; ++i) {
          shared->index = i;
          std::string outcome;
          const std::string found = RunCase(MakeCase(is_damaged, seed, i), &outcome);
          if (!found.empty()) return found;
          Count(outcome);
          shared->num_done = i + 1;
        }
        return "";
      },
      kSecondsOfACase);
  const uint64_t num_done = shared->num_done, index = shared->index;
  const double took = Now() - begin;
  std::printf("%llu cases in %.1f s, %.0f a second:", static_cast<unsigned long long>(num_done),
              took, static_cast<double>(num_done) / took);
  for (const Shared::Count& c : shared->counts) {
    if (c.count > 0) std::printf(" %llu %s", static_cast<unsigned long long>(c.count), c.name);
  }
  std::printf("\n");
  if (wrong.empty()) return 0;
  std::printf("FAILED case %llu: %s\n", static_cast<unsigned long long>(index), wrong.c_str());
  const Case smallest = Shrink(MakeCase(is_damaged, seed, index), &wrong);
  const std::string path = folder + "/" + (is_damaged ? "damaged" : "batches") + "-" +
                           std::to_string(seed) + "-" + std::to_string(index) + ".txt";
  std::istringstream lines(wrong);
  std::string first;
  std::getline(lines, first);
  std::ofstream(path) << "# " << first << "\n" << ToText(smallest);
  std::printf("made smaller: %s\n%swritten to %s\n", wrong.c_str(), ToText(smallest).c_str(),
              path.c_str());
  return 1;
}

int Replay(const std::string& path) {
  std::vector<std::string> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() == ".txt") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  int num_failed = 0;
  for (const std::string& file : files) {
    std::ifstream in(file);
    std::stringstream text;
    text << in.rdbuf();
    Case c;
    const std::string wrong = FromText(text.str(), &c) ? RunAlone(c) : "not a case of the fuzzer";
    if (!wrong.empty()) std::printf("FAILED %s: %s\n", file.c_str(), wrong.c_str());
    num_failed += !wrong.empty();
  }
  std::printf("%zu files, %d failed\n", files.size(), num_failed);
  return files.empty() || num_failed > 0;
}

std::string RunBatch(const Case& c, std::string* outcome) {
  const AttentionProblem problem = MakeProblem(c);
  const PlanLayout layout = MakePlanLayout(problem);
  if (layout.num_words > int64_t{1} << 20) {
    *outcome = "too large for a million cases";
    return "";
  }
  constexpr size_t kGuard = 16;
  std::vector<int32_t> plan(layout.num_words + kGuard, 0x77777777), again(layout.num_words, -1);
  if (!CheckProblem(problem).ok()) {
    *outcome = "of no problem";
    return "";
  }
  const Status refused = PlanOf(c, problem, plan.data());
  if (std::any_of(plan.end() - kGuard, plan.end(), [](int32_t w) { return w != 0x77777777; })) {
    return "written beyond the plan";
  }
  plan.resize(layout.num_words);
  std::string wrong = CheckLegal(c, problem, refused);
  if (refused.message.find(c.expect) == std::string::npos) {
    wrong = "expected \"" + c.expect + "\", got \"" + refused.message + "\"";
  }
  *outcome = "refused";
  if (wrong.empty() && refused.ok()) {
    wrong = CheckCover(c, problem, plan);
    if (wrong.empty() && (!PlanOf(c, problem, again.data()).ok() || again != plan)) {
      wrong = "planned again, the words are others";
    }
    PlanHeader header;
    std::memcpy(&header, plan.data() + layout.header, sizeof(header));
    *outcome = header.num_steps > 0 ? header.num_shared_tokens > 0 ? "listed and shared" : "listed"
               : header.num_shared_tokens > 0 ? "shared"
               : header.num_merge_groups > 0  ? "split"
                                              : "whole";
  }
  if (wrong.empty() && c.device_seed >= 0 && problem.spec.arch != 0) {
    Count("on a device, too");
    wrong = CheckDevice(c, problem);
  }
  return wrong;
}

}  // namespace

std::string RunCase(const Case& c, std::string* outcome) {
  return c.is_damaged ? RunDamaged(c, outcome) : RunBatch(c, outcome);
}

int Main(int argc, char** argv) {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  shared = static_cast<Shared*>(memory);
  std::string part, replay, folder = ".";
  uint64_t seed = 0, num_cases = ~uint64_t{0};
  double seconds = 1e9;
  bool has_seed = false, bounded = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const size_t n = std::strlen(name);
      return argument.compare(0, n, name) == 0 ? argument.c_str() + n : nullptr;
    };
    if (argument == "batches" || argument == "damaged") {
      part = argument;
    } else if (const char* text = value("--seconds=")) {
      seconds = std::atof(text);
      bounded = true;
    } else if (const char* text = value("--cases=")) {
      num_cases = std::strtoull(text, nullptr, 10);
      bounded = true;
    } else if (const char* text = value("--seed=")) {
      seed = std::strtoull(text, nullptr, 10);
      has_seed = true;
    } else if (const char* text = value("--replay=")) {
      replay = text;
    } else if (const char* text = value("--out=")) {
      folder = text;
    } else {
      std::fprintf(stderr, "fuzz_plan: %s: unknown argument\n", argv[i]);
      return 2;
    }
  }
  if (!replay.empty()) return Replay(replay);
  if (part.empty() || !bounded) {
    std::fprintf(stderr,
                 "fuzz_plan batches|damaged --seconds=N|--cases=N [--seed=S] [--out=FOLDER]\n"
                 "fuzz_plan --replay=FILE_OR_FOLDER\n");
    return 2;
  }
  if (!has_seed) seed = static_cast<uint64_t>(std::time(nullptr));
  return Fuzz(part == "damaged", seed, num_cases, seconds, folder);
}

}  // namespace jax_attn::fuzz

int main(int argc, char** argv) { return jax_attn::fuzz::Main(argc, argv); }
