"""What surrounds a compiled call: x64, export, sharding, donation, the compile cache, dropout."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash import backends, dot_product_attention, merge_attention, paged_attention
from jax_flash.spec import Device
from tests import oracle64 as oracle
from tests.tolerance import bits, fast_jit, rand

B, TQ, TK, HQ, HK, D = 2, 5, 7, 4, 2, 8
KEY = jax.random.key(0)


@pytest.fixture(params=["xla", "chunked"])
def attention(request):
    return functools.partial(dot_product_attention, implementation=request.param)


def qkv(batch=B, tq=TQ, tk=TK, hq=HQ, hk=HK, dtype="float32"):
    shapes = ((batch, tq, hq, D), (batch, tk, hk, D), (batch, tk, hk, D))
    return [rand(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def assert_same_bits(got, want):
    assert bits(got) == bits(want)


def loss_of(attention, **options):
    return lambda *qkv: jnp.sum(jnp.sin(attention(*qkv, **options)))


# x64 mode.


def test_float64_is_computed_in_float64(attention):
    with jax.enable_x64(True):
        arrays = qkv(dtype="float64")
        do = rand(B, TQ, HQ, D, dtype="float64", seed=5)

        @fast_jit
        def run(*arrays):
            call = functools.partial(attention, is_causal=True, return_residual=True)
            (out, lse), pullback = jax.vjp(call, *arrays)
            return (out, lse), pullback((do, jnp.zeros_like(lse)))

        results, grads = run(*arrays)
    assert {x.dtype for x in (*results, *grads)} == {np.dtype("float64")}
    want = oracle.attention(*arrays, is_causal=True)
    want_grads = oracle.attention_grads(*arrays, do, is_causal=True)
    for got, right in zip((*results, *grads), (*want, *want_grads.values()), strict=False):
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x64_mode_changes_nothing_else(attention, dtype):
    arrays = qkv(dtype=dtype)
    lengths = np.array([3, 7])

    def results(lengths):
        call = functools.partial(attention, is_causal=True, q_offset=2, return_residual=True)
        return fast_jit(lambda *a: call(*a, key_value_seq_lengths=lengths))(*arrays)

    want = results(lengths.astype("int32"))
    with jax.enable_x64(True):
        got = results(jnp.asarray(lengths, "int64"))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert_same_bits(got, want)


def test_int64_values_are_accepted_where_traced_and_checked_where_known():
    q, k, v = qkv()
    with jax.enable_x64(True):
        lengths = jnp.array([3, 7], jnp.int64)
        assert lengths.dtype == jnp.int64
        call = functools.partial(dot_product_attention, q, k, v)
        traced = fast_jit(lambda lengths: call(key_value_seq_lengths=lengths))(lengths)
        known = fast_jit(lambda: call(key_value_seq_lengths=lengths))()
        np.testing.assert_allclose(traced, known, rtol=1e-5)
        with pytest.raises(ValueError, match=r"key_value_seq_lengths=4294967299: must fit into"):
            call(key_value_seq_lengths=jnp.array([3, 2**32 + 3], jnp.int64))
        pages, tables = jnp.zeros((3, HK, 4, D), q.dtype), jnp.full((B, 2), -(2**32), jnp.int64)
        with pytest.raises(ValueError, match=r"block_tables=-4294967296: must fit into int32"):
            paged_attention(q, pages, pages, tables, jnp.full(B, 5))


# Export.


def test_an_exported_call_gives_the_same_results(attention):
    arrays = [jnp.asarray(x) for x in qkv()]
    call = jax.jit(functools.partial(attention, is_causal=True, return_residual=True))
    exported = jax.export.export(call)(*arrays)
    assert_same_bits(exported.call(*arrays), call(*arrays))
    assert [x.shape for x in exported.out_avals] == [(B, TQ, HQ, D), (B, TQ, HQ)]


def test_an_exported_call_is_serialised_with_its_gradient(attention):
    pytest.importorskip("flatbuffers")
    arrays = [jnp.asarray(x) for x in qkv()]
    call = jax.jit(functools.partial(attention, is_causal=True))
    saved = jax.export.export(call)(*arrays).serialize(vjp_order=1)
    loaded = jax.export.deserialize(saved)
    assert_same_bits(loaded.call(*arrays), call(*arrays))
    got, want = (jax.grad(loss_of(f), (0, 1, 2))(*arrays) for f in (loaded.call, call))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", ["b, 5", "3, t"], ids=["batch", "length"])
def test_a_call_of_symbolic_shape_is_exported_as_jax_nns_is(shape):
    sizes = (*jax.export.symbolic_shape(shape), HQ, D)
    arrays = [jax.ShapeDtypeStruct(sizes, jnp.float32)] * 3
    x = rand(3, 5, HQ, D)
    got, want = (
        jax.export.export(jax.jit(attention))(*arrays).call(x, x, x)
        for attention in (dot_product_attention, jax.nn.dot_product_attention)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# Sharding over four devices.

BATCH, HEADS = P("x"), P(None, None, "x")


def mesh(kind="Auto"):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((4,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),))


def results_and_gradients(attention, *arrays):
    call = functools.partial(attention, is_causal=True, return_residual=True)
    (out, lse), pullback = jax.vjp(call, *arrays)
    return out, lse, pullback((jnp.cos(out), jnp.sin(lse)))


def assert_equal_results(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, want)


@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
@pytest.mark.parametrize(
    ("attention", "check_vma"),
    [("xla", True), ("xla", False), ("chunked", True)],
    indirect=["attention"],
)
def test_shard_map_equals_one_device(attention, spec, check_vma):
    arrays = qkv(batch=4, hq=8, hk=4)
    run = functools.partial(results_and_gradients, attention)
    sharded = jax.shard_map(
        run,
        mesh=mesh(),
        in_specs=spec,
        out_specs=(spec, spec, (spec, spec, spec)),
        check_vma=check_vma,
    )
    assert_equal_results(fast_jit(sharded)(*arrays), fast_jit(run)(*arrays))


def test_keys_spread_over_devices_are_merged(attention):
    q, k, v = qkv(batch=1, tk=8)
    keys = P(None, "x")

    def part(q, k, v):
        out, lse = attention(q, k, v, return_residual=True)
        parts = jax.lax.all_gather(out, "x"), jax.lax.all_gather(lse, "x")
        return merge_attention(*parts)[0][None]

    spread = jax.shard_map(part, mesh=mesh(), in_specs=(P(), keys, keys), out_specs=P("x"))
    want = fast_jit(attention)(q, k, v)
    for got in fast_jit(spread)(q, k, v):
        assert_equal_results(got, want)


@pytest.mark.parametrize("name", ["value", "bias", "sinks", "key_value_seq_lengths", "dropout_rng"])
def test_one_operand_alone_may_differ_between_devices(attention, name):
    shared = dict(zip(("query", "key", "value"), qkv(tk=TQ), strict=True))
    own = {
        "value": jnp.ones((4, B, TQ, HK, D)),
        "bias": jnp.ones((4, 1, HQ, 1, TQ)),
        "sinks": jnp.ones((4, HQ)),
        "key_value_seq_lengths": jnp.ones((4, B), jnp.int32),
        "dropout_rng": jax.random.split(KEY, 4),
    }[name]
    rate = {"dropout_rate": 0.5} if name == "dropout_rng" else {}

    def call(shared, own):
        return attention(**shared | {name: own[0]} | rate)[None]

    mapped = jax.shard_map(call, mesh=mesh(), in_specs=(P(), P("x")), out_specs=P("x"))
    traced = jax.jit(mapped).trace({k: jnp.asarray(x) for k, x in shared.items()}, own)
    assert traced.out_info.shape == (4, B, TQ, HQ, D)


@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
@pytest.mark.parametrize(
    ("attention", "kind"),
    [("xla", "Auto"), ("xla", "Explicit"), ("chunked", "Auto")],
    indirect=["attention"],
)
def test_jit_keeps_the_sharding_and_gathers_nothing(attention, spec, kind):
    arrays = qkv(batch=4, hq=8, hk=4)
    run = functools.partial(results_and_gradients, attention)
    here = mesh(kind)
    with jax.set_mesh(here):
        placed = [jax.device_put(x, NamedSharding(here, spec)) for x in arrays]
        compiled = fast_jit(run).lower(*placed).compile()
        got = compiled(*placed)
        for x in jax.tree.leaves(got):
            assert x.sharding.is_equivalent_to(NamedSharding(here, spec), x.ndim), x.sharding
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert collective not in compiled.as_text()
    assert_equal_results(jax.device_get(got), fast_jit(run)(*arrays))


def test_fewer_key_heads_than_devices_still_give_the_right_answer():
    arrays = qkv(hq=8, hk=2)
    run = functools.partial(results_and_gradients, dot_product_attention)
    placed = [jax.device_put(x, NamedSharding(mesh(), s)) for x, s in zip(
        arrays, (HEADS, P(), P()), strict=True)]  # fmt: skip
    assert_equal_results(jax.device_get(fast_jit(run)(*placed)), fast_jit(run)(*arrays))


# Compilation and memory.


def test_new_values_of_lengths_and_offsets_do_not_compile_again():
    arrays = [jnp.asarray(x) for x in qkv()]

    @jax.jit
    def call(lengths, offsets):
        return dot_product_attention(
            *arrays, is_causal=True, key_value_seq_lengths=lengths, q_offset=offsets
        )

    values = np.random.default_rng(0).integers(0, TK, (200, 2, B)).astype("int32")
    outs = {np.asarray(call(*pair)).tobytes() for pair in values}
    assert len(outs) > 20  # the values matter
    assert call._cache_size() == 1


@pytest.mark.parametrize("remat", [False, True])
def test_layers_that_are_alike_share_their_kernels_in_a_program(remat, monkeypatch):
    """Those without dropout one forward and one backward kernel, the one with dropout two more."""
    monkeypatch.setattr(backends, "device_of", lambda *_: Device("gpu", "9.0", "NVIDIA H200"))
    attention = functools.partial(dot_product_attention, implementation="mosaic", is_causal=True)

    def loss(x, key):
        for _ in range(4):
            layer = functools.partial(attention)  # another function, as in a model
            x = (jax.checkpoint(layer) if remat else layer)(x, x, x)
        x = attention(x, x, x, dropout_rate=0.1, dropout_rng=key)
        return jnp.sum(x.astype("float32"))

    x = jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16")
    lowered = jax.jit(jax.grad(loss)).trace(x, KEY).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 4


@pytest.mark.parametrize("implementation", ["mosaic"])
def test_kernels_outside_jit_are_compiled_once(implementation):
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def loss(x):
        out = dot_product_attention(x, x, x, is_causal=True, implementation=implementation)
        return jnp.sum(out.astype("float32"))

    x = jnp.asarray(rand(1, 64, 1, 64, dtype="bfloat16", seed=0))
    for _ in range(2):  # in interpret mode JAX's settings change during the first call
        gradient = jax.grad(loss)(x)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert_same_bits(jax.grad(loss)(x), gradient)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_strided_and_transposed_inputs_give_the_bits_of_copies(attention):
    storage = [jnp.asarray(rand(B, HQ, 2 * TK, D, seed=i)) for i in range(2)]
    fused = jnp.asarray(rand(B, TK, 3, HQ, D))

    def views(storage, fused):
        q = jnp.swapaxes(storage[0], 1, 2)[:, ::2]
        k = jnp.swapaxes(storage[1][:, :, ::2], 1, 2)
        return (q, k, fused[:, :, 2]), tuple(fused[:, :, i] for i in range(3))

    def run(arrays, do):
        out, pullback = jax.vjp(functools.partial(attention, is_causal=True), *arrays)
        return out, pullback(do)

    halves = [jnp.asarray(rand(B, TK, HQ // 2, D, seed=i)) for i in (3, 4)]

    @fast_jit
    def inside(storage, fused, halves):
        do = jnp.concatenate(halves, axis=2)
        return [run(arrays, do) for arrays in views(storage, fused)]

    copies = [[jnp.array(np.ascontiguousarray(x)) for x in a] for a in views(storage, fused)]
    do = jnp.array(np.concatenate(halves, axis=2))
    got = inside(storage, fused, halves)
    jitted = fast_jit(run)
    assert_same_bits(got, [jitted(arrays, do) for arrays in copies])


def test_donated_inputs_change_nothing(attention):
    arrays = qkv(tk=TQ, hk=HQ)
    want = fast_jit(attention)(*arrays)
    placed = [jnp.array(x) for x in arrays]
    got = jax.jit(attention, donate_argnums=0)(*placed)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    assert placed[0].is_deleted()
    assert not placed[1].is_deleted()


# Dropout.


def noisy(attention, rate=0.5):
    def call(key, *arrays):
        return attention(*arrays, is_causal=True, dropout_rate=rate, dropout_rng=key)

    return call


def out_and_gradients(call, key, arrays):
    out, pullback = jax.vjp(functools.partial(call, key), *arrays)
    return out, pullback(jnp.cos(out))


def test_dropout_is_a_function_of_its_key_under_every_transformation():
    arrays, call = qkv(batch=4), noisy(dot_product_attention)
    run = fast_jit(functools.partial(out_and_gradients, call))
    want, other = run(KEY, arrays), run(jax.random.key(1), arrays)
    assert_same_bits(run(KEY, arrays), want)
    assert not np.array_equal(want[0], other[0])
    remat = fast_jit(functools.partial(out_and_gradients, jax.checkpoint(call)))
    assert_equal_results(remat(KEY, arrays), want)
    mapped = fast_jit(jax.vmap(functools.partial(out_and_gradients, call), (0, None)))
    both = mapped(jnp.stack([KEY, jax.random.key(1)]), arrays)
    assert_equal_results(jax.tree.map(lambda x: x[0], both), want)
    assert_equal_results(jax.tree.map(lambda x: x[1], both), other)
    placed = [jax.device_put(x, NamedSharding(mesh(), BATCH)) for x in arrays]
    assert_equal_results(jax.device_get(run(KEY, placed)), want)


def test_dropout_is_the_same_on_every_implementation():
    def run(name):
        attention = functools.partial(dot_product_attention, implementation=name)
        return out_and_gradients(noisy(attention), KEY, qkv())

    assert_equal_results(*fast_jit(lambda: (run("chunked"), run("xla")))())


def test_dropout_gradients_match_finite_differences_at_a_fixed_key():
    with jax.enable_x64(True):
        arrays = qkv(dtype="float64")
        directions = [rand(*x.shape, dtype="float64", seed=9) for x in arrays]

        def loss(step):
            moved = [x + step * d for x, d in zip(arrays, directions, strict=True)]
            return jnp.sum(jnp.sin(noisy(dot_product_attention, 0.3)(KEY, *moved)))

        slope = float(fast_jit(jax.grad(loss))(0.0))
        loss = fast_jit(loss)
        want = float(loss(1e-6) - loss(-1e-6)) / 2e-6
    np.testing.assert_allclose(slope, want, rtol=1e-6)


def test_dropout_drops_the_rate_and_keeps_the_mean(attention):
    q, k = (jnp.zeros((3, 64, 4, 1)) for _ in range(2))
    v = jnp.ones((3, 64, 4, 1))
    call = functools.partial(attention, dropout_rng=KEY, dropout_rate=0.25)
    out = np.asarray(fast_jit(call)(q, k, v))[..., 0]  # each row: kept keys / 64 / 0.75
    np.testing.assert_allclose(out.mean(), 1.0, atol=0.01)
    kept = np.rint(out * 64 * 0.75)
    np.testing.assert_allclose(out * 64 * 0.75, kept, atol=1e-3)
    np.testing.assert_allclose(kept.var(), 64 * 0.25 * 0.75, rtol=0.2)
    masks = {kept[b, :, h].tobytes() for b in range(3) for h in range(4)}
    assert len(masks) == 12  # batch elements and heads draw their own


def test_dropout_at_its_ends(attention):
    arrays = qkv()

    @fast_jit
    def run():
        plain = attention(*arrays, is_causal=True)
        never = noisy(attention, 0.0)
        always = out_and_gradients(noisy(attention, 1.0), KEY, arrays)
        return plain, (never(KEY, *arrays), never(None, *arrays)), always

    plain, never, always = run()
    for x in never:
        np.testing.assert_array_equal(x, plain)
    for x in jax.tree.leaves(always):
        np.testing.assert_array_equal(x, 0.0)
