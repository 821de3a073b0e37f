"""The FFI boundary: custom calls, JAX's transformations of them, precompilation. Private."""
