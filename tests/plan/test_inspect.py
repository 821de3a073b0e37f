"""`python -m jax_attn.inspect`."""

import subprocess
import sys

import numpy as np

from helpers.attention_cases import Case, make_plan
from jax_attn import inspect


def save_plan(path, case):
    plan = make_plan(case, "sm_90:6")
    plan.save(path)
    return plan


def test_tables_name_the_heaviest(tmp_path, capsys):
    plan = save_plan(tmp_path / "plan.npz", Case("", (1, 40, 1), (9000, 60, 700)))
    assert inspect.main([str(tmp_path / "plan.npz"), "--rows", "3"]) == 0
    text = capsys.readouterr().out
    assert plan.describe() in text
    queues, items, groups = text.split("\n\n")[1:]
    loads = plan.queue_costs()
    assert len(queues.splitlines()) == len(items.splitlines()) == 2 + 3
    assert len(groups.splitlines()) == 2 + min(3, len(plan.merge_groups()))
    assert queues.splitlines()[2].split()[0] == str(int(np.argmax(loads)))
    heaviest = int(np.argmax(plan.item_costs()))
    assert items.splitlines()[2].split()[0] == str(heaviest)
    assert f"of group {plan.items()['merge_idx'][heaviest]}" in items.splitlines()[2]


def test_a_batch_without_items(tmp_path, capsys):
    save_plan(tmp_path / "plan.npz", Case("", (), ()))
    assert inspect.main([str(tmp_path / "plan.npz")]) == 0
    assert "0 items" not in capsys.readouterr().err


def test_as_a_command(tmp_path):
    save_plan(tmp_path / "plan.npz", Case("", (1,), (100,)))
    command = [sys.executable, "-m", "jax_attn.inspect"]
    more = [str(tmp_path / "plan.npz"), "--plot", str(tmp_path / "plan.html")]
    done = subprocess.run(command + more, capture_output=True, text=True)
    assert done.returncode == 0 and "wrote" in done.stdout
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    refused = subprocess.run(command + [__file__], capture_output=True, text=True)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert refused.stderr.startswith("jax_attn.inspect: AttentionPlan.load: path: expected")
