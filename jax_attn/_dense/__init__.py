"""dot_product_attention: dense batches on the same kernels, or on blocks in jax.numpy. Private."""
