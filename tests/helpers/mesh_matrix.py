"""Every public function on meshes of two CPU devices: each kind of axes, split, and heads.

`check(name)` runs in a process with two devices (test_mesh_matrix.py). The truth is one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_attn as ja
from helpers import entry_points
from helpers.entry_points import Entry, compare, ints, normal, with_slopes
from jax_attn import compat, parallel

AXIS, SIZE = "x", 2
HEADS = {"mha": (4, 4), "mqa": (4, 1), "gqa": (4, 2)}
DIM = entry_points.DIM


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A call on a mesh and what it equals on one device.

    entry: the call, with its whole arrays.
    specs: the PartitionSpecs of the arrays. results: those of the results, as in a shard_map.
    whole: the same on one device, if that is another call. its_arrays: arrays for it.
    with_mesh: call(mesh, *arrays) for functions that take the mesh; entry.call is then for arrays
        inside shard_map.
    places: "mesh" or "shard_map" for a call that is for one of them; "": both.
    order: puts rows of the results in the order of `whole`.
    """

    entry: Entry
    specs: tuple[Any, ...]
    results: Any
    whole: Entry | None = None
    with_mesh: Callable[..., Any] | None = None
    places: str = ""
    order: Callable[[Any], Any] = lambda x: x


def over(axis: int | None, ndim: int = 4) -> P:
    """Split along an axis, or not at all."""
    return P() if axis is None else P(*[None] * (axis % ndim), AXIS)


# ---- dense batches -------------------------------------------------------------------------------


def dense() -> dict[str, OnMesh]:
    """Splits over requests and heads, and none, with what a call reads besides q, k and v."""
    found = {}
    attend = functools.partial(ja.dot_product_attention, return_residual=True)
    for (heads, sizes), axis in itertools.product(HEADS.items(), (0, 2, None)):
        q, k, v = entry_points.dense_arrays(4, *sizes)
        rows = over(axis)
        if (heads, axis) == ("mqa", 2):
            continue  # one KV head is not split; see test_one_kv_head_is_not_split
        bias, mask = normal(1, sizes[0], 1, 7), np.random.default_rng(3).random((4, 1, 5, 7)) < 0.7
        lens = {"query_seq_lengths": [5, 3, 0, 5], "key_value_seq_lengths": [0, 6, 7, 2]}
        calls = {
            "plain": (functools.partial(attend, is_causal=True), ()),
            "more": (
                lambda q, k, v, bias, mask, lens, scale: attend(
                    q, k, v, bias, mask, key_value_seq_lengths=lens, scale=scale),
                ((bias, over(1) if axis == 2 else P()), (mask, over(0) if axis == 0 else P()),
                 (ints(5, 7, 1, 0), over(0) if axis == 0 else P()), (np.float32(0.3), P())),
            ),
        }  # fmt: skip
        if heads == "gqa":
            calls["lengths"] = functools.partial(attend, **lens, logits_soft_cap=3.0), ()
        for name, (call, others) in calls.items():
            of = (0, 1, 2, 3) if others else (0, 1, 2)
            entry = Entry(call, (q, k, v, *(x for x, _ in others)), of)
            specs = rows, rows, rows, *(spec for _, spec in others)
            # A function cannot close over the lengths of all requests where it sees some.
            places = "mesh" if name == "lengths" and axis == 0 else ""
            found[f"{heads} {name} over {axis}"] = OnMesh(entry, specs, (rows, rows), places=places)
    return found


def flax() -> dict[str, OnMesh]:
    found = {}
    for (heads, sizes), axis in itertools.product(HEADS.items(), (0, 2, None)):
        if sizes[0] != sizes[1]:
            continue
        arrays = entry_points.dense_arrays(4, *sizes)
        mask = np.tril(np.ones((1, 1, 5, 7), np.float32))
        entry = Entry(
            lambda q, k, v, mask: compat.flax_attention(q, k, v, mask=mask),
            (*arrays, mask),
            (0, 1, 2),
        )
        rows = over(axis)
        found[f"{heads} over {axis}"] = OnMesh(entry, (rows, rows, rows, P()), rows)
    return found


# ---- plans of one device's heads -----------------------------------------------------------------


