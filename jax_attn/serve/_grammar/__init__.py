"""Constrained decoding: grammars, their compilation and token masks. Private."""
