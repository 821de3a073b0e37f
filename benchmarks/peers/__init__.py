"""Other libraries' attention on the same workloads. Each file runs as its own process.

    python -m benchmarks.peers.<name> [--select IDS] [--shrink N]

prints one JSON object per measurement, {"workload", "peer", "us"} or {"workload", "peer", "error"},
and {"note"} for remarks. bench_gpu.py runs them in the same command as ours.
"""
