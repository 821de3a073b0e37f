"""Changes keys of config.json and compares what this library and transformers make of them.

    python tests/data/make_config_verdicts.py --seconds 600 --seed 1   # several keys at once
    python tests/data/make_config_verdicts.py --singles llama          # each key of some bases
    python tests/data/make_config_verdicts.py --record config_verdicts_2 # writes that file
    python tests/data/make_config_verdicts.py --again config_verdicts_2  # its findings once more

A finding is a config that is accepted and gives other logits than in transformers, or that is
refused without a sentence that names the file and the key. Prints the findings and the number of
cases; exits with 1 if there are any.

Needs torch and transformers (2.13 and 5.24 made the file). Run it with tests/ in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import inspect
import json
import os
import random
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from helpers import config_cases
from helpers.config_cases import BASES, Case
from jax_attn import models

TOLERANCE = 3e-4  # of the largest logit; a key that has an effect changes more


# ---- the keys that transformers reads ----------------------------------------------------------


def known_keys(bases: Iterable[str]) -> config_cases.Known:
    """Returns the keys that transformers reads, and their defaults, by model_type.

    They are the fields of the config class, their other names, and the strings that it looks for
    among other keys. COMMON has those of every family, with what models asked their config for, in
    vain, while they were made and run.
    """
    known: config_cases.Known = {config_cases.COMMON: _keys_of_class(PreTrainedConfig)}
    common = known[config_cases.COMMON]
    shared = {*common}
    for name, base in ((name, BASES[name]) for name in bases):
        for model_type in {base["model_type"], base.get("text_config", base)["model_type"]}:
            if model_type not in known:
                keys = _keys_of_class(type(AutoConfig.for_model(model_type)))
                rope = ("rope_scaling", "rope_theta") if "rope_parameters" in keys else ()
                inherited = shared - {*rope, "rope_parameters"}
                known[model_type] = {key: keys[key] for key in keys if key not in inherited}
        common |= {key: None for key in _keys_asked_for(name) if key not in common}
    return {model_type: dict(sorted(keys.items())) for model_type, keys in known.items()}


def _keys_of_class(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        is_plain = isinstance(field.default, (int, float, str, bool))
        keys[field.name] = field.default if is_plain else None
    keys |= {name: keys.get(of) for name, of in kind.attribute_map.items()}
    methods = ("__post_init__", "convert_rope_params_to_dict", "standardize_rope_params")
    for each in kind.__mro__:
        for method in methods:
            if method in vars(each) and each.__module__.startswith("transformers."):
                found = _strings_asked_for(vars(each)[method])
                keys |= {key: None for key in found if key not in keys}
    return keys


def _strings_asked_for(function: Any) -> set[str]:
    """Returns "x" of kwargs.pop("x"), kwargs.get("x") and getattr(self, "x") in a function."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            index = {"kwargs.pop": 0, "kwargs.get": 0, "getattr": 1, "hasattr": 1}.get(name, 9)
            if len(node.args) > index and isinstance(node.args[index], ast.Constant):
                found.add(str(node.args[index].value))
    return found


def _keys_asked_for(name: str) -> set[str]:
    """Returns the names that the model of a base asks its config for in vain."""
    asked: set[str] = set()
    get = PreTrainedConfig.__getattribute__

    def spy(self: PreTrainedConfig, name: str) -> Any:
        try:
            return get(self, name)
        except AttributeError:
            asked.add(name)
            raise

    PreTrainedConfig.__getattribute__ = spy
    try:
        with tempfile.TemporaryDirectory() as directory:
            config = config_cases.parse(BASES[name], Path("config.json"))
            config_cases.write(Path(directory), Case(name, {}), config)
            theirs(Path(directory), config)
    finally:
        PreTrainedConfig.__getattribute__ = get
    return {name for name in asked if not name.startswith("_") and name.isidentifier()}


# ---- both sides --------------------------------------------------------------------------------


class Refused(Exception):
    """transformers refuses a config."""


# In logits of texts, or functions of the config.
_UNUSED = re.compile("vision_tower|multi_modal_projector|pooler|slope_rate|_decay$")


class OtherTensors(Exception):
    """transformers expects other tensors than this library."""


