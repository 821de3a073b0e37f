"""FlashInfer's decode, prefill (fa2, fa3), persistent, cascade and MLA wrappers, append, merge.

Only head_dim 128 (MLA: 512 + 64) in bf16: each further combination takes minutes of nvcc.
--build-only compiles the modules, all in one ninja run, and measures nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.bursts import Timing
from benchmarks.peers.harness import Peer, expected_us, num_sets, time_graph
from benchmarks.workloads import Workload

BF16, INT32 = torch.bfloat16, torch.int32
HEAD_DIM = 128
HEAD_DIMS_MLA = (512, 64)  # ckv, kpe


def main() -> None:
    peer = Peer(build_only="compile the modules, measure nothing", no_fa3="leave fa3 out")
    flashinfer = peer.require("flashinfer")
    fa3 = not peer.arguments.no_fa3
    peer.report(note=f"flashinfer {flashinfer.__version__}")
    begin = time.perf_counter()
    build(fa3)
    peer.report(note=f"flashinfer: modules ready in {time.perf_counter() - begin:.0f} s")
    if peer.arguments.build_only:
        return
    prefills = ["fa2", "fa3"] if fa3 else ["fa2"]
    # The slowest come last: prefill, and the cascade, which compiles one more module for minutes.
    kinds = ("decode", "mla", "mixed", "append", "merge", "prefill", "shared_prefix")
    for workload in (w for kind in kinds for w in peer.workloads(kind)):
        if workload.kind != "mla" and workload.head_dim != HEAD_DIM:
            continue
        for name, make in candidates(workload, prefills).items():
            peer.measure(workload.id, f"flashinfer {name}", lambda w=workload, m=make: _time(w, m))
            torch.cuda.empty_cache()


def build(fa3: bool) -> None:
    """Builds every module that the wrappers below need, in one parallel ninja run."""
    from flashinfer import jit

    # fa2 and the persistent kernel have one module for k and v of equal strides, as here, and one
    # for other strides. The public functions build a third one, which no wrapper needs.
    from flashinfer.jit.attention.modules import (
        _gen_batch_attention_primary_module,
        _gen_batch_prefill_primary_module,
    )
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.page import gen_page_module

    types = (BF16, BF16, BF16, INT32, HEAD_DIM, HEAD_DIM, 0)
    specs = [
        _gen_batch_prefill_primary_module("fa2", *types, False, False, False),
        jit.gen_batch_decode_module(*types, False, False),
        _gen_batch_attention_primary_module(*types, False, False),
        gen_page_module(),
        gen_cascade_module(),
        jit.gen_batch_mla_module("fa2", *types[:4], *HEAD_DIMS_MLA, False),
    ]
    if fa3:
        specs.append(jit.gen_batch_mla_module("fa3", *types[:4], *HEAD_DIMS_MLA, False))
        specs.append(jit.gen_batch_prefill_module("fa3", *types, False, False, False))
    jit.build_jit_specs(specs, verbose=False)


def candidates(workload: Workload, prefills: list[str]) -> dict[str, Callable[[Workload], Any]]:
    if workload.kind == "append":
        return {"append": make_append}
    if workload.kind == "merge":
        return {"merge": make_merge}
    if workload.kind == "mla":
        return {f"mla {name}": lambda w, n=name: make_mla(w, n) for name in prefills}
    if workload.kind in ("decode", "shared_prefix"):
        makers = {
            "decode": lambda w: make_decode(w, tensor_cores=False),
            "decode tc": lambda w: make_decode(w, tensor_cores=True),
            "persistent": make_persistent,
        }
        return makers | ({"cascade": make_cascade} if workload.shared_len else {})
    wrap = make_ragged if workload.page_size is None else make_paged
    makers = {name: lambda w, n=name: wrap(w, n) for name in prefills}
    return makers if workload.page_size is None else {**makers, "persistent": make_persistent}


def _time(workload: Workload, make: Callable[[Workload], Callable[[int], Any]]) -> Timing:
    return time_graph(make(workload), expected_us(workload), sustained=workload.sustained)


# Each maker plans once and returns run(i) over data set i.


def make_decode(w: Workload, *, tensor_cores: bool) -> Callable[[int], Any]:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        *_pages(w), w.num_qo_heads, w.num_kv_heads, w.head_dim, w.page_size,
        q_data_type=BF16, kv_data_type=BF16,
    )  # fmt: skip
    q, o, caches = _query(w), _query(w), _caches(w)
    return lambda i: wrapper.run(q, next(caches), out=o)


def make_paged(w: Workload, backend: str) -> Callable[[int], Any]:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    wrapper.plan(
        _ints(w.qo_indptr), *_pages(w), w.num_qo_heads, w.num_kv_heads, w.head_dim, w.page_size,
        causal=w.causal, q_data_type=BF16, kv_data_type=BF16,
    )  # fmt: skip
    q, o, caches = _query(w), _query(w), _caches(w)
    return lambda i: wrapper.run(q, next(caches), out=o)


def make_ragged(w: Workload, backend: str) -> Callable[[int], Any]:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    wrapper.plan(
        _ints(w.qo_indptr), _ints(w.kv_indptr), w.num_qo_heads, w.num_kv_heads, w.head_dim,
        causal=w.causal, q_data_type=BF16, kv_data_type=BF16,
    )  # fmt: skip
    shape = (sum(w.kv_lens), w.num_kv_heads, w.head_dim)
    sets = itertools.cycle([(_normal(*shape), _normal(*shape)) for _ in range(2)])
    q, o = _query(w), _query(w)
    return lambda i: wrapper.run(q, *next(sets), out=o)


def make_persistent(w: Workload) -> Callable[[int], Any]:
    import flashinfer

    wrapper = flashinfer.BatchAttention(kv_layout="NHD")
    indptr, indices, _ = _pages(w)
    wrapper.plan(
        _ints(w.qo_indptr), indptr, indices, _ints(w.kv_lens), w.num_qo_heads, w.num_kv_heads,
        w.head_dim, w.head_dim, w.page_size,
        causal=w.causal, q_data_type=BF16, kv_data_type=BF16,
    )  # fmt: skip
    q, o, caches = _query(w), _query(w), _caches(w)
    lse = torch.empty(w.nnz_qo, w.num_qo_heads, dtype=torch.float32, device="cuda")
    return lambda i: wrapper.run(q, next(caches), out=o, lse=lse)


def make_cascade(w: Workload) -> Callable[[int], Any]:
    """Makes a two-level cascade, set up by the caller: shared prefix, and each request's suffix."""
    import flashinfer

    assert w.page_size is not None
    num_shared = w.shared_len // w.page_size
    tables = np.split(w.page_indices(), w.page_indptr[1:-1])
    own = [pages[num_shared:] for pages in tables]
    own_indptr = w.page_indptr - num_shared * np.arange(w.batch_size + 1)
    last = [(n - 1) % w.page_size + 1 for n in w.kv_lens]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(), "NHD")
    wrapper.plan(
        [_ints([0, w.nnz_qo]), _ints(w.qo_indptr)],
        [_ints([0, num_shared]), _ints(own_indptr)],
        [_ints(tables[0][:num_shared]), _ints(np.concatenate(own))],
        [_ints([w.page_size]), _ints(last)],
        w.num_qo_heads, w.num_kv_heads, w.head_dim, w.page_size,
        causal=False, q_data_type=BF16,
    )  # fmt: skip
    q, caches = _query(w), _caches(w)
    return lambda i: wrapper.run(q, next(caches))


