"""Model directories and config.json: families, keys, rotary embeddings. Private."""
