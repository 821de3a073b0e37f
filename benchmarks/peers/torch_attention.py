"""PyTorch SDPA on dense batches, through cuDNN and the flash kernels; also ceilings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bursts import Timing
from benchmarks.peers.harness import Peer, expected_us, is_dense, num_sets, time_graph
from benchmarks.workloads import READ_BYTES, Workload

BACKENDS = {
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
}


def main() -> None:
    peer = Peer()
    peer.report(note=f"torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}")
    ceilings(peer)
    for workload in filter(is_dense, peer.workloads("backward", "prefill", "decode")):
        for name, backend in BACKENDS.items():
            if name == "torch flash" and workload.kind == "decode":
                continue
            label = f"{name} dense" if workload.kind == "decode" else name
            peer.measure(workload.id, label, lambda w=workload, b=backend: time_sdpa(w, b))
        torch.cuda.empty_cache()


def time_sdpa(workload: Workload, backend: SDPBackend) -> Timing:
    w = workload
    sets = [
        [
            torch.randn(
                w.batch_size, lens[0], heads, w.head_dim, dtype=torch.bfloat16, device="cuda"
            ).transpose(1, 2)
            for lens, heads in (
                (w.qo_lens, w.num_qo_heads),
                (w.kv_lens, w.num_kv_heads),
                (w.kv_lens, w.num_kv_heads),
            )
        ]
        for _ in range(num_sets(w))
    ]
    gqa = {"enable_gqa": True} if w.num_qo_heads != w.num_kv_heads else {}
    causal = w.causal and w.qo_lens[0] > 1

    def attend(i: int) -> torch.Tensor:
        q, k, v = sets[i % len(sets)]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **gqa)

    @functools.cache
    def forward(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o and its gradient, cached. The first call must be on the stream that is captured
        later, because autograd computes gradients on the forward pass's stream."""
        for x in sets[i]:
            x.requires_grad_()
        o = attend(i)
        return o, torch.randn_like(o)

    def backward(i: int) -> Any:
        i %= 2  # the sets that time_graph uses first, before the capture
        o, d_o = forward(i)
        return torch.autograd.grad(o, sets[i], d_o, retain_graph=True)

    with sdpa_kernel(backend):
        run = backward if w.kind == "backward" else attend
        return time_graph(run, expected_us(w), sustained=w.sustained)


def ceilings(peer: Peer) -> None:
    """Measures read bandwidth by a plain kernel and torch's sum, and a bf16 cuBLAS matmul."""
    data = torch.empty(READ_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    halves = data.view(torch.bfloat16)
    matrices = [torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    runs: dict[tuple[str, str], Callable[[], Callable[[int], Any]]] = {
        ("ceiling/read", "torch sum"): lambda: lambda i: halves.sum(dtype=torch.float32),
        ("ceiling/read", "read kernel"): lambda: read_kernel(data),
        ("ceiling/matmul", "torch"): lambda: lambda i: torch.mm(*matrices),
    }
    for (workload, name), make in runs.items():
        peer.measure(workload, name, lambda m=make: time_graph(m(), 1000))


def read_kernel(data: torch.Tensor) -> Callable[[int], Any]:
    """Reads all of `data`, 16 bytes a load, eight loads in flight a thread."""
    import cupy

    source = r"""
    extern "C" __global__ void read(const uint4* __restrict__ in, unsigned* out, long n) {
      const long stride = (long)gridDim.x * blockDim.x;
      long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
      unsigned sum = 0;
      for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 r[8];
    #pragma unroll
        for (int j = 0; j < 8; ++j) r[j] = __ldcs(in + i + j * stride);
    #pragma unroll
        for (int j = 0; j < 8; ++j) sum ^= r[j].x ^ r[j].y ^ r[j].z ^ r[j].w;
      }
      if (sum == 0x12345678u) out[0] = sum;
    }"""
    kernel = cupy.RawKernel(source, "read")
    words = torch.zeros(1, dtype=torch.int32, device="cuda")
    threads, num_vectors = 512, data.numel() // 4
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * 4

    def run(i: int) -> None:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        arguments = (data.data_ptr(), words.data_ptr(), num_vectors)
        kernel((blocks,), (threads,), arguments, stream=stream)

    return run


if __name__ == "__main__":
    main()
