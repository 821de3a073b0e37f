"""Model directories and what config.json says: families, keys, rotary embeddings. Private."""
