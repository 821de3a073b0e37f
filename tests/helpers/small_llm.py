"""Options of an LLM that compiles in seconds, and what holds when it has nothing to do."""

from jax_attn import LLM

SMALL = {"max_running": 4, "max_step_tokens": 16, "num_pages": 64, "page_size": 8}


def check_at_rest(llm: LLM) -> None:
    """Asserts that the engine has nothing left of any request."""
    llm.pause()
    llm.resume()
    engine = llm._runtime.engine("", runs=False)
    assert not engine._recipients
    scheduler = engine._engine.scheduler
    assert not scheduler.running and not scheduler.waiting
    scheduler.check_integrity()