def planned() -> dict[str, OnMesh]:
    found = {}
    for heads, (num_qo, num_kv) in HEADS.items():
        num_kv = max(num_kv, SIZE)  # MQA on each device
        part = {"num_qo_heads": num_qo // SIZE, "num_kv_heads": num_kv // SIZE}
        all_of_it = {"num_qo_heads": num_qo, "num_kv_heads": num_kv}
        q, k, v = normal(6, num_qo, DIM), *normal(2, 9, num_kv, DIM)
        sinks = normal(num_qo)

        def documents(at: Any, ids: Any) -> Any:
            return ids[at.q_row] != ids[at.kv_pos]

        ids = np.int32(np.arange(9) % 2)
        variant = ja.Variant(mask=documents, operands={"ids": ids})

        def attend(q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> Any:
            return ja.attention(q, k, v, plan, sinks=sinks, return_lse=True)

        def masked(q: Any, k: Any, v: Any, ids: Any, plan: Any) -> Any:
            return ja.attention(q, k, v, plan, variant_operands={"ids": ids}, return_lse=True)

        rows = over(1)
        for name, call, more, spec, of, fields in (
            ("sinks", attend, sinks, P(AXIS), (0, 1, 2, 3), {}),
            ("variant", masked, ids, P(), (0, 1, 2), {"variant": variant}),
        ):
            plans = (
                entry_points.plan_of(entry_points.ragged(**x, **fields)) for x in (part, all_of_it)
            )
            entry, whole = (Entry(call, (q, k, v, more, plan), of) for plan in plans)
            specs = rows, rows, rows, spec, P()
            found[f"{heads} {name}"] = OnMesh(entry, specs, (rows, rows), whole)
            if heads == "mqa" and name == "variant":
                found["mqa, every device has the KV head"] = shared_keys(
                    call, q, k, v, more, fields
                )
            everywhere = (P(),) * 5
            found[f"{heads} {name} whole"] = OnMesh(whole, everywhere, (P(), P()))
    return found


def shared_keys(
    call: Callable[..., Any], q: Any, k: Any, v: Any, more: Any, fields: dict[str, Any]
) -> OnMesh:
    """Query heads split in a shard_map, one KV head for all: its gradient is a sum over devices."""
    part, whole = (
        entry_points.plan_of(entry_points.ragged(num_qo_heads=n, num_kv_heads=1, **fields))
        for n in (len(q[0]) // SIZE, len(q[0]))
    )
    entry, of_whole = (
        Entry(call, (q, k[:, :1], v[:, :1], more, plan), (0, 1, 2)) for plan in (part, whole)
    )
    specs = over(1), P(), P(), P(), P()
    return OnMesh(entry, specs, (over(1), over(1)), of_whole, places="shard_map")


def appended() -> dict[str, OnMesh]:
    pages, new = normal(2, 3, 4, 4, DIM), normal(6, 4, DIM)
    part, whole = (
        entry_points.plan_of(entry_points.spec(num_qo_heads=n, num_kv_heads=n)) for n in (2, 4)
    )

    def call(k: Any, v: Any, new: Any, plan: Any) -> Any:
        return ja.append_kv(k, v, new, new, plan, layer=1)

    of_pages = over(3, 5)
    specs = of_pages, of_pages, over(1), P()
    return {
        "heads": OnMesh(
            Entry(call, (pages, pages + 1, new, part)), specs, (of_pages, of_pages),
            Entry(call, (pages, pages + 1, new, whole)),
        ),
        "whole": OnMesh(
            Entry(call, (pages, pages + 1, new, whole)), (P(),) * 4, (P(), P())
        ),
    }  # fmt: skip


def rotated() -> dict[str, OnMesh]:
    pages, angle = normal(2, 3, 4, 4, DIM), normal(6, DIM // 2)
    qkv = normal(6, 3, 4, DIM)
    # Each device has its own heads of q, k and v.
    split = np.concatenate(
        [qkv[:, :, 2 * i : 2 * i + 2].reshape(6, -1) for i in range(SIZE)], axis=1
    )
    part, whole = (
        entry_points.plan_of(entry_points.spec(num_qo_heads=n, num_kv_heads=n)) for n in (2, 4)
    )

    def call(qkv: Any, cos: Any, sin: Any, k: Any, v: Any, plan: Any) -> Any:
        return ja.append_rotated(qkv, cos, sin, k, v, plan, layer=1)[1:]

    of_pages = over(3, 5)
    more = np.cos(angle), np.sin(angle), pages, pages + 1
    specs = over(1), P(), P(), of_pages, of_pages, P()
    return {
        "heads": OnMesh(
            Entry(call, (split, *more, part)), specs, (of_pages, of_pages),
            Entry(call, (qkv.reshape(6, -1), *more, whole)),
        ),
    }  # fmt: skip


def states() -> dict[str, OnMesh]:
    o, lse = normal(3, 4, 2, 8), normal(3, 4, 2)
    lse[:, 0], lse[0, 1] = -np.inf, -np.inf
    found = {}
    for axis in (1, 2, None):
        entry = Entry(ja.merge_states, (o, lse), (0, 1))
        result = P() if axis is None else over(axis - 1)
        found[f"over {axis}"] = OnMesh(entry, (over(axis), over(axis)), (result, result))
    part = Entry(ja.merge_states, (o, lse[:, :2]), (0, 1))
    whole = Entry(lambda o, lse: ja.merge_states(o, jnp.tile(lse, (1, 2, 1))), part.arrays, (0, 1))
    specs = over(1), P()  # devices have the same lse
    found["one lse"] = OnMesh(part, specs, (P(AXIS),) * 2, whole, places="shard_map")
    return found


def pairs_of_states() -> dict[str, OnMesh]:
    (o, p), (lse, m) = normal(2, 4, 2, 8), normal(2, 4, 2)
    entry = Entry(ja.merge_state, (o, lse, p, m), (0, 1, 2, 3))
    return {"rows": OnMesh(entry, (P(AXIS),) * 4, (P(AXIS),) * 2)}


def triplets() -> dict[str, OnMesh]:
    o, lse = normal(4, 2, 8), normal(4, 2)
    entry = Entry(ja.state_to_triplet, (o, lse), (0, 1))
    return {"rows": OnMesh(entry, (P(AXIS),) * 2, (P(AXIS),) * 3)}


def from_triplets() -> dict[str, OnMesh]:
    o, lse = normal(4, 2, 8), normal(4, 2)
    entry = Entry(ja.state_from_triplet, (o, lse, np.exp(lse)), (0, 1, 2))
    return {"rows": OnMesh(entry, (P(AXIS),) * 3, (P(AXIS),) * 2)}


# ---- jax_attn.parallel ---------------------------------------------------------------------------


def ragged(num_qo_heads: int, num_kv_heads: int) -> ja.AttentionSpec:
    """A spec of documents that are split over devices."""
    return ja.AttentionSpec(
        num_qo_heads, num_kv_heads, DIM, dtype="float32", page_size=None, max_batch=2,
        max_qo_tokens=8, max_kv_tokens=8, target="cpu",
    )  # fmt: skip


def sequences() -> dict[str, OnMesh]:
    found = {}
    indptr = ints(0, 3, 7)
    for (heads, (num_qo, num_kv)), exchange in itertools.product(HEADS.items(), ("ring", "heads")):
        q, k, v = normal(8, num_qo, DIM), *normal(2, 8, num_kv, DIM)
        q, k, v = (np.where(np.arange(8)[:, None, None] < 7, x, 0) for x in (q, k, v))
        sinks = normal(num_qo)
        spec = ragged(num_qo, num_kv)
        shards = parallel.SequenceShards(spec, AXIS, SIZE, "striped", exchange)
        plan = parallel.plan_sequence(shards, indptr)
        at = shards.positions
        back = np.argsort(at)

        def call(q: Any, k: Any, v: Any, sinks: Any, plan: Any, mesh: Any = None) -> Any:
            return parallel.attend_sequence(q, k, v, plan, sinks=sinks, return_lse=True, mesh=mesh)

        def with_mesh(mesh: Any, *arrays: Any, call: Any = call) -> Any:
            return call(*arrays, mesh=mesh)

        def whole(q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> Any:
            return ja.attention(q, k, v, plan, sinks=sinks, return_lse=True)

        own = ja.plan(spec, indptr, np.diff(indptr), kv_indptr=indptr)
        tokens = shards.array_spec
        found[f"{heads} {exchange}"] = OnMesh(
            Entry(call, (q[at], k[at], v[at], sinks, plan), (0, 1, 2, 3)),
            (tokens, tokens, tokens, P(), shards.plan_spec),
            (tokens, tokens),
            Entry(whole, (q, k, v, sinks, own), (0, 1, 2, 3)),
            with_mesh=with_mesh,
            order=lambda x, back=back: x[back] if x.ndim > 1 else x,
        )
    return found


def dense_sequences() -> dict[str, OnMesh]:
    found = {}
    for heads, (num_qo, num_kv) in HEADS.items():
        q, k, v = normal(2, 8, num_qo, DIM), *normal(2, 2, 8, num_kv, DIM)

        def with_mesh(mesh: Any, q: Any, k: Any, v: Any) -> Any:
            return parallel.dot_product_attention(
                q, k, v, mesh=mesh, axis_name=AXIS, is_causal=True, return_residual=True
            )

        def whole(q: Any, k: Any, v: Any) -> Any:
            return ja.dot_product_attention(q, k, v, is_causal=True, return_residual=True)

        tokens = P(None, AXIS)
        entry = Entry(whole, (q, k, v), (0, 1, 2))
        found[heads] = OnMesh(
            entry, (tokens,) * 3, (tokens, tokens), with_mesh=with_mesh, places="mesh"
        )
    return found


def kv_shards(op: str) -> dict[str, OnMesh]:
    found = {}
    for heads, (num_qo, num_kv) in HEADS.items():
        q, new = normal(6, num_qo, DIM), normal(6, num_kv, DIM)
        k, v = normal(2, 3, 4, num_kv, DIM)
        sinks = normal(num_qo)
        spec = entry_points.spec(num_qo_heads=num_qo, num_kv_heads=num_kv)
        shards = parallel.KvShards(spec, AXIS, SIZE)
        plan, own = (
            parallel.plan_kv_shards(shards, *entry_points.PAGED),
            ja.plan(spec, *entry_points.PAGED),
        )
        pages = shards.pages_spec(is_stacked=False)

        def append(k: Any, v: Any, new: Any, plan: Any, mesh: Any = None) -> Any:
            return parallel.append_kv_shards(k, v, new, new, plan, mesh=mesh)

        def append_whole(k: Any, v: Any, new: Any, plan: Any) -> Any:
            return ja.append_kv(k, v, new, new, plan)

        def attend(
            q: Any, k: Any, v: Any, sinks: Any, plan: Any, scatter: Any = None, mesh: Any = None
        ) -> Any:
            return parallel.attend_kv_shards(
                q, k, v, plan, sinks=sinks, return_lse=True, scatter=scatter, mesh=mesh
            )

        def attend_whole(q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> Any:
            return ja.attention(q, k, v, plan, sinks=sinks, return_lse=True)

        if op == "append":
            found[heads] = OnMesh(
                Entry(append, (k, v, new, plan)), (pages, pages, P(), shards.plan_spec),
                (pages, pages), Entry(append_whole, (k, v, new, own)),
                with_mesh=lambda mesh, *x, append=append: append(*x, mesh=mesh),
            )  # fmt: skip
            continue
        for scatter in (None, "heads", "rows"):
            call = functools.partial(attend, scatter=scatter)
            rows = shards.o_spec(scatter)
            found[f"{heads} {scatter}"] = OnMesh(
                Entry(call, (q, k, v, sinks, plan)),
                (P(), pages, pages, P(), shards.plan_spec), (rows, rows),
                Entry(attend_whole, (q, k, v, sinks, own)),
                with_mesh=lambda mesh, *x, call=call: call(*x, mesh=mesh),
            )  # fmt: skip
    return found


def made_plans(which: str) -> dict[str, OnMesh]:
    """Plans made inside of shard_map have the bits of the host's."""
    kv = parallel.KvShards(entry_points.spec(), AXIS, SIZE)
    ring = parallel.SequenceShards(ragged(4, 2), AXIS, SIZE, "striped", "ring")
    make, arrays, spec = {
        "plan_kv_shards": (functools.partial(parallel.plan_kv_shards, kv), entry_points.PAGED,
                           kv.plan_spec),
        "plan_sequence": (functools.partial(parallel.plan_sequence, ring), (ints(0, 3, 7),),
                          ring.plan_spec),
    }[which]  # fmt: skip
    entry = Entry(lambda *x: jax.tree.leaves(make(*x)), arrays)
    results = [spec] * len(entry.call(*arrays))
    return {"gqa": OnMesh(entry, (P(),) * len(arrays), results, places="shard_map")}


def reduced() -> dict[str, OnMesh]:
    """Sums of what devices have, with what follows them."""
    parts, residual, weight = normal(SIZE, 3, 8), normal(3, 8), normal(8)

    def call(parts: Any, residual: Any, weight: Any) -> Any:
        more = {"residual": residual, "norm_weight": weight}
        return parallel.all_reduce(parts[0], AXIS, **more)

    def whole(parts: Any, residual: Any, weight: Any) -> Any:
        total = residual + parts.sum(0)
        norm = jnp.sqrt(jnp.mean(total * total, axis=-1, keepdims=True) + 1e-6)
        return total, total / norm * weight[None]

    arrays, of = (parts, residual, weight), (0, 1, 2)
    return {
        "": OnMesh(
            Entry(call, arrays, of), (P(AXIS), P(), P()), (P(), P()), Entry(whole, arrays, of),
            places="shard_map",
        )
    }  # fmt: skip


# The calls of each public name.
BUILDERS: dict[str, Callable[[], dict[str, OnMesh]]] = {
    "jax_attn.dot_product_attention": dense,
    "jax_attn.compat.flax_attention": flax,
    "jax_attn.attention": planned,
    "jax_attn.append_kv": appended,
    "jax_attn.append_rotated": rotated,
    "jax_attn.merge_states": states,
    "jax_attn.merge_state": pairs_of_states,
    "jax_attn.state_to_triplet": triplets,
    "jax_attn.state_from_triplet": from_triplets,
    "jax_attn.parallel.attend_sequence": sequences,
    "jax_attn.parallel.dot_product_attention": dense_sequences,
    "jax_attn.parallel.attend_kv_shards": functools.partial(kv_shards, "attend"),
    "jax_attn.parallel.append_kv_shards": functools.partial(kv_shards, "append"),
    "jax_attn.parallel.all_reduce": reduced,
    "jax_attn.parallel.plan_kv_shards": functools.partial(made_plans, "plan_kv_shards"),
    "jax_attn.parallel.plan_sequence": functools.partial(made_plans, "plan_sequence"),
}

# Names of entry_points.CASES without a case here.
NOT_ON_MESHES = {
    "jax_attn.gated_delta_rule": "tests/ops/test_gated_delta_rule.py has a mesh",
    "jax_attn.linear_attention": "over a pool of one device",
    "jax_attn.plan_linear_attention": "a schedule of one device",
    "jax_attn.short_convolution": "as linear_attention",
    "jax_attn.AttentionPlan": "a schedule of one device",
    "jax_attn.plan": "a schedule of one device; jax_attn.parallel plans for several",
    "jax_attn.rows": "numbers of a batch, jnp alone",
    "jax_attn.compat.cached_attention": "plans for one device, as paged_attention",
    "jax_attn.compat.paged_attention": "joins heads and requests; inside shard_map it is attention",
    "jax_attn.compat.paged_attention_gpu": "as paged_attention",
    "jax_attn.compat.ragged_paged_attention": "plans for one device; for shard_map",
    **dict.fromkeys(
        (name for name in entry_points.CASES if name.startswith("jax_attn.mla.")), "jnp alone"
    ),
    **dict.fromkeys(
        (name for name in entry_points.CASES if name.startswith("jax_attn.masks.")),
        "the mask of attention, which is tried with one",
    ),
}


# ---- running them --------------------------------------------------------------------------------

Way = tuple[str, Callable[[Any], Callable[..., Any]], AxisType, bool]


def ways(case: OnMesh) -> Iterator[Way]:
    """Name, function of a mesh that returns one of arrays, kind of axes, whether it is set."""
    entry, with_mesh = case.entry, case.with_mesh

    def on(mesh: Any) -> Entry:
        call = entry.call if with_mesh is None else functools.partial(with_mesh, mesh)
        return dataclasses.replace(entry, call=call)

    def inside(mesh: Any, **options: Any) -> Any:
        mapped = {"in_specs": case.specs, "out_specs": case.results, **options}
        call = jax.shard_map(entry.call, mesh=mesh, **mapped)
        return with_slopes(dataclasses.replace(entry, call=call))

    def slopes_inside(mesh: Any) -> Any:
        """Gradients inside of shard_map, which adds up those of arrays that all devices have."""
        slopes = tuple(case.specs[i] for i in entry.of)
        out = (case.results, slopes) if entry.of else case.results
        return jax.shard_map(with_slopes(entry), mesh=mesh, in_specs=case.specs, out_specs=out)

    auto, explicit = AxisType.Auto, AxisType.Explicit
    if case.places != "shard_map":
        yield "Auto", lambda mesh: jax.jit(with_slopes(on(mesh))), auto, False
        yield "Explicit", lambda mesh: jax.jit(with_slopes(on(mesh))), explicit, False
        yield "Explicit, set", lambda mesh: jax.jit(with_slopes(on(mesh))), explicit, True
        # Without jit or a mesh that is set, JAX's own functions have no gradients here.
        yield "Explicit, eager", lambda mesh: on(mesh).call, explicit, False
    if case.places != "mesh":
        yield "shard_map", lambda mesh: jax.jit(inside(mesh)), auto, False
        yield (
            "unchecked shard_map",
            lambda mesh: jax.jit(inside(mesh, check_vma=False)),
            auto,
            False,
        )
        yield "gradients in shard_map", lambda mesh: jax.jit(slopes_inside(mesh)), auto, False
        yield "eager shard_map", lambda mesh: jax.shard_map(
            entry.call, mesh=mesh, in_specs=case.specs, out_specs=case.results
        ), auto, False  # fmt: skip


def failures(case: OnMesh, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """What is wrong with each wanted way to run the case."""
    truth = case.whole or case.entry
    want = jax.jit(with_slopes(truth))(*truth.arrays)
    for name, make, kind, is_set in filter(lambda way: is_wanted(way[0]), ways(case)):
        mesh = jax.make_mesh((SIZE,), (AXIS,), axis_types=(kind,))
        shardings = [NamedSharding(mesh, spec) for spec in case.specs]
        arrays = [jax.device_put(x, s) for x, s in zip(case.entry.arrays, shardings, strict=True)]
        entered = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
        try:
            with entered:
                got = make(mesh)(*arrays)
            has_slopes = case.entry.of and "eager" not in name
            compare(got, want if has_slopes or not case.entry.of else want[0], case.order)
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {str(error)[:600]}"


def check(names: tuple[str, ...], is_wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Run the cases of the public names in the wanted ways."""
    found = [
        f"{name} {case}: {failure}"
        for name in names
        for case, on_mesh in BUILDERS[name]().items()
        for failure in failures(on_mesh, is_wanted)
    ]
    assert not found, "\n".join(found)


def check_modes(names: tuple[str, ...]) -> None:
    """Run grouped queries of the names, which need several devices, in JAX's modes."""
    for name in names:
        for case, on_mesh in BUILDERS[name]().items():
            for mode, enter in entry_points.CONTEXTS.items():
                if "mha" in case or "mqa" in case:
                    continue
                with enter():
                    found = list(failures(on_mesh, lambda way: way in ("Auto", "shard_map")))
                assert not found, f"{name} {case}, {mode}: {found[0]}"


# ---- more of JAX ---------------------------------------------------------------------------------


def grouped(name: str) -> Iterator[tuple[str, OnMesh]]:
    """The cases of a name, but for those of other groups of heads."""
    for case, on_mesh in BUILDERS[name]().items():
        if "mha" not in case and "mqa" not in case:
            yield case, on_mesh


def with_second_axis(spec: P, array: Any) -> P:
    """The spec, with axis "y" over the first axis of the array that can be split so."""
    entries = [*spec, *[None] * (array.ndim - len(spec))]
    for axis, size in enumerate(array.shape):
        if size and size % SIZE == 0 and entries[axis] is None:
            entries[axis] = "y"
            break
    return P(*entries)


def on_two_axes(mesh: Any, tree: Any, spec: P) -> Any:
    """A tree of arrays on the mesh, split as with_second_axis says."""

    def put(x: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, with_second_axis(spec, np.asarray(x))))

    return jax.tree.map(put, tree)


def check_partly_manual(names: tuple[str, ...], most: int = 2) -> None:
    """Calls in a shard_map over one of two axes, with arrays that are split over the other one.

    If that one is left to XLA, they have the values and gradients of one device. If it is explicit,
    they may be refused, in one sentence. Needs four devices. most: cases of a name.
    """
    for name in names:
        cases = (x for x in grouped(name) if x[1].places != "mesh")
        for case, on_mesh in itertools.islice(cases, most):
            truth = on_mesh.whole or on_mesh.entry
            want = jax.jit(with_slopes(truth))(*truth.arrays)
            for kind in (AxisType.Auto, AxisType.Explicit):
                mesh = jax.make_mesh((SIZE, SIZE), (AXIS, "y"), axis_types=(AxisType.Auto, kind))
                pairs = zip(on_mesh.entry.arrays, on_mesh.specs, strict=True)
                arrays = [on_two_axes(mesh, *pair) for pair in pairs]
                mapped = {"in_specs": on_mesh.specs, "out_specs": on_mesh.results}
                call = jax.shard_map(on_mesh.entry.call, mesh=mesh, axis_names={AXIS}, **mapped)
                run = jax.jit(with_slopes(dataclasses.replace(on_mesh.entry, call=call)))
                is_explicit = kind == AxisType.Explicit
                try:
                    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
                        compare(run(*arrays), want, on_mesh.order)
                except NotImplementedError as error:
                    sentence = str(error)
                    is_ours = "sharding: expected arrays that are not split over axes" in sentence
                    assert is_explicit and is_ours and "\n" not in sentence, (name, case, sentence)
                except Exception as error:
                    raise AssertionError(f"{name} {case}, {kind}: {error}") from error


def derivatives(entry: Entry) -> Callable[..., Any]:
    """Tangents of the call, and second derivatives: forward over reverse."""

    def run(*arrays: Any) -> Any:
        def call(*varying: Any) -> Any:
            whole = list(arrays)
            for i, x in zip(entry.of, varying, strict=True):
                whole[i] = x
            return entry.call(*whole)

        at = tuple(arrays[i] for i in entry.of)
        along = tuple(jnp.cos(x) for x in at)
        slopes = jax.grad(lambda *x: entry_points.loss_of(call(*x)), tuple(range(len(at))))
        return jax.jvp(call, at, along), jax.jvp(slopes, at, along)[1]

    return run


def check_derivatives(names: tuple[str, ...]) -> None:
    """Forward mode and second derivatives, on a mesh and in shard_map, are those of one device."""
    for name in names:
        for case, on_mesh in grouped(name):
            truth = on_mesh.whole or on_mesh.entry
            want = jax.jit(derivatives(truth))(*truth.arrays)
            mesh = jax.make_mesh((SIZE,), (AXIS,), axis_types=(AxisType.Auto,))
            assert on_mesh.with_mesh is not None
            calls = {"mesh": functools.partial(on_mesh.with_mesh, mesh)}
            if on_mesh.places != "mesh":
                mapped = {"in_specs": on_mesh.specs, "out_specs": on_mesh.results}
                calls["shard_map"] = jax.shard_map(on_mesh.entry.call, mesh=mesh, **mapped)
            for way, call in calls.items():
                run = jax.jit(derivatives(dataclasses.replace(on_mesh.entry, call=call)))
                try:
                    compare(run(*on_mesh.entry.arrays), want, on_mesh.order)
                except Exception as error:
                    raise AssertionError(f"{name} {case}, {way}: {error}") from error
