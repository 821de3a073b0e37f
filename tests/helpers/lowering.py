"""A shorter way through JAX for the many small programs of tests, and of processes they start."""

import threading

from jax._src.interpreters import mlir


def lower_quickly() -> None:
    """Has JAX lower the main thread's programs in one MLIR context.

    It makes one for each program, with all dialects, which takes longer than to lower most of the
    programs that tests have, and ever longer, as it keeps what it has lowered, and each context
    has caches in each thread. A context keeps its constants: after so many programs comes another.

    Other threads are left alone: of XLA's, which call back into Python, nothing may stay behind.
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
