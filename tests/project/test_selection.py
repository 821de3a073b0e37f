"""What `make test` selects of the tests, and what it leaves to `make test-rest`."""

import dataclasses
import itertools
import subprocess
import sys
import types

import pytest

from helpers import selection
from helpers.paths import ROOT

COSTS = {"a.py::wide": 0.4}
EVERYTHING = 1e9  # seconds


class Item:
    """What the selection reads of a pytest.Item."""

    def __init__(self, nodeid, params=None):
        self.nodeid = nodeid
        if params is not None:
            self.callspec = types.SimpleNamespace(params=params)


def parametrized(function, **values):
    return [
        Item(f"{function}[{i}]", dict(zip(values, each, strict=True)))
        for i, each in enumerate(itertools.product(*values.values()))
    ]


def made_up():
    return [
        Item("a.py::plain"),
        *parametrized("a.py::wide", x=range(6), y=range(5), z=range(4)),
        *parametrized("a.py::narrow", x=range(2), y=range(2)),
        *parametrized("b.py::other", x=range(3), y=range(3), z=range(3)),
    ]


def selected(seconds):
    return [item.nodeid for item in selection.covering(made_up(), seconds, COSTS)]


def pairs_of(items, prefix):
    """(x, y), (x, z) and (y, z) of the items of a file."""
    return {
        pair
        for item in items
        if item.nodeid.startswith(prefix) and hasattr(item, "callspec")
        for pair in itertools.combinations(sorted(item.callspec.params.items()), 2)
    }


def test_every_function_is_there_without_time():
    """Once, or with all sets of parameters where they take little together."""
    functions = [selection.function_of(nodeid) for nodeid in selected(0)]
    narrow = ["a.py::narrow"] * 4
    assert sorted(functions) == [*narrow, "a.py::plain", "a.py::wide", "b.py::other"]


def test_the_dearest_functions_are_left_to_the_rest():
    costs = {"a.py::wide": selection.DEAREST + 0.1, "b.py::other": selection.DEAREST}
    kept = selection.covering(made_up(), EVERYTHING, costs)
    functions = {selection.function_of(item.nodeid) for item in kept}
    assert functions == {"a.py::narrow", "a.py::plain", "b.py::other"}


def test_a_costly_function_takes_part_for_the_pairs_that_it_adds():
    costs = {"a.py::wide": selection.COSTLY, "b.py::other": selection.COSTLY + 0.1}
    without, kept = (selection.covering(made_up(), seconds, costs) for seconds in (0, EVERYTHING))
    assert {item.nodeid[0] for item in without} == {"a"}
    assert pairs_of(kept, "b.py") == pairs_of(made_up(), "b.py")


def test_what_did_not_run_keeps_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "COSTS", tmp_path / "costs.json")
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("def kept():\n    pass\n")
    selection.COSTS.write_text('{"a.py::kept": 4.5, "a.py::ran": 1, "a.py::gone": 2, "b.py::x": 3}')
    ran = [("a.py::ran[x]", 2.0), ("a.py::ran[y]", 3.0), ("a.py::ran[z]", 9.0)]
    selection.write_costs([*ran, ("a.py::cheap", 0.01)])
    assert selection.read_costs() == {"a.py::kept": 4.5, "a.py::ran": 3.0}


def test_more_seconds_select_more_until_all_pairs_are_there():
    amounts = [set(selected(seconds)) for seconds in (0, 2, 9, EVERYTHING)]
    for less, more in itertools.pairwise(amounts):
        assert less < more
    items = made_up()
    kept = selection.covering(items, EVERYTHING, COSTS)
    assert len(kept) < len(items)
    for file in ("a.py", "b.py"):
        assert pairs_of(kept, file) == pairs_of(items, file)


def test_time_is_what_the_selected_tests_cost():
    """Up to the last one that is added."""
    spent = sum(COSTS.get(selection.function_of(nodeid), selection.CHEAP) for nodeid in selected(9))
    assert 9 <= spent < 10


def test_the_selection_is_the_same_each_time():
    assert sorted(selected(9)) == sorted(selected(9))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    page: int


def test_fields_of_a_case_are_values_but_its_name_is_none():
    twice = [Case(name, "bf16", 16) for name in ("a", "b")]
    cases = [*twice, Case("c", "f32", 16), Case("d", "bf16", 1)]
    kept = selection.covering(parametrized("a.py::f", case=cases), EVERYTHING, {"a.py::f": 0.4})
    names = {item.callspec.params["case"].name for item in kept}
    assert len(kept) == 3 and names > {"c", "d"}


@pytest.fixture(scope="module")
def collected():
    """Ids of two small files' tests: all, with --covering, and with --covering --rest."""

    def collect(*options):
        files = "tests/plan/test_mask_helpers.py", "tests/variant/test_intervals.py"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *files, *options], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "::" in line]

    covering = "--covering", "0.8"
    return collect(), collect(*covering), collect(*covering, "--rest")


def test_the_rest_is_what_is_not_selected(collected):
    everything, covering, rest = collected
    assert covering and rest and not set(covering) & set(rest)
    assert sorted(covering + rest) == sorted(everything)


def test_all_cheap_functions_of_real_files_are_selected(collected):
    everything, covering, _ = collected
    costs = selection.read_costs()
    functions = {selection.function_of(nodeid) for nodeid in everything}
    functions = {f for f in functions if costs.get(f, selection.CHEAP) <= selection.COSTLY}
    assert len(functions) > 10
    assert {selection.function_of(nodeid) for nodeid in covering} == functions
