"""benchmarks/peers, and the code that joins their lines to a results file; needs no peer."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from helpers.paths import ROOT

# Imported as a package, without its parent on the path: that would shadow jax_attn.
FOLDER = ROOT / "benchmarks"
_spec = importlib.util.spec_from_file_location(
    "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
)
sys.modules.setdefault("benchmarks", importlib.util.module_from_spec(_spec))

from benchmarks import add_peers, report, workloads  # noqa: E402
from benchmarks.peers import harness  # noqa: E402


def chosen(name):
    (workload,) = workloads.load([name])
    return workload


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("decode/64x4096", True),
        ("decode/64xzipf", False),
        ("prefill/4x4096/16/d128/causal", True),
        ("prefill/16xuniform/32-8/d128/causal", False),
        ("prefill/1x16384/32-8/d128/causal/paged16", False),
        ("prefill/8x512@8192/32-8/d128/causal/paged16", False),
        ("backward/1x16384/32/d64/causal", True),
        ("backward/group8x8192+1024/16/d128/causal", False),
    ],
)
def test_dense(name, dense):
    assert harness.is_dense(chosen(name)) == dense


def test_backward_has_five_products_and_eight_arrays():
    backward, forward = (chosen(f"{k}/4x4096/16/d128/causal") for k in ("backward", "prefill"))
    assert 2 * backward.flops == 5 * forward.flops
    assert forward.bytes == 4 * 4 * 4096 * 16 * 128 * 2  # q, k, v and o
    assert backward.bytes == 2 * forward.bytes


def test_a_group_has_its_prompt_once():
    group = chosen("backward/group8x8192+1024/16/d128/causal")
    tables = [set(t) for t in np.split(group.page_indices(), group.page_indptr[1:-1])]
    assert all(tables[0] <= table for table in tables) and len(tables) == 9
    assert len(set.union(*tables)) == group.num_pages == (8192 + 8 * 1024) // 16
    whole = group.unshared()
    assert whole.qo_lens == whole.kv_lens == (9216,) * 8
    assert whole.nnz_qo == group.nnz_qo + 7 * 8192


def test_a_peer_that_is_not_installed_ends_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peer"])
    with pytest.raises(SystemExit) as end:
        harness.Peer().require("no_such_peer")
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0 and found["peer"] == "no_such_peer"
    assert found["error"].startswith("ModuleNotFoundError")


def test_what_a_peer_cannot_do_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peer"])

    def take():
        raise ValueError("not /a/path/to.cu")

    assert not harness.Peer().measure("decode/64x4096", "one", take)
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == "ValueError: not to.cu"


def test_lines_of_peers_are_added(tmp_path):
    rows = [report.Row("a", 2.0, peers={"old": 3.0}), report.Row("b", 2.0)]
    path = tmp_path / "result.json"
    report.write(path, rows, report.Ceilings(1.0, 1.0), missing_peers=["of before"])
    before = json.loads(path.read_text())
    lines = [
        "a warning of some library",
        '{"note": "peer 1.0"}',
        '{"workload": "a", "peer": "new", "us": 1.234, "sustained_us": 2.0}',
        '{"workload": "b", "peer": "new", "error": "ValueError: no"}',
    ]
    add_peers.add_peers(before, lines)
    report.write_json(path, before)
    after = json.loads(path.read_text())
    assert after["rows"][0]["peers"] == {"old": 3.0, "new": 1.23}
    assert after["rows"][0]["peers_sustained"] == {"new": 2.0}
    assert after["rows"][1]["peers"] == {}
    assert after["missing_peers"] == ["of before", "new, b: ValueError: no"]
    with pytest.raises(KeyError):
        add_peers.add_peers(before, ['{"workload": "c", "peer": "new", "us": 1.0}'])
