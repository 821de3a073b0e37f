"""Matmuls with weights in panels and in quantized formats. Private."""
