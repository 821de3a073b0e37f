"""Show a saved plan: `python -m jax_attn.inspect plan.npz [--plot out.html] [--rows N]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_attn._plan.plan import AttentionPlan
from jax_attn._plan.plot import timeline
from jax_attn._plan.records import is_shared


def tables(plan: AttentionPlan, num_rows: int) -> str:
    """The text of plan.describe() and three tables of at most num_rows rows each.

    The tables list the fullest queues, the costliest items and the largest merge groups.
    """
    items, costs = plan.items(), plan.item_costs()
    queue = timeline(plan).queue
    loads, lengths = plan.queue_costs(), np.diff(plan.queue_indptr())
    mean = loads.mean() or 1.0
    groups = plan.merge_groups()
    sections = [
        plan.describe(),
        _table(
            f"fullest queues (of {len(loads)})",
            ("CTA", "items", "predicted load", "load / mean"),
            (
                (q, lengths[q], f"{loads[q]:.0f}", f"{loads[q] / mean:.3f}")
                for q in np.argsort(-loads, kind="stable")[:num_rows]
            ),
        ),
        _table(
            f"heaviest items (of {len(items)})",
            ("item", "CTA", "request", "kv head", "rows", "kv tokens", "predicted", "state"),
            (
                (
                    i,
                    queue[i],
                    "several" if is_shared(items[i]) else items["request"][i],
                    items["kv_head"][i],
                    items["qo_len"][i] * plan.spec.heads_per_item,
                    f"{items['kv_begin'][i]}..{items['kv_end'][i]}",
                    f"{costs[i]:.0f}",
                    _state(items[i]),
                )
                for i in np.argsort(-costs, kind="stable")[:num_rows]
            ),
        ),
    ]
    if len(groups):
        sections.append(
            _table(
                f"merge groups of most partial states (of {len(groups)})",
                ("group", "first q row", "query tokens", "kv head", "partial states", "result"),
                (
                    (
                        g,
                        *(groups[g][["qo_begin", "qo_len", "kv_head", "num_partials"]]),
                        "final" if groups["parent"][g] < 0 else f"of group {groups['parent'][g]}",
                    )
                    for g in np.argsort(-groups["num_partials"], kind="stable")[:num_rows]
                ),
            )
        )
    return "\n\n".join(sections)


def _state(item: np.void) -> str:
    first, count = int(item["merge_idx"]), int(item["num_groups"])
    if count == 0:
        return "final"
    return f"of group {first}" if count == 1 else f"of groups {first}..{first + count - 1}"


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [names, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )
    return "\n".join([title, *("  " + line for line in lines)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("jax_attn.inspect", description="Shows a saved plan.")
    parser.add_argument("plan", help="a file of AttentionPlan.save")
    parser.add_argument("--plot", metavar="FILE", help="draw it: .html, .png, .svg or .pdf")
    parser.add_argument("--rows", type=int, default=10, help="of each table (default: 10)")
    options = parser.parse_args(arguments)
    try:
        plan = AttentionPlan.load(options.plan)
        print(tables(plan, options.rows))
        if options.plot:
            plan.plot(options.plot)
            print(f"\nwrote {options.plot}")
    except (OSError, ValueError, ImportError) as error:
        print(f"jax_attn.inspect: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