def theirs(directory: Path, config: config_cases.Config) -> np.ndarray:
    """Returns what config_cases.logits does, of transformers. Raises Refused or OtherTensors."""
    is_encoder = not isinstance(config, models.ModelConfig)
    tokens = config_cases.tokens(config)
    try:
        # eager: the other implementations leave out Gemma 2's soft cap of attention.
        has_images = "text_config" in json.loads((directory / "config.json").read_text())
        of_text = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        kind = AutoModel if is_encoder else of_text
        model, loading = kind.from_pretrained(
            directory,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        with torch.no_grad():
            out = model.eval()(torch.from_numpy(tokens)[None], return_dict=True)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {str(error)[:200]}") from None
    problems = [
        f"{kind}: {sorted(map(str, names))[:3]}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if (names := [name for name in loading[kind] if not _UNUSED.search(str(name))])
    ]
    if problems:
        raise OtherTensors("; ".join(problems))
    return (out.last_hidden_state if is_encoder else out.logits)[0].float().numpy()


_LOGITS: dict[str, np.ndarray] = {}  # of this library, by numbers of the config


class Verdict(NamedTuple):
    finding: str  # "": none
    kind: str  # what happened, for counting
    config: config_cases.Config | None = None  # if this library accepts
    logits: np.ndarray | None = None  # config_cases.sample of transformers' if it accepts, too


def judge(case: Case, directory: Path) -> Verdict:
    for file in directory.iterdir():
        file.unlink()
    path = directory / "config.json"
    path.write_text(json.dumps(case.config()))
    try:
        config = config_cases.parse(case.config(), path)
    except models.ModelDirectoryError as error:
        return Verdict(config_cases.wrong_sentence(str(error), path, case), "refused")
    except Exception as error:
        return Verdict(f"raw {type(error).__name__}: {error}", "raw")
    try:
        config_cases.write(directory, case, config)
        key = f"{case.base}: {config_cases.numbers(case, config)}"
        if key not in _LOGITS:
            _LOGITS[key] = config_cases.logits(directory, config)
        got = _LOGITS[key]
    except Exception as error:
        return Verdict(f"accepted, but {type(error).__name__}: {str(error)[:300]}", "raw")
    try:
        expected = theirs(directory, config)
    except Refused:
        return Verdict("", "accepted here only", config)
    except OtherTensors as error:
        return Verdict(f"other tensors: {error}", "other")
    if got.shape != expected.shape or not np.isfinite(got).all():
        return Verdict(f"shapes {got.shape} {expected.shape}, or not finite", "other")
    difference = float(np.abs(got - expected).max() / np.abs(expected).max())
    if not difference < TOLERANCE:
        return Verdict(f"logits differ by {difference:.2g} of the largest", "other")
    return Verdict("", "equal", config, config_cases.sample(expected))


# ---- the command -------------------------------------------------------------------------------


def run(cases: Iterable[Case], seconds: float) -> tuple[list[tuple[Case, Verdict]], int]:
    """Judges cases until there are no more, or the time is up. Returns all; prints findings."""
    end, done, num_findings = time.monotonic() + seconds, [], 0
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink):
                verdict = judge(case, Path(directory))
            done.append((case, verdict))
            if verdict.finding:
                num_findings += 1
                finding = verdict.finding.replace(directory, "")
                print(f"{case.base}: {json.dumps(case.changes)}: {finding}", flush=True)
            if time.monotonic() > end:
                break
    return done, num_findings


def record(name: str, done: list[tuple[Case, Verdict]], known: config_cases.Known) -> None:
    """Writes a file of config_cases.RECORDS."""
    rows: dict[str, int] = {}
    logits: list[np.ndarray] = []
    tensors: list[int] = []
    outcomes = []
    for case, verdict in done:
        row = None
        if verdict.config is not None and verdict.logits is not None:
            key = f"{case.base}: {config_cases.numbers(case, verdict.config)}"
            if (row := rows.get(key)) is None:
                row = rows[key] = len(logits)
                logits.append(verdict.logits)
                tensors.append(config_cases.checksum(verdict.config))
        outcomes.append(_outcome(verdict, row))
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "digest": config_cases.digest([case for case, _ in done]),
        "known": known,
    }
    outcome_array, tensor_array = np.array(outcomes, np.int16), np.array(tensors, np.uint32)
    _save(name, config_cases.Record(about, outcome_array, np.stack(logits), tensor_array))


def _outcome(verdict: Verdict, row: int | None) -> int:
    if verdict.finding:
        return config_cases.FINDING
    if row is not None:
        return row
    return config_cases.REFUSED if verdict.config is None else config_cases.ONLY_HERE


def _save(name: str, made: config_cases.Record) -> None:
    made.save(name)
    file = config_cases.file_of(name)
    size, cases = file.stat().st_size, len(made.outcomes)
    print(f"{file}: {cases} cases, {len(made.logits)} logits, {size} bytes")


def judge_again(name: str) -> int:
    """Judges the findings of the record again, and writes it. Returns the number of findings."""
    about, outcomes, logits, tensors = config_cases.Record.load(name)
    cases = config_cases.recorded(name, about["known"])
    assert config_cases.digest(cases) == about["digest"], "the record is of other cases"
    assert about["transformers"] == transformers.__version__, "the record is of another version"
    places = np.flatnonzero(outcomes == config_cases.FINDING)
    done, num_findings = run([cases[i] for i in places], float("inf"))
    rows, checksums = [*logits], [*tensors]
    for i, (_, verdict) in zip(places, done, strict=True):
        row = None
        if verdict.config is not None and verdict.logits is not None:
            row = len(rows)
            rows.append(verdict.logits)
            checksums.append(config_cases.checksum(verdict.config))
        outcomes[i] = _outcome(verdict, row)
    made = config_cases.Record(about, outcomes, np.stack(rows), np.array(checksums, np.uint32))
    _save(name, made)
    return num_findings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--singles", nargs="*", metavar="BASE")
    parser.add_argument("--record", choices=config_cases.RECORDS)
    parser.add_argument("--again", choices=config_cases.RECORDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if args.again:
        return 1 if judge_again(args.again) else 0
    bases = config_cases.RECORDS[args.record].bases if args.record else tuple(args.singles or BASES)
    known = known_keys(bases)
    seconds = float("inf") if args.record else args.seconds
    if args.record:
        cases: Iterable[Case] = config_cases.recorded(args.record, known)
    elif args.singles is not None:
        cases = config_cases.singles(known, args.singles or BASES)
    else:
        seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
        print(f"seed {seed}", flush=True)
        cases = config_cases.together(known, random.Random(seed), bases)
    done, num_findings = run(cases, seconds)
    counts = collections.Counter(verdict.kind for _, verdict in done)
    print(f"transformers {transformers.__version__}: {len(done)} cases, {dict(counts)}")
    print(f"{num_findings} findings")
    if args.record:
        record(args.record, done, known)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
