"""docs/grafana.json asks only for metrics and labels that the server exports."""

import collections
import json
import re

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from prometheus_client.parser import text_string_to_metric_families

from helpers.paths import ROOT
from jax_attn.serve._openai.metrics import OUTCOMES, Metrics


class Engine:
    """The part of an engine that the metrics read, with every number."""

    ready = True

    def stats(self):
        return collections.defaultdict(int, step_seconds={"plan": 1.0}, device_bytes={0: 1})


def exported() -> dict[str, set[str]]:
    """The labels of each series."""
    metrics = Metrics(Engine())
    for outcome in OUTCOMES:
        metrics.count(outcome)
    families = text_string_to_metric_families(metrics.text().decode())
    found = collections.defaultdict(set)
    for family in families:
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def test_the_dashboard_asks_for_what_is_exported():
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text(encoding="utf-8"))
    series = exported()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    asked = set()
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"]
            names = re.findall(r"jax_attn_\w+", expression)
            assert names and set(names) <= set(series), (panel["title"], names)
            labels = {"le", "instance"}.union(*(series[name] for name in names))
            used = re.findall(r"by \((\w+)\)|ignoring\((\w+)\)|{(\w+)=", expression)
            used += [(name,) for name in re.findall(r"{{(\w+)}}", target["legendFormat"])]
            assert {name for names in used for name in names if name} <= labels, panel["title"]
            assert expression.count("(") == expression.count(")")
            asked |= set(names)
    places = [
        (grid["x"] + x, grid["y"] + y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["w"])
        for y in range(grid["h"])
    ]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24
    # Every histogram is shown.
    assert {name for name in series if name.endswith("_bucket")} <= asked
