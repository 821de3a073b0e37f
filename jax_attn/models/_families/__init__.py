"""Families of decoders: from the keys of config.json to a ModelConfig. Private."""
