"""Variants: users' logit and mask functions, traced to programs for the kernels. Private."""
