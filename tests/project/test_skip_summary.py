"""The summary of skipped tests at the end of pytest's output, on a machine without programs."""

import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT, TESTS

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("playwright", reason="needs playwright")

SERVE = TESTS / "serve"


def run(*names: str, ci: str) -> tuple[int, str]:
    """Exit status and output of the named tests in the folder `serve`."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(SERVE / name) for name in names)],
        cwd=ROOT,
        env=os.environ | {"PATH": "", "CI": ci},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def test_what_is_missing_is_listed():
    tests = "test_page.py::test_key", "test_page.py::test_choices", "test_neighbours.py"
    status, output = run(*tests, ci="")
    assert status == 0, output
    assert "\nskipped for want of: browser 2\nskipped unless asked for: -m alone " in output


def test_ci_has_a_browser():
    status, output = run("test_page.py::test_key", ci="true")
    assert status == 1 and "no browser (apt-get install chromium)" in output, output
