"""Which sequence computes which tokens, and which pages it has: pure Python, no JAX. Private."""
