"""Cold compile times: NVRTC on every kernel that the given specs need, in a separate process.

    python -m benchmarks.compile_time SPECS.json

SPECS.json: a list of AttentionSpec fields. Prints one JSON object per kernel. No GPU is used. The
cache is in JAX_ATTN_CACHE_DIR, so a second run with the same folder must compile nothing.

A time is the processor time of the compiling thread. NVRTC compiles a kernel in the calling thread,
so this is the wait of a caller on an idle core; time in which other work has the core does not
count. A quarter of the cores compile at once. More would share caches and hyper-threads, which
lengthens processor time, too. NVRTC's own cache in the user's folder, with which the same source
takes 0.02 to 0.12 s the next time, is off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def measure(specs: list[Any], cache_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compiles into an empty cache_dir, then asks a second process for the same.

    Returns (the kernels as the first process saw them, jit_stats of the second).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "specs.json"
        path.write_text(json.dumps([_arguments(spec) for spec in specs]))
        first, second = (_run(path, cache_dir) for _ in range(2))
    return first[:-1], second[-1]


def _arguments(spec: Any) -> dict[str, Any]:
    return dataclasses.asdict(spec)


def _run(path: Path, cache_dir: Path) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ATTN_CACHE_DIR": str(cache_dir),
        "CUDA_CACHE_DISABLE": "1",  # NVRTC's own cache
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError(f"compile_time: {done.stderr.strip()[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _timed(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begin = time.thread_time()
    kernel = job()
    return {**kernel, "processor_ms": 1e3 * (time.thread_time() - begin)}


def main() -> None:
    import jax_attn as ja
    from jax_attn import _core
    from jax_attn._xla import jit

    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        jobs |= jit.jobs_of(ja.AttentionSpec(**fields))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        for kernel in pool.map(_timed, jobs.values()):
            print(json.dumps(kernel), flush=True)
    print(json.dumps(_core.jit_stats()), flush=True)


if __name__ == "__main__":
    main()
