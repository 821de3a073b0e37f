"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
EXAMPLES = ROOT / "examples"
