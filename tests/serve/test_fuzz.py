"""A few seconds of `make fuzz` with a fixed seed, and every failure that it ever found."""

import json
import random

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from fuzz import bodies, search
from fuzz.routes import RoutesInProcess, RoutesOverHttp
from fuzz.sockets import Conversation, Sockets
from fuzz.tool_calls import ToolCalls

from helpers.serve.live_server import serving

SEED = 15
FOUND = [
    (name, path)
    for name in ("routes", "sockets", "calls")
    for path in sorted((search.DATA / name).glob("*.json"))
]


@pytest.fixture(scope="module")
def routes():
    part = RoutesInProcess()
    yield part
    part.close()


@pytest.fixture(scope="module")
def sockets():
    part = Sockets()
    yield part
    part.close()


@pytest.fixture(scope="module")
def calls():
    return ToolCalls()


def test_routes(routes, tmp_path):
    search.search(routes, SEED, num_cases=600, directory=tmp_path)
    assert {200, 400, 404, 405, 415} <= routes.statuses.keys()


def test_routes_over_http():
    with serving() as server:
        part = RoutesOverHttp(server)
        for seed in range(SEED, SEED + 100):
            part.run([bodies.request(random.Random(seed))])
        part.close()
        assert server.get("/health").status == 200
    assert {200, 400} <= part.statuses.keys()


def test_sockets(sockets, tmp_path):
    search.search(sockets, SEED, num_cases=1000, at_once=50, directory=tmp_path)
    assert {200, 400, 404, 405} <= sockets.statuses.keys()


@pytest.mark.parametrize("seed", range(3))
def test_tool_calls(calls, tmp_path, seed):
    search.search(calls, seed, num_cases=25, directory=tmp_path)
    assert {"written", "through tokens", "demanded"} <= calls.done.keys()


@pytest.mark.parametrize(("name", "path"), FOUND, ids=lambda value: getattr(value, "stem", value))
def test_what_failed_once(routes, sockets, calls, name, path):
    search.replay({"routes": routes, "sockets": sockets, "calls": calls}[name], path)


# ---- the fuzzer finds planted faults -----------------------------------------------------------


@pytest.mark.parametrize("path", bodies.PATHS)
def test_examples_are_good(routes, path):
    for body in bodies.EXAMPLES[path]:
        assert routes.answer(bodies.post(path, body)).status == 200, body


def test_a_failing_route_is_shrunk_and_kept(routes, monkeypatch, tmp_path):
    """Only the failing part of the body is left."""
    monkeypatch.setattr(search, "SHRINK_SECONDS", 3600)
    answer = routes.answer

    def failing(case):
        result = answer(case)
        if b'"seed"' in case.body and case.path == "/v1/completions":
            result.status = 500
        return result

    monkeypatch.setattr(routes, "answer", failing)
    with pytest.raises(search.Failure) as failure:
        search.search(routes, SEED, num_cases=2000, directory=tmp_path)
    with pytest.raises(AssertionError, match="500"):
        search.replay(routes, failure.value.path)
    (case,) = json.loads(failure.value.path.read_text())
    assert len(case["body"]) < 20 and "seed" in case["body"]
    # The same seed fails again, at the same case.
    with pytest.raises(search.Failure, match=f"case {failure.value.index}:"):
        search.search(routes, SEED, num_cases=2000, directory=tmp_path)


def test_a_sequence_that_is_left_is_found(routes):
    routes.engine.live["nobody's"] = 1
    try:
        with pytest.raises(AssertionError, match="nobody waits for"):
            search.search(routes, SEED, num_cases=1)
    finally:
        routes.engine.live.clear()


def test_a_traceback_in_the_log_is_found(sockets, monkeypatch, tmp_path):
    from jax_attn.serve._http.connection import Connection

    def fails(self, data):
        raise RuntimeError("broken")

    monkeypatch.setattr(Connection, "data_received", fails)
    with pytest.raises(AssertionError):
        sockets.run([Conversation((("send", b"GET / HTTP/1.1\r\n\r\n"),))])
