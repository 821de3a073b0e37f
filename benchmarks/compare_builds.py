"""Comparison of builds of jax_attn: each runs the same calls, interleaved, on one device.

    python -m benchmarks.compare_builds --select 'prefill/64x256/*,mla/*' main=. other=../other

NAME=FOLDER: a folder with jax_attn and its compiled extension, such as a worktree. Each build runs
in its own processes, with the protocol of this checkout (timing.py), and is compared with the first
one. For tuning: no peers, no file. On an H200, medians of one build differ by up to 0.5 % on one
card, and by 4 % between cards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def measure(folder: Path, select: list[str], shrink: int) -> Iterator[dict[str, Any]]:
    """Measures one build in this process, which must not have imported jax_attn yet."""
    sys.path.insert(0, str(folder))
    import jax_attn as ja
    from benchmarks import ops, timing, workloads

    found = Path(ja.__file__).resolve().parents[1]
    if found != folder:
        raise SystemExit(
            f"compare_builds: expected jax_attn of {folder}, got that of {found}:"
            " use an interpreter that has none installed"
        )
    chosen = workloads.load(select, workloads.ATTENTION_KINDS, shrink)
    specs = [ops.make_spec(workload, {}) for workload in chosen]
    if ops.on_gpu():
        ja.precompile(specs)
    for workload, spec in zip(chosen, specs, strict=True):
        data = ops.make_data(workload)
        make_chain = ops.attention_chain(data, spec, ops.make_plan(workload, spec))
        o = make_chain(1)()
        error = ops.relative_error(data, o[0] if isinstance(o, list) else o)
        chain = timing.time_chain(make_chain, ops.attention_chain_length(workload))
        yield {"workload": workload.id, "us": chain.us, "spread": chain.spread, "error": error}


def compare(builds: dict[str, Path], rounds: int, options: list[str]) -> dict[str, dict[str, list]]:
    """Returns workload -> build -> one time per round."""
    times: dict[str, dict[str, list[float]]] = {}
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for _ in range(rounds):
        for name, folder in builds.items():
            command = [sys.executable, "-m", "benchmarks.compare_builds", "--measure", str(folder)]
            process = subprocess.Popen(
                [*command, *options], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                print(f"{name}: {line.strip()}", file=sys.stderr, flush=True)
                times.setdefault(row["workload"], {}).setdefault(name, []).append(row["us"])
            if process.wait():
                raise SystemExit(f"compare_builds: {name} ended with {process.returncode}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_builds",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("builds", nargs="*", metavar="NAME=FOLDER")
    add("--select", required=True, help='workload ids, comma separated; "decode/*" is a prefix')
    add("--rounds", type=int, default=2, help="of all builds in turn (%(default)s)")
    add("--shrink", type=int, default=1, help="divides all lengths: tries the script")
    add("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        for row in measure(arguments.measure, arguments.select.split(","), arguments.shrink):
            print(json.dumps(row), flush=True)
        return
    pairs = [build.split("=", 1) for build in arguments.builds]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        parser.error("builds: expected NAME=FOLDER, one or more")
    builds = {name: Path(folder).resolve() for name, folder in pairs}
    options = ["--select", arguments.select, "--shrink", str(arguments.shrink)]
    first = pairs[0][0]
    for workload, of in compare(builds, arguments.rounds, options).items():
        base = statistics.mean(of[first])
        cells = [
            f"{name} {'/'.join(f'{us:.1f}' for us in of[name])}"
            + (f" ({100 * (statistics.mean(of[name]) / base - 1):+.1f} %)" if name != first else "")
            for name in builds
        ]
        print(f"{workload:44} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
