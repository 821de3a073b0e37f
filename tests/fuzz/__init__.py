"""Fuzzing: inputs that nobody would write by hand (`make fuzz`, and some seconds of it in tests).

Each part makes cases from a seed, looks for one that fails, shrinks it, and writes it to a file
under tests/data/fuzz/. A test then replays that file in every later run.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # helpers
