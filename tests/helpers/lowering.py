"""Faster lowering of the many small programs of tests and of the processes they start."""

import threading

from jax._src.interpreters import mlir


def lower_quickly() -> None:
    """Lowers the main thread's programs in a shared MLIR context.

    JAX makes a context with all dialects for each program. That takes longer than lowering most
    programs of tests, and gets slower: each context keeps what it has lowered and has caches in
    each thread. A context also keeps its constants, so it is replaced after a number of programs.

    Other threads are left alone: nothing may stay behind in XLA's threads that call back into
    Python.
    """
    make, programs_of_a_context = mlir.make_ir_context, 256
    context, left = None, 0

    def make_or_reuse():
        nonlocal context, left
        if threading.current_thread() is not threading.main_thread():
            return make()
        if left == 0:
            context, left = make(), programs_of_a_context
        left -= 1
        return context

    mlir.make_ir_context = make_or_reuse