def make_mla(w: Workload, backend: str) -> Callable[[int], Any]:
    import flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(), backend=backend)
    indptr, indices, _ = _pages(w)
    lengths = {"qo_indptr": _ints(w.qo_indptr), "kv_len_arr": _ints(w.kv_lens)}
    wrapper.plan(
        metadata=flashinfer.mla.MLAPlanMetadata.csr(
            kv_indptr=indptr, kv_indices=indices, **lengths
        ),
        num_heads=w.num_qo_heads,
        head_dim_ckv=HEAD_DIMS_MLA[0],
        head_dim_kpe=HEAD_DIMS_MLA[1],
        page_size=w.page_size,
        causal=w.causal,
        sm_scale=192**-0.5,
        q_data_type=BF16,
        kv_data_type=BF16,
        query_layout="split",
        kv_cache_layout="split",
    )
    q = tuple(_normal(w.nnz_qo, w.num_qo_heads, dim) for dim in HEAD_DIMS_MLA)
    o = torch.empty_like(q[0])
    caches = itertools.cycle(
        [
            tuple(_normal(w.num_pages, w.page_size, dim) for dim in HEAD_DIMS_MLA)
            for _ in range(num_sets(w))
        ]
    )
    return lambda i: wrapper.run(query=q, kv_cache=next(caches), out=o)


def make_append(w: Workload) -> Callable[[int], Any]:
    import flashinfer

    indptr, indices, last_page_len = _pages(w)
    request = np.repeat(np.arange(w.batch_size), w.qo_lens)
    position = np.concatenate(
        [np.arange(kv - qo, kv) for qo, kv in zip(w.qo_lens, w.kv_lens, strict=True)]
    )
    request, position = _ints(request), _ints(position)
    k_new, v_new = (_normal(w.nnz_qo, w.num_kv_heads, w.head_dim) for _ in range(2))
    caches = _caches(w)
    return lambda i: flashinfer.append_paged_kv_cache(
        k_new, v_new, request, position, next(caches), indices, indptr, last_page_len
    )


def make_merge(w: Workload) -> Callable[[int], Any]:
    import flashinfer

    shape = (w.nnz_qo, w.num_states, w.num_qo_heads)
    sets = [
        (_normal(*shape, w.head_dim), torch.randn(*shape, device="cuda"))
        for _ in range(1 + (512 << 20) // w.bytes)
    ]
    return lambda i: flashinfer.merge_states(*sets[i % len(sets)])


def _workspace() -> torch.Tensor:
    return torch.empty(512 << 20, dtype=torch.uint8, device="cuda")


def _ints(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.int32), device="cuda")


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def _query(w: Workload) -> torch.Tensor:
    return _normal(w.nnz_qo, w.num_qo_heads, w.head_dim)


def _pages(w: Workload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (page_indptr, page_indices, tokens in each last page)."""
    assert w.page_size is not None
    last = [(n - 1) % w.page_size + 1 for n in w.kv_lens]
    return _ints(w.page_indptr), _ints(w.page_indices()), _ints(last)


def _caches(w: Workload) -> Any:
    """Yields (k_pages, v_pages) of the data sets in an endless cycle."""
    shape = (w.num_pages, w.page_size, w.num_kv_heads, w.head_dim)
    return itertools.cycle([(_normal(*shape), _normal(*shape)) for _ in range(num_sets(w))])


if __name__ == "__main__":
    main()
