import collections
import gc
import importlib.metadata
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

# Set before numpy loads. The reference multiplies many small matrices: BLAS threads only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "numpy" in sys.modules:
    warnings.warn("numpy is there before OPENBLAS_NUM_THREADS: tests take longer", stacklevel=1)
# Half of a test's time is XLA compiling, often programs that other tests, workers or servers
# compile too. A cached executable holds none of our code, only calls of it by name.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "jax_cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

from helpers import selection
from helpers.lowering import lower_quickly
from jax_attn import _environment

ON_REQUEST = {
    "big": "needs many GB of memory",
    "sanitizers": "runs the CUDA kernels under compute-sanitizer",
    "slow": "takes a minute or more",
    "hours": "takes up to hours",
    "alone": "measures times, on a machine that does nothing else",
}


def pytest_addoption(parser):
    parser.addoption(
        "--at-most",
        type=int,
        metavar="N",
        help="of each test function at most N sets of parameters, spread evenly; default: all",
    )
    parser.addoption(
        "--covering",
        type=float,
        metavar="SECONDS",
        help="a covering selection, of so much processor time (tests/helpers/selection.py)",
    )
    parser.addoption(
        "--rest", action="store_true", help="with --covering: what it leaves out instead"
    )
    parser.addoption(
        "--share",
        metavar="K/N",
        help="of the tests that are left, one in N, from the K-th on (K < N)",
    )
    parser.addoption(
        "--record-costs", action="store_true", help="write the costs that --covering goes by"
    )


def pytest_configure(config):
    if not config.option.markexpr and not Path("/dev/nvidiactl").exists():
        compile_quickly()
        lower_quickly()
    for name, why in ON_REQUEST.items():
        config.addinivalue_line("markers", f"{name}: {why} (run with `pytest -m {name}`)")


def compile_quickly():
    """Sets XLA's flags for quick compiles, here and in the processes that tests start.

    LLVM's optimisations are most of a compile, so they are off and the code is slow. Code
    generation uses one thread, because other workers run. XLA's graph passes are unchanged. The
    flags are not for tests on request, which take long or measure times, nor for GPU code. In CI
    the examples, the demo and the soak test have XLA's defaults.
    """
    flags = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no others
        flags += " --xla_cpu_use_fusion_emitters=false"
    given = os.environ.get("XLA_FLAGS", "")
    if flags not in given:  # set by the process that started this worker
        os.environ["XLA_FLAGS"] = f"{flags} {given}"


def pytest_collection_finish():
    """Freezes what stays alive (modules, thousands of tests), so that gc never visits it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(trylast=True)  # -k has chosen: of these --at-most and --covering keep some
def pytest_collection_modifyitems(config, items):
    if (at_most := config.option.at_most) is not None:
        keep(config, items, spread(items, at_most))
    if (seconds := config.option.covering) is not None:
        runs = [item for item in items if is_run_by_default(item)]
        selected = selection.covering(runs, seconds, selection.read_costs())
        keep(config, items, set(runs) - selected if config.option.rest else selected)
    if (share := config.option.share) is not None:
        first, step = map(int, share.split("/"))
        keep(config, items, set(items[first::step]))
    # Tests that may take longest run first, so that no worker ends long after the others.
    items.sort(key=seconds_allowed, reverse=True)
    for name, why in ON_REQUEST.items():
        if name in (config.option.markexpr or ""):
            continue
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{why}; run with -m {name}"))


def pytest_terminal_summary(terminalreporter, config):
    if config.option.record_costs:
        record_costs(terminalreporter)
    list_skipped(terminalreporter)


def list_skipped(terminalreporter):
    """Lists skipped tests by what was missing; `-rs` shows each test and its reason."""
    wanted, on_request, num_others = collections.Counter(), collections.Counter(), 0
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if found := re.search(r"run with (-m \w+)$", reason):
            on_request[found[1]] += 1
        elif found := MISSING.match(reason):
            wanted[found[1] or found[2]] += 1
        else:
            num_others += 1
    for why, counts in (
        ("for want of", wanted),
        ("unless asked for", on_request),
        ("as they do not apply", {"": num_others} if num_others else {}),
    ):
        if counts:
            listed = "; ".join(f"{name} {counts[name]:,}".strip() for name in sorted(counts))
            terminalreporter.write_line(f"skipped {why}: {listed}")


# The missing thing in a skip's reason: "no GPU: ...", "needs two GPUs", "X is not installed".
MISSING = re.compile(r"(?:no|needs|could not import) '?([^:,;'(]*[^:,;'( ])|(.*) is not installed")


def keep(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def spread(items, at_most):
    """Selects `at_most` tests of each function, and `at_most` of its tests that need a GPU."""
    by_function = collections.defaultdict(list)
    for item in items:
        needs_gpu = item.get_closest_marker("cuda") is not None
        by_function[selection.function_of(item.nodeid), needs_gpu].append(item)
    kept = set()
    for tests in by_function.values():
        step = max(1, len(tests) / at_most)
        kept |= {tests[int((i + 0.5) * step)] for i in range(min(at_most, len(tests)))}
    return kept


def is_run_by_default(item):
    """True if the item runs without a GPU and without -m."""
    return not any(item.get_closest_marker(name) for name in ("cuda", *ON_REQUEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    item.user_properties.append(("began", selection.processor_seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    result = yield
    item.user_properties.append(("ended", selection.processor_seconds()))
    return result


def record_costs(terminalreporter):
    costs = []
    for report in terminalreporter.getreports(""):
        times = dict(report.user_properties)
        if report.when == "teardown" and "began" in times:
            costs.append((report.nodeid, times["ended"] - times["began"]))
    selection.write_costs(costs)


def seconds_allowed(item):
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else 0


@pytest.fixture(autouse=True, scope="session")
def poison():
    """Results and workspaces hold 0xFF (NaN, -1) before every kernel of every test."""
    with _environment.poisoned():
        yield


@pytest.fixture
def backend(request):
    if request.param.platform == "gpu":
        try:
            jax.devices("gpu")
        except RuntimeError as error:
            pytest.skip(f"no GPU: {str(error).splitlines()[0]}")
    with request.param.active():
        yield request.param


@pytest.fixture(scope="module")
def browser():
    """The machine's browser, driven by playwright, with an empty profile."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing("no browser (apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic"]  # in addition to playwright's
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags, timeout=240_000)
        yield browser
        browser.close()
