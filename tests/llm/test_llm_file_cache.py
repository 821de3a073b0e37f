"""An LLM that finds the prefixes of one before it, in files."""

import pytest

pytest.importorskip("llguidance", reason="needs the extra `serve`")

from helpers.small_llm import SMALL, check_at_rest
from jax_attn import LLM, SamplingParams, models
from jax_attn.serve._engine.engine import Engine
from jax_attn.serve._options import from_keywords
from jax_attn.serve._sizing import bytes_of_page

TEXTS = [f"{i} is this chat. " + "def f(x):\n    return x + 1\n" * 6 for i in range(5)]
PARAMS = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture
def made(model, tmp_path, monkeypatch):
    """Options of an LLM, whatever a page costs on this machine."""
    monkeypatch.setattr(Engine, "_measure_host", lambda self: None)
    page = bytes_of_page(model.config, from_keywords(SMALL | {"dtype": "float32"}))
    return SMALL | {
        "num_pages": 40,
        "max_step_tokens": 8,
        "batch_invariant": True,
        "host_cache_bytes": 10 * page,
        "file_cache": tmp_path / "cache",
        "file_cache_bytes": 1 << 28,
    }


def turn(llm, texts, **more):
    """(text, cached tokens) of each, one after the other."""
    found = [llm.generate(text, PARAMS, **more)[0] for text in texts]
    check_at_rest(llm)
    return [(each.completions[0].text, each.num_cached_tokens) for each in found]


def test_turns_of_chats_with_a_restart_between(model, made):
    with LLM(model, directory=models.BUNDLED, **made) as llm:
        first = turn(llm, TEXTS)
    assert [cached for _, cached in first] == [0] * 5
    longer = [text + answer for text, (answer, _) in zip(TEXTS, first, strict=True)]
    plain = {name: value for name, value in made.items() if not name.startswith("file")}
    with LLM(model, directory=models.BUNDLED, **plain) as llm:
        expected = turn(llm, longer)
    with LLM(model, directory=models.BUNDLED, **made) as llm:
        again = turn(llm, longer)
        with pytest.raises(ValueError, match="--file-cache: expected a directory that no other"):
            LLM(model, directory=models.BUNDLED, **made)
    assert [text for text, _ in again] == [text for text, _ in expected]
    assert [cached for _, cached in expected] == [0] * 5
    assert all(cached >= 56 for _, cached in again)


def test_other_weights_know_nothing(model, made):
    with LLM(model, directory=models.BUNDLED, **made) as llm:
        turn(llm, TEXTS)
    embed = model.params["embed"].at[901, 3].add(1e-3)  # one of a million numbers
    other = model._replace(params=model.params | {"embed": embed})
    with LLM(other, directory=models.BUNDLED, **made) as llm:
        assert [cached for _, cached in turn(llm, TEXTS)] == [0] * 5
