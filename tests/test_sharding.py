"""Kernels under jit on several devices: each runs its own batch elements and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash import backends, dot_product_attention, paged_attention, ragged_attention
from jax_flash.spec import Device
from tests import fake_kernels
from tests.tolerance import fast_jit, rand

BATCH, HEADS, WHOLE = P("x"), P(None, None, "x"), P()
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return fake_kernels.register(monkeypatch)


@pytest.fixture
def local_calls(kernels, monkeypatch):
    """The (B, Hq, Hk) that each launch sees."""
    calls = []

    def spy(name):
        launch = getattr(kernels, name)

        def record(spec, *args):
            calls.append((name, spec.batch, spec.num_q_heads, spec.num_kv_heads))
            return launch(spec, *args)

        monkeypatch.setattr(kernels, name, record)

    spy("forward")
    spy("backward")
    return calls


def mesh(*shape, kind="Auto"):
    if jax.device_count() < np.prod(shape):
        pytest.skip(f"needs {np.prod(shape)} devices")
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(shape)
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=kinds)


def results_and_gradients(function, floats, rest):
    """Out, lse and the gradients of the floating-point keywords."""

    def call(floats):
        return function(**floats, **rest, implementation="fake", return_residual=True)

    (out, lse), pullback = jax.vjp(call, floats)
    cotangent = jnp.cos(out), jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0.0)
    return out, lse, pullback(cotangent)[0]


def run(function, floats, rest, shardings, here):
    """Results on the mesh, and the names of the collectives in the program."""
    call = fast_jit(functools.partial(results_and_gradients, function))
    floats, rest = (
        {
            name: jax.device_put(x, NamedSharding(here, shardings.get(name, WHOLE)))
            for name, x in arrays.items()
        }
        for arrays in (floats, rest)
    )
    compiled = call.lower(floats, rest).compile()
    text = compiled.as_text()
    return compiled(floats, rest), {name for name in COLLECTIVES if f"{name}(" in text}


def check(function, floats, rest, shardings, here):
    want = fast_jit(functools.partial(results_and_gradients, function))(floats, rest)
    with jax.set_mesh(here):
        got, collectives = run(function, floats, rest, shardings, here)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, jax.device_get(got), want)
    return got, collectives


def dense(batch=4, tq=6, tk=10, hq=8, hk=4):
    return {
        "query": rand(batch, tq, hq, 8, seed=1),
        "key": rand(batch, tk, hk, 8, seed=2),
        "value": rand(batch, tk, hk, 8, seed=3),
    }


def everywhere(spec, *names):
    return dict.fromkeys(("query", "key", "value", *names), spec)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("spec", "local"), [(BATCH, (1, 8, 4)), (HEADS, (4, 2, 1))], ids=["batch", "heads"]
)
def test_each_device_runs_its_part(spec, local, kind, local_calls):
    lengths = {"key_value_seq_lengths": np.int32([10, 3, 0, 7])}
    here = mesh(4, kind=kind)
    got, collectives = check(dot_product_attention, dense(), lengths, everywhere(spec), here)
    assert not collectives
    assert {("forward", *local), ("backward", *local)} <= set(local_calls)
    for x in jax.tree.leaves(got):
        assert x.sharding.is_equivalent_to(NamedSharding(here, spec), x.ndim), x.sharding


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
def test_inside_shard_map_nothing_changes(spec, check_vma):
    floats = dense()
    call = functools.partial(results_and_gradients, dot_product_attention)
    mapped = jax.shard_map(
        lambda floats: call(floats, {}), mesh=mesh(4), in_specs=spec, out_specs=spec,
        check_vma=check_vma,
    )  # fmt: skip
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, fast_jit(mapped)(floats), fast_jit(call)(floats, {}))


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_mosaic_kernels_can_be_traced_inside_shard_map(check_vma, num_devices, monkeypatch):
    monkeypatch.setattr(backends, "device_of", lambda *_: Device("gpu", "9.0", "NVIDIA H200"))
    monkeypatch.setattr(jax, "device_count", lambda: num_devices)

    def gradients(q, lengths):
        def call(q):
            return dot_product_attention(
                q, q, q, is_causal=True, key_value_seq_lengths=lengths, implementation="mosaic"
            )

        return jax.vjp(call, q)[1](q)

    mapped = jax.shard_map(
        gradients, mesh=mesh(num_devices), in_specs=BATCH, out_specs=BATCH, check_vma=check_vma
    )
    q = jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16)
    (dq,) = jax.eval_shape(mapped, q, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert (dq.shape, dq.dtype) == (q.shape, q.dtype)


@pytest.mark.parametrize("check_vma", [True, False])
def test_so_can_those_with_masks_and_terms(check_vma, monkeypatch):
    monkeypatch.setattr(backends, "device_of", lambda *_: Device("gpu", "9.0", "NVIDIA H200"))

    def gradients(q, bias, mask, slopes):
        def call(q, bias, slopes):
            return dot_product_attention(
                q, q, q, bias, mask, alibi_slopes=slopes, sinks=slopes, logits_soft_cap=9.0,
                dropout_rng=jax.random.key(0), dropout_rate=0.5, implementation="mosaic",
            )  # fmt: skip

        return jax.vjp(call, q, bias, slopes)[1](q)

    everywhere_else = (BATCH, BATCH, P())
    mapped = jax.shard_map(
        gradients, mesh=mesh(4), in_specs=(BATCH, *everywhere_else),
        out_specs=(BATCH, BATCH, P()), check_vma=check_vma,
    )  # fmt: skip
    q = jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16)
    full = jax.ShapeDtypeStruct((4, 4, 256, 256), jnp.float32)
    mask, slopes = full.update(dtype=bool), jax.ShapeDtypeStruct((4,), jnp.float32)
    found = jax.eval_shape(mapped, q, full, mask, slopes)
    assert [x.shape for x in found] == [q.shape, full.shape, slopes.shape]


def test_batch_and_heads_on_two_axes(local_calls):
    spec = P("x", None, "y")
    _, collectives = check(dot_product_attention, dense(), {}, everywhere(spec), mesh(2, 2))
    assert not collectives
    assert ("backward", 2, 4, 2) in local_calls


def test_batch_over_all_axes_of_the_mesh(local_calls):
    spec = P(("x", "y"))
    _, collectives = check(dot_product_attention, dense(), {}, everywhere(spec), mesh(2, 2))
    assert not collectives
    assert ("backward", 1, 8, 4) in local_calls


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_one_key_head_serves_the_query_heads_of_every_device(kind, local_calls):
    """Its gradient, a sum over query heads, is summed over the devices."""
    here = mesh(4, kind=kind)
    _, collectives = check(dot_product_attention, dense(hk=1), {}, {"query": HEADS}, here)
    assert collectives == {"all-reduce"}
    assert ("backward", 4, 2, 1) in local_calls


def test_fewer_key_heads_than_devices_still_give_the_right_answer():
    check(dot_product_attention, dense(hk=2), {}, {"query": HEADS}, mesh(4))


def test_a_batch_that_does_not_divide_gives_the_right_answer():
    check(dot_product_attention, dense(batch=3), {}, {}, mesh(4))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
def test_gradients_of_what_devices_share_are_summed(spec, kind):
    floats = dense() | {
        "bias": rand(1, 1, 6, 10, seed=4),
        "sinks": rand(8, seed=5),
        "alibi_slopes": rand(8, seed=6),
    }
    here = mesh(4, kind=kind)
    _, collectives = check(dot_product_attention, floats, {}, everywhere(spec), here)
    assert "all-reduce" in collectives
    if kind == "Auto":  # explicit results are as whole as their operands: sinks, slopes
        assert collectives == {"all-reduce"}


def test_queries_split_along_the_sequence_are_made_whole():
    check(dot_product_attention, dense(tq=8), {}, {"query": P(None, "x")}, mesh(4))


def test_dropout_drops_the_same_on_one_device_and_on_many():
    keys = {"dropout_rng": jax.random.key_data(jax.random.key(3))}

    def call(dropout_rng, **keywords):
        rng = jax.random.wrap_key_data(dropout_rng)
        return dot_product_attention(**keywords, dropout_rate=0.5, dropout_rng=rng)

    for spec in (BATCH, HEADS):
        check(call, dense(), keys, everywhere(spec), mesh(4))


def test_ragged_attention_splits_heads(local_calls):
    floats = {name: x[0] for name, x in dense(batch=1, tq=12, tk=12).items()}
    rest = {"cu_seqlens_q": np.int32([0, 5, 12])}
    call = functools.partial(ragged_attention, is_causal=True)
    _, collectives = check(call, floats, rest, everywhere(P(None, "x")), mesh(4))
    assert not collectives
    assert ("backward", 1, 2, 1) in local_calls


@pytest.mark.parametrize("split", ["batch", "heads"])
def test_a_paged_cache_is_split_by_heads_or_serves_all(split, local_calls):
    arrays = {
        "query": rand(4, 1, 8, 8, seed=1),
        "key_pages": rand(9, 4, 2, 8, seed=2),
        "value_pages": rand(9, 4, 2, 8, seed=3),
        "block_tables": np.arange(1, 9, dtype=np.int32).reshape(4, 2),
        "kv_lens": np.int32([4, 1, 0, 3]),
    }
    own = ("query", "block_tables", "kv_lens") if split == "batch" else ("query",)
    shardings = dict.fromkeys(own, BATCH if split == "batch" else HEADS)
    if split == "heads":
        shardings |= dict.fromkeys(("key_pages", "value_pages"), P(None, "x"))
    call = fast_jit(lambda arrays: paged_attention(**arrays, implementation="fake"))
    here = mesh(4)
    placed = {
        name: jax.device_put(x, NamedSharding(here, shardings.get(name, WHOLE)))
        for name, x in arrays.items()
    }
    compiled = call.lower(placed).compile()
    assert not any(f"{name}(" in compiled.as_text() for name in COLLECTIVES)
    np.testing.assert_allclose(compiled(placed), call(arrays), rtol=2e-5, atol=2e-5)
    assert ("forward", *((4, 2, 1) if split == "heads" else (1, 8, 4))) in local_calls
