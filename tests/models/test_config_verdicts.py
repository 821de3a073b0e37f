"""Changed config.json files: what is accepted gives the logits of transformers.

tests/data/make_config_verdicts.py compared each of these cases with transformers. Here they are
read again: what was refused still is, by a sentence that names file and key; what was accepted
still has the logits of the record.
"""

import collections
import functools

import numpy as np
import pytest

from helpers import config_cases
from helpers.config_cases import FINDING, ONLY_HERE, REFUSED, Record
from jax_attn import models

pytest.importorskip("safetensors.numpy")

_LOGITS_PER_BASE = 16  # computed; of the other configs only the equality is compared
_TOLERANCE = 1e-4  # of the largest logit


load = functools.cache(Record.load)


@functools.cache
def cases_of(name: str) -> dict[str, list[tuple[config_cases.Case, int]]]:
    """The cases of each base of a record, with their outcomes."""
    record = load(name)
    cases = config_cases.recorded(name, record.about["known"])
    assert config_cases.digest(cases) == record.about["digest"], (
        f"tests/data/{name}.npz is of other cases: run "
        f"tests/data/make_config_verdicts.py --record {name}"
    )
    by_base = collections.defaultdict(list)
    for case, outcome in zip(cases, record.outcomes, strict=True):
        by_base[case.base].append((case, int(outcome)))
    return by_base


@pytest.mark.parametrize(
    ("name", "base"),
    [(name, base) for name, cases in config_cases.RECORDS.items() for base in cases.bases],
)
def test_verdicts(name, base, tmp_path):
    record, cases = load(name), cases_of(name)
    path = tmp_path / "config.json"
    outcomes: dict[str, int] = {}  # of each distinct config, the first
    configs: dict[int, tuple[config_cases.Case, models.ModelConfig]] = {}
    for case, outcome in cases[base]:
        try:
            config = config_cases.parse(case.config(), path)
        except models.ModelDirectoryError as error:
            assert outcome == REFUSED, f"{case.changes} was accepted: {error}"
            assert not config_cases.wrong_sentence(str(error), path, case), case.changes
            continue
        assert outcome != REFUSED, f"{case.changes} was refused and not compared: record it again"
        if outcome == ONLY_HERE:
            continue
        assert config_cases.checksum(config) == record.tensors[outcome], case.changes
        # A key that has lost its effect makes a config equal to one with other logits.
        first = outcomes.setdefault(config_cases.numbers(case, config), outcome)
        difference = _difference(record.logits[first], record.logits[outcome])
        assert difference < _TOLERANCE, case.changes
        configs.setdefault(first, (case, config))
    same_shapes = _of_shapes(configs, next(iter(configs), None))
    for outcome in same_shapes[:: max(1, len(same_shapes) // _LOGITS_PER_BASE)]:
        case, config = configs[outcome]
        config_cases.write(tmp_path, case, config)
        got = config_cases.sample(config_cases.logits(tmp_path, config))
        assert _difference(got, record.logits[outcome]) < _TOLERANCE, case.changes


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def _of_shapes(configs, first) -> list[int]:
    """The outcomes with the tensors of the first: others would compile each operation again."""
    shapes = {key: config_cases.shapes(config) for key, (_, config) in configs.items()}
    return [key for key in configs if shapes[key] == shapes[first]]


@pytest.mark.parametrize("name", config_cases.RECORDS)
def test_the_record_has_no_findings(name):
    counts = collections.Counter(np.minimum(load(name).outcomes, 0).tolist())
    assert counts[0] > 100 and counts[REFUSED] > 100 and not counts[FINDING]
    assert config_cases.file_of(name).stat().st_size < 300_000
