"""Inputs that nobody would write by hand: `make fuzz`, and some seconds of it in the tests.

Each part makes cases from a seed, looks for one that fails, makes it smaller, and writes it to a
file under tests/data/fuzz/, which a test then replays for ever.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # helpers
