"""Benchmarks: `make bench` (CPU) and `make bench-gpu`; results in results/<device>.json."""
