"""Models in plain JAX on jax_attn's public operations."""
