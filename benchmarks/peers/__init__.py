"""Other people's attention on the same workloads: each file is a process of its own.

    python -m benchmarks.peers.<name> [--select IDS] [--shrink N]

prints one JSON object a measurement, {"workload", "peer", "us"} or {"workload", "peer", "error"},
and {"note"} for what is worth knowing. bench_gpu.py runs them in the same command as ours.
"""
