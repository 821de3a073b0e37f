"""Pictures of plans: every item is at its position, and no other file is needed."""

import builtins
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from helpers.attention_cases import Case, make_plan
from jax_attn._plan.plot import timeline

TARGET = "sm_90:6"
SPLIT = Case("", (1, 40, 1), (9000, 60, 700))
SHARED = Case("", (1,) * 6, (4000,) * 6, branches=("a",) * 6, branch_tokens=3072, num_ctas=4)
TREE = Case("", (64,), (30000,), 4, 1, dtype="bfloat16")
EMPTY = Case("", (), ())


@pytest.mark.parametrize("target", ("cpu", "sm_90:6"))
def test_items_of_a_queue_follow_each_other(target):
    plan = make_plan(SPLIT, target)
    times, indptr = timeline(plan), plan.queue_indptr()
    assert len(times.begin) == len(plan.items()) > 0
    for q, load in enumerate(plan.queue_costs()):
        mine = times.queue == q
        begin, end = times.begin[mine], times.end[mine]
        assert len(begin) == indptr[q + 1] - indptr[q]
        if len(begin):
            assert begin[0] == 0 and np.isclose(end[-1], load)
            np.testing.assert_allclose(begin[1:], end[:-1])


@pytest.mark.parametrize(
    ("case", "target"),
    ((SPLIT, TARGET), (SHARED, TARGET), (TREE, "sm_90:132")),
    ids=("split", "shared", "tree"),
)
def test_links_lead_to_the_item_that_completes_the_group(case, target):
    plan = make_plan(case, target)
    times, items = timeline(plan), plan.items()
    groups = plan.merge_groups()
    assert len(groups) and (groups["parent"] >= 0).any() == (case is TREE)
    expected = set()

    def completer(g):
        members = np.flatnonzero(
            (items["merge_idx"] <= g) & (g < items["merge_idx"] + items["num_groups"])
        ).tolist()
        members += [completer(c) for c in np.flatnonzero(groups["parent"] == g)]
        last = max(members, key=lambda i: (times.end[i], i))
        expected.update((m, last) for m in members if m != last)
        return last

    for g in np.flatnonzero(groups["parent"] < 0):
        completer(g)
    assert {(int(a), int(b)) for a, b in times.links} == expected


def test_measured_times_are_in_microseconds_from_the_first_item():
    plan = make_plan(SPLIT, TARGET)
    num_items = len(plan.items())
    begin = 17.0 + 1e-6 * np.arange(num_items)
    times = timeline(plan, np.stack([begin, begin + 5e-6], axis=1))
    assert "measured" in times.label
    np.testing.assert_allclose(times.begin, np.arange(num_items), atol=1e-6)
    np.testing.assert_allclose(times.end, np.arange(num_items) + 5, atol=1e-6)


def svg_of(path):
    text = path.read_text()
    return text, ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.S)[0])


@pytest.mark.parametrize("case", (SPLIT, SHARED, EMPTY), ids=("split", "shared", "empty"))
def test_the_page_is_complete_and_asks_nobody(tmp_path, case):
    plan = make_plan(case, TARGET)
    plan.plot(tmp_path / "plan.html")
    text, svg = svg_of(tmp_path / "plan.html")
    bars = svg.findall("./g[@id='items']/rect")
    lines = svg.findall("./g[@id='links']/path")
    assert len(bars) == len(plan.items())
    assert len(lines) == len(timeline(plan).links)
    for i, bar in enumerate(bars):
        item = plan.items()[i]
        told = bar.find("title").text
        is_shared = item["num_groups"] > 1
        whose = f"{item['num_groups']} row groups share it" if is_shared else item["request"]
        assert f"item {i}: {'' if is_shared else 'request '}{whose}" in told
        assert (bar.get("fill") == "url(#shared)") == is_shared
        assert f"kv tokens {item['kv_begin']} to {item['kv_end']}" in told
        assert float(bar.get("x")) >= 0 and float(bar.get("width")) > 0
    assert plan.describe().splitlines()[-1] in text
    assert ("shared by several requests" in text) == (case is SHARED)
    assert not re.search(r"(src|href|url)\s*[=(]\s*['\"]?(https?:)?//", text)


def test_pointing_at_an_item_shows_its_merges(tmp_path, browser):
    plan = make_plan(SHARED, TARGET)
    plan.plot(tmp_path / "plan.html")
    links = timeline(plan).links
    item = int(links[0, 0])
    mine = links[(links == item).any(axis=1)]
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(error))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "plan.html").as_uri())
    page.hover(f"#i{item}")
    assert page.locator("#links path.on").count() == len(mine)
    assert page.locator("#items rect.on").count() == len(np.unique(mine))
    page.mouse.move(1, 1)
    assert page.locator(".on").count() == 0
    assert not errors and len(requests) == 1
    page.close()


@pytest.mark.parametrize("case", (SPLIT, EMPTY), ids=("split", "empty"))
@pytest.mark.parametrize(
    "suffix, magic", ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"))
)
def test_figures(tmp_path, case, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{suffix}"
    make_plan(case, TARGET).plot(path)
    assert path.read_bytes().startswith(magic)


def test_bad_input(tmp_path, monkeypatch):
    plan = make_plan(SPLIT, TARGET)
    with pytest.raises(
        ValueError, match=r"path: expected a name that ends in .html, .*'.*plan.txt'"
    ):
        plan.plot(tmp_path / "plan.txt")
    num_items = len(plan.items())
    for times in (np.zeros((num_items, 3)), np.zeros(num_items), np.zeros((num_items + 1, 2))):
        with pytest.raises(ValueError, match=rf"item_times: expected .*\[{num_items}, 2\], got"):
            plan.plot(tmp_path / "plan.html", item_times=times)
    with pytest.raises(ValueError, match="out of order"):
        plan.plot(tmp_path / "plan.html", item_times=np.tile([2.0, 1.0], (num_items, 1)))

    real_import = builtins.__import__

    def without_matplotlib(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"pip install 'jax_attn\[plot\]'"):
        plan.plot(tmp_path / "plan.png")
    plan.plot(tmp_path / "plan.html")  # needs no optional package
