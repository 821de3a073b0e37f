"""The FFI boundary: custom calls, their JAX transformations, precompilation. Private."""
