"""Variants: users' logit and mask functions traced into programs for the kernels. Private."""
