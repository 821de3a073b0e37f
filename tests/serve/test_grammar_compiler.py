"""Grammars of clients: the cost limit of a compile, and the order of tenants."""

import threading
import time
from concurrent.futures import Future, wait

import pytest

from jax_attn.serve._grammar import compiler as grammar_compiler
from jax_attn.serve._grammar import grammar
from jax_attn.serve._grammar.compiler import Closed, GrammarCompiler, TooManyGrammars
from jax_attn.serve._grammar.grammar import GrammarError, Grammars
from jax_attn.serve._text import memory

# 20 s and 390 MB without a limit.
ENDLESS = grammar.from_json_schema({"type": "integer", "multipleOf": 999983})


@pytest.fixture
def compiler(tokenizer):
    made = GrammarCompiler(Grammars(tokenizer, 4096, [0]), num_threads=1)
    yield made
    made.close()


def test_a_grammar_that_takes_too_long_ends_with_its_process(compiler):
    begin = time.process_time()
    with pytest.raises(GrammarError, match="more than 1 s or 96 MB; make it simpler"):
        compiler.compile(ENDLESS, "a").result(60)
    assert time.process_time() - begin < 0.9  # the server has spent nothing on it
    first = compiler._trials[0]._process
    assert first is None
    compiled = compiler.compile(grammar.from_regex("[a-z]+"), "a").result(60)
    assert compiled.matcher().take_forced() == [] and compiled.num_bytes > 0
    # A second try costs nothing.
    process = compiler._trials[0]._process
    with pytest.raises(GrammarError, match="make it simpler"):
        compiler.compile(ENDLESS, "b").result(0)
    assert compiler._trials[0]._process is process and process.poll() is None


def test_a_grammar_that_takes_too_much_memory(monkeypatch, tokenizer):
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_SECONDS", 30.0)
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_BYTES", 8 << 20)
    compiler = GrammarCompiler(Grammars(tokenizer, 4096, [0]), num_threads=1)
    try:
        with pytest.raises(GrammarError, match="make it simpler"):
            compiler.compile(ENDLESS, "a").result(120)
        compiler.compile(grammar.from_regex("a"), "a").result(60)
    finally:
        compiler.close()


def wide(number: int) -> str:
    """A grammar that keeps a megabyte."""
    names = [f"p{number}_{i}" for i in range(300)]
    return grammar.from_json_schema(
        {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    )


@pytest.mark.skipif(not hasattr(memory._libc(), "mallinfo2"), reason="needs glibc 2.33")
def test_the_cache_knows_what_it_keeps(tokenizer, monkeypatch):
    """Grammars that take the place of others count in full, and go back to the system."""
    given_back = []
    monkeypatch.setattr(memory, "give_back", lambda: given_back.append(1))
    monkeypatch.setattr(grammar, "_GIVE_BACK_BYTES", 2 << 20)
    grammars = Grammars(tokenizer, 4096, [0], max_bytes=4 << 20)
    compiler = GrammarCompiler(grammars, num_threads=1)
    try:
        sizes = [compiler.compile(wide(i), "a").result(60).num_bytes for i in range(9)]
    finally:
        compiler.close()
    assert min(sizes) > 500_000 and max(sizes) < 1.5 * min(sizes)
    assert len(grammars) == (4 << 20) // max(sizes)
    dropped = (9 - len(grammars)) * min(sizes)
    assert 1 <= len(given_back) <= dropped // (2 << 20) + 1


def test_what_is_wrong_with_a_grammar_is_said(compiler):
    with pytest.raises(GrammarError, match="unclosed group"):
        compiler.compile(grammar.from_regex("("), "a").result(60)
    with pytest.raises(GrammarError, match="unclosed group"):
        compiler.compile(grammar.from_regex("("), "a").result(0)


def test_the_cache_answers_at_once(compiler):
    text = grammar.from_regex("[0-9]{3}")
    compiled = compiler.compile(text, "a").result(60)
    again = compiler.compile(text, "a")
    assert again.done() and again.result() is compiled
    assert compiler._grammars.num_compiled == 1
    # Another tenant gets its own grammar, because copies share a budget that may be used up.
    assert compiler.compile(text, "b").result(60) is not compiled


class Gate:
    """Holds the compiler's thread in its first grammar, and notes the order."""

    def __init__(self, compiler, monkeypatch):
        self.order, self.goes_on, self.has_begun = [], threading.Event(), threading.Event()
        monkeypatch.setattr(compiler, "_compile", self._compile)

    def _compile(self, trial, tenant, text):
        self.order.append(text)
        self.has_begun.set()
        assert self.goes_on.wait(60)
        raise GrammarError("grammar: no.")


def test_tenants_take_turns(compiler, monkeypatch):
    gate = Gate(compiler, monkeypatch)
    futures = [compiler.compile("first", "a")]
    assert gate.has_begun.wait(60)
    futures += [compiler.compile(f"a{i}", "a") for i in range(50)]
    futures += [compiler.compile(f"b{i}", "b") for i in range(2)]
    futures += [compiler.compile("c", "c")]
    gate.goes_on.set()
    wait(futures, 60)
    assert gate.order[:7] == ["first", "a0", "b0", "c", "a1", "b1", "a2"]


def test_a_tenant_has_its_part_of_the_queue(compiler, monkeypatch):
    gate = Gate(compiler, monkeypatch)
    compiler.compile("first", "a")
    assert gate.has_begun.wait(60)
    for i in range(grammar_compiler._MAX_QUEUED):
        compiler.compile(f"a{i}", "a")
    with pytest.raises(TooManyGrammars, match="64 grammars of a key"):
        compiler.compile("one more", "a")
    compiler.compile("a0", "a")  # which it waits for anyway
    last = compiler.compile("b", "b")
    gate.goes_on.set()
    with pytest.raises(GrammarError):
        last.result(60)


def test_what_nobody_waits_for_is_not_compiled(compiler, monkeypatch):
    gate = Gate(compiler, monkeypatch)
    compiler.compile("first", "a")
    assert gate.has_begun.wait(60)
    gone: Future = compiler.compile("gone", "a")
    shared = [compiler.compile("shared", "a") for _ in range(2)]
    assert gone.cancel() and shared[0].cancel()
    gate.goes_on.set()
    with pytest.raises(GrammarError):
        shared[1].result(60)
    assert gate.order == ["first", "shared"]


def test_close_ends_threads_and_processes(compiler):
    compiler.compile(grammar.from_regex("a"), "a").result(60)
    process = compiler._trials[0]._process
    compiler.close()
    for thread in compiler._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert process.wait(60) is not None
    with pytest.raises(Closed):
        compiler.compile(grammar.from_regex("b"), "a").result(60)


def test_who_waits_when_it_closes_is_told(compiler):
    """In the queue, and in the middle of a grammar."""
    futures = [compiler.compile(ENDLESS, "a"), compiler.compile(grammar.from_regex("a"), "a")]
    compiler.close()
    for future in futures:
        with pytest.raises(Closed):
            future.result(60)
