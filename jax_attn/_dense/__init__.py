"""dot_product_attention for dense batches: the kernels, or jax.numpy by blocks. Private."""
