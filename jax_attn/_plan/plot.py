"""Plots of a schedule: the queue of each CTA over time. See AttentionPlan.plot."""

from __future__ import annotations

import colorsys
import html
import os
import pathlib
import string
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_attn._plan.records import is_shared
from jax_attn._spec.spec import AttentionSpec

_FIGURES = (".png", ".svg", ".pdf")
_SHARED_COLOR = "#8a8f98"
_MAX_IN_LEGEND = 12  # requests; with more of them colours are hard to tell apart


class Schedule(Protocol):
    """The methods of AttentionPlan that plots use."""

    @property
    def spec(self) -> AttentionSpec: ...

    def items(self) -> np.ndarray: ...

    def queue_indptr(self) -> np.ndarray: ...

    def merge_groups(self) -> np.ndarray: ...

    def item_costs(self) -> np.ndarray: ...

    def describe(self) -> str: ...


class Timeline(NamedTuple):
    """The data of a plot, for a page or a figure."""

    queue: np.ndarray  # [num_items]
    begin: np.ndarray  # [num_items], when each item begins
    end: np.ndarray  # [num_items], when each item ends
    request: np.ndarray  # [num_items]; -1: several requests share the item
    links: np.ndarray  # [num_links, 2]: an item with a partial state, the item that merges it
    num_queues: int
    label: str  # of the time axis, with its unit

    @property
    def length(self) -> float:
        return float(self.end.max()) if len(self.end) else 1.0

    @property
    def occupancy(self) -> float:
        """The share of the time in which queues run items, predicted or measured."""
        busy = float((self.end - self.begin).sum())
        return busy / (self.num_queues * self.length) if len(self.end) else 1.0


def timeline(plan: Schedule, item_times: Any = None) -> Timeline:
    """The times of a plan's items.

    item_times: [num_items, 2], seconds, as jax_attn.item_times returns them; shown in µs since the
        first begin. None: the planner's predicted costs, queue by queue.

    Raises ValueError for item_times of another shape, or if an item ends before it begins.
    """
    items, indptr = plan.items(), plan.queue_indptr()
    queue = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    if item_times is None:
        costs = plan.item_costs()
        end = np.cumsum(costs)
        end = end - np.concatenate([[0.0], end])[indptr[queue]]
        begin = end - costs
        rows = plan.spec.kernel_config["tile_q_0"]
        label = f"predicted time, in kv tokens of a tile of {rows} rows"
    else:
        times = np.asarray(item_times, np.float64)
        if times.shape != (len(items), 2) or not (times[:, 0] <= times[:, 1]).all():
            raise ValueError(
                f"AttentionPlan.plot: item_times: expected begin and end, [{len(items)}, 2], got"
                f" {list(times.shape)}{'' if times.shape != (len(items), 2) else ' out of order'}."
            )
        times = (times - times.min(initial=np.inf)) * 1e6
        begin, end = times.T
        label = "measured time, µs"
    request = np.where(is_shared(items), -1, items["request"])
    links = _links(items, plan.merge_groups()["parent"], end)
    return Timeline(queue, begin, end, request, links, len(indptr) - 1, label)


def _links(items: np.ndarray, parent: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Pairs of items that a plot links, without duplicates.

    One link leads from each item with a partial state to the item that completes its merge group,
    and one from that item to the item that completes the parent group.
    """
    counts = items["num_groups"]
    item = np.repeat(np.arange(len(items)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    group = items["merge_idx"][item] + np.arange(len(item)) - first
    by_end = np.argsort(end[item], kind="stable")
    last = np.full(len(parent), -1)
    last[group[by_end]] = item[by_end]  # the last assignment of a group wins
    children = np.flatnonzero(parent >= 0)
    by_end = children[np.lexsort((last[children], end[last[children]]))]
    last[parent[by_end]] = last[by_end]
    item = np.concatenate([item, last[children]])
    group = np.concatenate([group, parent[children]])
    links = np.stack([item, last[group]], axis=1)
    return np.unique(links[links[:, 0] != links[:, 1]], axis=0)


def draw(plan: Schedule, path: str | os.PathLike[str], item_times: Any) -> None:
    """Write the plot of AttentionPlan.plot.

    Raises ValueError for an unknown suffix of path or for item_times that do not fit the plan,
    ImportError if a figure needs matplotlib and it is missing.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".html", *_FIGURES):
        raise ValueError(
            "AttentionPlan.plot: path: expected a name that ends in .html,"
            f" {', '.join(_FIGURES)}, got {os.fspath(path)!r}."
        )
    times = timeline(plan, item_times)
    title, *rest = plan.describe().splitlines()
    title += f"; occupancy {times.occupancy:.3f}"
    skipped = [line.strip() for line in rest if line.startswith("  steps ")]
    if path.suffix == ".html":
        path.write_text(_page(plan, times, title, "\n".join(rest)), encoding="utf-8")
    else:
        _figure(times, "\n".join([title, *skipped]), path)


def _color(request: int) -> str:
    if request < 0:
        return _SHARED_COLOR
    # Hues in steps of the golden angle: those of any few requests differ.
    hue, lightness = request * 0.618034 % 1.0, (0.62, 0.5, 0.72)[request % 3]
    rgb = colorsys.hls_to_rgb(hue, lightness, 0.6)
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


def _legend(times: Timeline) -> list[tuple[str, int]]:
    """(text, request) of each legend entry. With many requests, only that of shared items."""
    requests = np.unique(times.request)
    entries = [("shared by several requests", -1)] if -1 in requests else []
    requests = requests[requests >= 0]
    if len(requests) <= _MAX_IN_LEGEND:
        entries += [(f"request {r}", int(r)) for r in requests]
    return entries


# ---- HTML page -----------------------------------------------------------------------------------

