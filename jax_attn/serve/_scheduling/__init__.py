"""Which sequence computes what, and which pages it has: pure Python, no JAX. Private."""
