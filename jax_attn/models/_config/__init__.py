"""Model directories and config.json: keys, rotary embeddings, quantization. Private."""