_WIDTH = 1200  # width of the time axis, in pixels


def _page(plan: Schedule, times: Timeline, title: str, about: str) -> str:
    row = max(4, min(18, 900 // max(1, times.num_queues)))
    x = _WIDTH / times.length
    top = times.queue * row
    width = np.maximum((times.end - times.begin) * x, 0.5)
    bars = [
        f'<rect id="i{i}" x="{times.begin[i] * x:.1f}" y="{top[i] + 0.5}" width="{width[i]:.1f}"'
        f' height="{row - 1}" fill="{_color(r) if r >= 0 else "url(#shared)"}">'
        f"<title>{html.escape(text)}</title></rect>"
        for i, (r, text) in enumerate(zip(times.request.tolist(), _tell(plan, times), strict=True))
    ]
    lines = [
        f'<path data-from="{a}" data-to="{b}" d="M{times.end[a] * x:.1f} {top[a] + row / 2}'
        f'L{times.end[b] * x:.1f} {top[b] + row / 2}"/>'
        for a, b in times.links.tolist()
    ]
    height = times.num_queues * row
    axis = [
        f'<line class="grid" x1="{t * x:.1f}" x2="{t * x:.1f}" y1="0" y2="{height}"/>'
        f'<text x="{t * x:.1f}" y="{height + 16}">{t:g}</text>'
        for t in _ticks(times.length)
    ]
    step = max(1, -(-14 // row))  # queues between two labels
    axis += [
        f'<text class="queue" x="-6" y="{(q + 0.5) * row + 4}">{q}</text>'
        for q in range(0, times.num_queues, step)
    ]
    mean = float((times.end - times.begin).sum()) / max(1, times.num_queues)
    legend = [
        f'<span><i style="background:{_color(r)}"></i>{html.escape(text)}</span>'
        for text, r in _legend(times)
    ]
    template = (pathlib.Path(__file__).parent / "plot.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=html.escape(title),
        about=html.escape(about),
        label=html.escape(times.label),
        legend="".join(legend),
        axis="\n".join(axis),
        bars="\n".join(bars),
        lines="\n".join(lines),
        mean=f"{mean * x:.1f}",
        mean_text=f"{mean:,.0f}",
        height=height,
        width=_WIDTH,
        view=f"-40 -16 {_WIDTH + 60} {height + 56}",
        shared=_SHARED_COLOR,
    )


def _tell(plan: Schedule, times: Timeline) -> list[str]:
    """The text that the page shows for each item."""
    group_size, groups = plan.spec.heads_per_item, plan.merge_groups()
    texts = []
    for i, item in enumerate(plan.items()):
        count, merge_idx = int(item["num_groups"]), int(item["merge_idx"])
        whose = f"{count} row groups share it" if is_shared(item) else f"request {item['request']}"
        lines = [
            f"CTA {times.queue[i]}, item {i}: {whose}",
            f"kv head {item['kv_head']}, {item['qo_len']} query tokens,"
            f" {item['qo_len'] * group_size} rows in tile {item['tile']}",
            f"kv tokens {item['kv_begin']} to {item['kv_end']}"
            + (" of the step lists" if plan.spec.max_steps else ""),
            f"{times.begin[i]:.6g} to {times.end[i]:.6g}",
        ]
        if count == 1:
            parts = groups["num_partials"][merge_idx]
            lines.append(f"one of {parts} partial states of merge group {merge_idx}")
            if (parent := groups["parent"][merge_idx]) >= 0:
                lines.append(f"which is one of {groups['num_partials'][parent]} of group {parent}")
        elif count > 1:
            lines.append(f"partial states of merge groups {merge_idx} to {merge_idx + count - 1}")
        texts.append("\n".join(lines))
    return texts


def _ticks(length: float) -> list[float]:
    """About five to ten round numbers from 0 to length."""
    step = 10.0 ** np.floor(np.log10(length))
    step *= next(f for f in (1, 0.5, 0.2, 0.1) if length / (step * f) >= 5)
    return [float(t) for t in np.arange(0, length * 1.0001, step)]


# ---- matplotlib figure ---------------------------------------------------------------------------


def _figure(times: Timeline, title: str, path: pathlib.Path) -> None:
    try:
        from matplotlib.collections import LineCollection, PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError(
            f"AttentionPlan.plot: {path.suffix} needs matplotlib: pip install 'jax_attn[plot]', or"
            " plot to a name that ends in .html."
        ) from None
    height = max(3.0, min(14.0, 1.5 + 0.14 * times.num_queues))
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.add_subplot()
    left, right = times.begin, times.end
    low, high = times.queue - 0.45, times.queue + 0.45
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    shared = times.request < 0
    for mask, hatch in ((~shared, ""), (shared, "////")):
        colors = [_color(r) for r in times.request[mask].tolist()]
        bars = PolyCollection(
            list(corners[mask]), facecolors=colors, edgecolors="white", linewidths=0.3
        )
        bars.set_hatch(hatch)
        axes.add_collection(bars)
    ends = np.stack([times.end, times.queue], axis=1)
    axes.add_collection(
        LineCollection(ends[times.links], colors="black", linewidths=0.5, alpha=0.35)
    )
    mean = float((times.end - times.begin).sum()) / max(1, times.num_queues)
    axes.axvline(mean, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, times.length * 1.01)
    axes.set_ylim(times.num_queues - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"{times.label} (dotted: the mean of all queues)")
    axes.set_ylabel("CTA")
    axes.set_title(title, fontsize=9, loc="left")
    handles = [
        Patch(facecolor=_color(r), label=text, hatch="////" if r < 0 else None)
        for text, r in _legend(times)
    ]
    if handles:
        figure.legend(handles=handles, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)
