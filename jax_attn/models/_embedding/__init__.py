"""Encoders and embedding models. Private."""
