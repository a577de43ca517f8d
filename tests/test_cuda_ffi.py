"""What surrounds the CUDA kernels: transforms, loops, sharding, export, copies, and append."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cuda_ffi import library
from jax_flash import append_kv, backends, decode_attention, decode_plan, paged_attention
from tests.test_cuda_decode import ON_GPU, REASON, as_if_the_cpu_had_it
from tests.test_decode import NAN, cache, into_pages
from tests.tolerance import bits, rand

__all__ = ["as_if_the_cpu_had_it"]  # a fixture of every test here
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def small_call():
    query, key, value, lens = cache([40, 9, 2], (4, 2), (64, 64), 2, "bfloat16")
    pools, tables = into_pages([key, value], lens, 8, "HND")
    return jax.tree.map(jnp.asarray, (query, *pools, tables, lens))


@pytest.mark.filterwarnings("ignore:jax_flash. the gradient:UserWarning")
def test_gradients_are_those_of_plain_jax():
    def gradients(implementation):
        query, *rest = small_call()
        tables, lens = rest[2:]

        def loss(query, key, value):
            out, lse = paged_attention(
                query,
                key,
                value,
                tables,
                lens,
                implementation=implementation,
                return_residual=True,
            )
            seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(seen))

        return jax.grad(loss, (0, 1, 2))(query, *rest[:2])

    for got, want in zip(gradients("cuda"), gradients("xla"), strict=True):
        got, want = (np.float64(x) for x in (got, want))
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_a_call_launches_nothing_beside_its_kernel(kind):
    query, key, value, tables, lens = small_call()
    if kind == "paged":
        call, arrays = paged_attention, (query, key, value, tables, lens)
    else:
        both = (x[:3].swapaxes(1, 2) for x in (key, value))
        call, arrays = decode_attention, (query, *both, lens)
    compiled = jax.jit(functools.partial(call, implementation="cuda")).lower(*arrays).compile()
    entry = compiled.as_text().partition("ENTRY")[2]
    names = set(re.findall(r" = .*? ([a-z-]+)\(", entry))
    assert names == {"parameter", "constant", "custom-call", "get-tuple-element"}


def test_vmap_is_one_launch():
    query, key, value, tables, lens = small_call()
    queries = jnp.stack([query, 2 * query])
    call = functools.partial(paged_attention, implementation="cuda")
    mapped = jax.jit(jax.vmap(call, (0, None, None, None, None)))
    text = mapped.lower(queries, key, value, tables, lens).as_text()
    assert text.count(library.DECODE) == 1
    got = mapped(queries, key, value, tables, lens)
    want = jnp.stack([call(q, key, value, tables, lens) for q in queries])
    assert bits(got) == bits(want)
    # A scale for each instance becomes one for each page, and sinks one row for each sequence.
    scales, sinks = jnp.float32([1.0, 0.5]), rand(2, 4, seed=1)
    call = functools.partial(decode_attention, implementation="cuda")
    cache_ = key[:3].swapaxes(1, 2)
    cache_ = jnp.where(jnp.isnan(cache_), 0, cache_)
    lens = jnp.minimum(lens, cache_.shape[1])

    def scaled(scale, sinks):
        return call(query, cache_, cache_, lens, k_scale=scale, v_scale=scale, sinks=sinks)

    got = jax.vmap(scaled)(scales, sinks)
    for n in range(2):
        want = scaled(scales[n], sinks[n])
        np.testing.assert_allclose(np.float32(got[n]), np.float32(want), rtol=0.02, atol=0.02)


def test_steps_in_a_loop_with_growing_lengths_equal_eager_ones():
    """Append and attend, as a decode step does, inside one program."""
    heads, page_size, steps = 2, 4, 10
    query, key, value, _ = cache([steps] * 3, (4, heads), (64, 64), 1, "bfloat16")
    tables = np.random.default_rng(0).permutation(9).reshape(3, 3).astype(np.int32)
    empty = jnp.full((9, heads, page_size, 64), NAN, jnp.bfloat16)

    def step(t, pools, outs):
        lens = jnp.int32([0, 1, 2]) * (t + 1) // 2
        last = jnp.maximum(lens - 1, 0)
        pages = jnp.take_along_axis(jnp.asarray(tables), last[:, None] // page_size, 1)[:, 0]
        # Every token so far is written again: sequence b has tokens 0 .. lens - 1.
        slots = jnp.where(lens > 0, pages * page_size + last % page_size, -1)
        rows = jnp.arange(3, dtype=jnp.int32)
        new = jnp.asarray(key)[rows, last], jnp.asarray(value)[rows, last]
        pools = append_kv(*pools, *new, slots)
        out = paged_attention(query, *pools, jnp.asarray(tables), lens, implementation="cuda")
        return pools, outs.at[t].set(out)

    outs = jnp.zeros((steps, *query.shape), jnp.bfloat16)
    pools = (empty, empty)

    def body(carry):
        t, pools, outs = carry
        return (t + 1, *step(t, pools, outs))

    looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < steps, body, x))
    got = looped((jnp.int32(0), pools, outs))[2]
    want_pools, want = pools, outs
    for t in range(steps):
        want_pools, want = step(jnp.int32(t), want_pools, want)
    assert bits(got) == bits(want)
    assert np.isfinite(np.float32(got)).all()


def test_a_plan_is_made_once_for_all_layers_and_survives_transforms():
    """Lengths long enough for ranges that cut sequences, where there are kernels."""
    lens = np.random.default_rng(0).integers(0, 9000 if ON_GPU else 90, 40)
    query, key, value, lens = cache(lens.tolist(), (4, 2), (64, 64), 1, "bfloat16")
    call = functools.partial(decode_attention, implementation="cuda")

    def layers(query, lens, make_plan):
        plan = make_plan(lens)
        for _ in range(3):
            query = call(query, key, value, lens, plan=plan)
        return query

    planned = jax.jit(functools.partial(layers, make_plan=decode_plan))
    want = jax.jit(functools.partial(layers, make_plan=lambda _: None))(query, lens)
    assert bits(planned(query, lens)) == bits(want)
    text = planned.lower(query, lens).as_text()
    assert text.count(library.DECODE) == 3
    queries = jnp.stack([query, 2 * query])
    mapped = jax.vmap(lambda query: call(query, key, value, lens, plan=decode_plan(lens)))(queries)
    alone = jax.vmap(lambda query: call(query, key, value, lens))(queries)
    assert bits(mapped) == bits(alone)
    one = jax.vmap(lambda query: call(query, key[:1], value[:1], lens[:1]))(queries[:, :1])
    assert bits(one[0]) == bits(call(query[:1], key[:1], value[:1], lens[:1]))


def copies(compiled, shape):
    """Instructions of a compiled program that copy an array of a given shape."""
    text = ",".join(map(str, shape))
    lines = compiled.as_text().splitlines()
    return [line for line in lines if " copy(" in line and f"[{text}]" in line.split("copy(")[0]]


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_pool_of_keys_and_values_is_read_in_place(num_devices, request):
    """No instruction makes a half of it, on one device or on its part of the heads."""
    query, key, value, lens = cache([40, 9, 2, 17], (8, 4), (64, 64), 1, "bfloat16")
    pools, tables = into_pages([key, value], lens, 8, "HND")
    both = jnp.stack(pools, 1)
    call = jax.jit(functools.partial(paged_attention, implementation="cuda"))
    want = call(query, *pools, tables, lens)
    arrays = [query, both, None, tables, lens]
    if num_devices > 1:
        mesh = request.getfixturevalue("mesh")
        where = [(query, ("data", None, "model")), (both, (None, None, "model"))]
        arrays[:2] = placed(mesh, *where)
    text = call.lower(*arrays).compile().as_text()
    assert library.DECODE in text
    heads = 4 if num_devices == 1 else 2
    assert f"[{len(both)},2,{heads},8,64]" in text
    assert f"[{len(both)},{heads},8,64]" not in text
    assert f"[{len(both)},1,{heads},8,64]" not in text
    assert "all-gather" not in text
    assert bits(call(*arrays)) == bits(want)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_append_copies_no_pool(dtype, is_fused):
    """Neither when donated nor as the carry of a scan, one pool or one a layer in a loop."""
    shape = (64, *(2,) * is_fused, 2, 16, 64)
    second = (lambda: None) if is_fused else (lambda: jnp.ones(shape, dtype))
    pools = [(jnp.zeros(shape, dtype), second()) for _ in range(3)]
    new = rand(5, 2, 64), rand(5, 2, 64, seed=1)
    slots = jnp.array([3, -1, 900, 16, 4], jnp.int32)

    def layers(pools, slots):
        return [append_kv(*pair, *new, slots) for pair in pools]

    def scan(pools, slots):
        def step(pools, slots):
            return layers(pools, slots), None

        return jax.lax.scan(step, pools, slots[None] + jnp.arange(4, dtype=jnp.int32)[:, None])[0]

    for function in (layers, scan):
        donating = jax.jit(function, donate_argnums=0)
        compiled = donating.lower(pools, slots).compile()
        assert library.APPEND in compiled.as_text()
        assert not copies(compiled, shape)
        assert compiled.memory_analysis().temp_size_in_bytes < pools[0][0].nbytes
    assert copies(jax.jit(layers).lower(pools, slots).compile(), shape), "nothing looks like a copy"


def test_the_gradient_and_the_map_of_append_are_those_of_the_scatter():
    pools = rand(4, 2, 4, 8), rand(4, 2, 4, 8, seed=1)
    new = rand(3, 2, 8, seed=2), rand(3, 2, 8, seed=3)
    slots = jnp.array([3, -1, 9], jnp.int32)

    def loss(pools, new):
        return sum(jnp.sum(jnp.sin(x)) for x in append_kv(*pools, *new, slots))

    (d_pools, d_new) = jax.grad(loss, (0, 1))(pools, new)
    assert bits(d_new[0][1]) == bits(np.zeros((2, 8), np.float32)), "the token was skipped"
    np.testing.assert_allclose(d_new[1][0], np.cos(new[1][0]), rtol=1e-5)
    np.testing.assert_array_equal(d_pools[0][0, :, 3], 0.0)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), pools)
    mapped = jax.vmap(lambda pools: append_kv(*pools, *new, slots))(stacked)
    for x, right in zip(mapped, append_kv(*pools, *new, slots), strict=True):
        assert bits(x[1]) == bits(right)


@pytest.fixture
def mesh():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def placed(mesh, *arrays_and_axes):
    return [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes))) for x, axes in arrays_and_axes
    ]


@pytest.mark.parametrize("heads", [(8, 4), (4, 4), (8, 1), (6, 3)])
def test_a_call_cut_by_batch_and_heads_gathers_nothing(mesh, heads):
    """Three key/value heads cannot be cut in two: then they are whole, and the result right."""
    query, key, value, lens = cache([40, 9, 2, 17], heads, (64, 64), 2, "bfloat16")
    pools, tables = into_pages([key, value], lens, 8, "HND")
    kv = "model" if heads[1] % 2 == 0 else None
    terms = {"sinks": jnp.ones(heads[0]), "k_scale": jnp.full(heads[1], 0.5)}
    terms["plan"] = decode_plan(lens, num_new_tokens=2)
    call = jax.jit(
        functools.partial(paged_attention, implementation="cuda", return_residual=True, **terms)
    )
    arrays = placed(
        mesh,
        (query, ("data", None, "model")),
        (pools[0], (None, kv)),
        (pools[1], (None, kv)),
        (tables, ("data",)),
        (lens, ("data",)),
    )
    text = call.lower(*arrays).compile().as_text()
    assert library.DECODE in text
    got = call(*arrays)
    if heads[1] != 3:
        assert "all-gather" not in text
        assert all(tuple(x.sharding.spec)[:3] == ("data", None, "model") for x in got)
    assert bits(list(got)) == bits(list(call(query, *pools, tables, lens)))
    contiguous = jax.jit(functools.partial(decode_attention, implementation="cuda"))
    arrays = placed(
        mesh,
        (query, ("data", None, "model")),
        (key, ("data", None, kv)),
        (value, ("data", None, kv)),
        (lens, ("data",)),
    )
    assert bits(contiguous(*arrays)) == bits(contiguous(query, key, value, lens))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_append_to_pools_cut_by_heads_gathers_and_copies_nothing(mesh, layout, is_fused):
    shape, where = ((64, 4, 16, 64), (None, "model"))
    if layout == "NHD":
        shape, where = (64, 16, 4, 64), (None, None, "model")
    if is_fused:
        shape, where = (64, 2, *shape[1:]), (None, None, *where[1:])
    new = rand(5, 4, 64, dtype="bfloat16")
    slots = jnp.array([1, -1, 40, 1023, 3], jnp.int32)
    append = functools.partial(
        append_kv,
        page_layout=layout,
        k_scale=jnp.float32([0.5, 1.0, 2.0, 4.0]),
        rotary=(rand(5, 16, seed=1), rand(5, 16, seed=2)),
    )
    zeros = [jnp.zeros(shape, "bfloat16") for _ in range(2 - is_fused)]
    want = append(*zeros, *[None] * is_fused, new, new, slots)
    donating = jax.jit(append, donate_argnums=(0, 1))
    pools = [*placed(mesh, *[(x, where) for x in zeros]), *[None] * is_fused]
    tokens = placed(mesh, *[(new, (None, "model"))] * 2)
    compiled = donating.lower(*pools, *tokens, slots).compile()
    assert library.APPEND in compiled.as_text()
    assert "all-gather" not in compiled.as_text()
    assert not copies(compiled, tuple(n // 2 if n == 4 else n for n in shape))
    got = donating(*pools, *tokens, slots)
    assert bits(jax.tree.leaves(got)) == bits(jax.tree.leaves(want))
    assert got[0].sharding.spec == PartitionSpec(*where)


@pytest.mark.parametrize("implementation", ["cuda", "xla"])
def test_pools_on_a_mesh_with_explicit_axes_stay_as_they_are(mesh, implementation, monkeypatch):
    if implementation == "xla":
        monkeypatch.setattr(backends, "_NEEDS_GPU", ("mosaic", "cuda", "cudnn"))
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    pool, new = rand(8, 4, 4, 64, dtype="bfloat16"), rand(3, 4, 64, dtype="bfloat16")
    slots = jnp.array([1, -1, 30], jnp.int32)
    want = append_kv(pool, pool, new, new, slots)
    with jax.set_mesh(explicit):
        pool, new = placed(explicit, (pool, (None, "model")), (new, (None, "model")))
        got = jax.jit(append_kv)(pool, pool, new, new, slots)
    assert got[0].sharding.spec == PartitionSpec(None, "model", None, None)
    assert bits(list(got)) == bits(list(want))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("lengths", [[40, 9, 2], [17_000, 40, 3]], ids=["cluster", "ranges"])
def test_every_device_gives_the_same_bits(lengths):
    query, key, value, lens = cache(lengths, (4, 2), (64, 64), 2, "bfloat16")
    pools, tables = into_pages([key, value], lens, 16, "HND")
    call = jax.jit(functools.partial(paged_attention, implementation="cuda", return_residual=True))
    results = [
        call(*jax.device_put((query, *pools, tables, lens), device)) for device in jax.devices()[:2]
    ]
    assert np.isfinite(np.float32(results[0][0])).all()
    assert len({tuple(map(bits, result)) for result in results}) == 1


def test_an_exported_call_is_the_call():
    pytest.importorskip("flatbuffers")
    arrays = small_call()
    call = jax.jit(functools.partial(paged_attention, implementation="cuda"))
    allowed = [export.DisabledSafetyCheck.custom_call(library.DECODE)]
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    exported = export.export(call, platforms=[platform], disabled_checks=allowed)(*arrays)
    again = export.deserialize(exported.serialize())
    assert bits(again.call(*arrays)) == bits(call(*arrays))
