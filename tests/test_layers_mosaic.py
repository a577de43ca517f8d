"""Flax models on Hopper: with our `attention_fn` the Mosaic kernels compute all attention."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_flash import backends, explain
from jax_flash.layers import attention_fn
from pallas_kernels import backend
from tests.conftest import ROOT
from tests.kernel_cases import HOPPER, ON_GPU
from tests.tolerance import fast_jit, rand

HEADS = 2
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
    elif backends.device_of().compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")


def relative_attention():
    """The class of the recipe, as it is."""
    page = (ROOT / "docs/recipes.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = (block for block in blocks if "class RelativeAttention" in block)
    names = {"jax": jax, "jnp": jnp}
    exec(compile(block.partition("\nlayer = ")[0], "docs/recipes.md", "exec"), names)
    return names["RelativeAttention"]


def of_nnx(build):
    """The abstract parameters of an nnx model, and its loss."""
    graph, params, rest = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
    assert not jax.tree.leaves(rest)

    def loss(params, x, key=None, **options):
        if key is not None:
            options |= {"rngs": nnx.Rngs(key), "deterministic": False}
        return total(nnx.merge(graph, params, rest)(x, **options))

    return params, loss


def nnx_model(width, attention=attention_fn, **options):
    return of_nnx(
        lambda: nnx.MultiHeadAttention(
            HEADS,
            width,
            dtype=jnp.bfloat16,
            attention_fn=attention,
            decode=False,
            keep_rngs=False,
            rngs=nnx.Rngs(0),
            **options,
        )
    )


def linen_model(width, attention=attention_fn, **options):
    layer = nn.MultiHeadDotProductAttention(
        HEADS, dtype=jnp.bfloat16, attention_fn=attention, **options
    )
    x = jnp.zeros((1, 8, width), jnp.bfloat16)
    params = jax.eval_shape(functools.partial(layer.init, deterministic=True), KEY, x)

    def loss(params, x, key=None, **options):
        if key is not None:
            options |= {"rngs": {"dropout": key}, "deterministic": False}
        return total(layer.apply(params, x, **options))

    return params, loss


def t5_model(width, attention=attention_fn):
    return of_nnx(
        lambda: relative_attention()(
            HEADS, width, dtype=jnp.bfloat16, attention_fn=attention, rngs=nnx.Rngs(0)
        )
    )


def total(out):
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


PADDING = np.arange(256) < np.array([[200], [256]])
CAUSAL = nn.make_causal_mask(PADDING, dtype=bool)
DROPOUT = {"dropout_rate": 0.1}
# name: the model, its options, the call's
MODELS = {
    "nnx": (nnx_model, {}, {}),
    "nnx, causal, GQA": (nnx_model, {"num_kv_heads": 1}, {"is_causal": True}),
    "nnx, padding": (nnx_model, {}, {"mask": PADDING[:, None, None]}),
    "nnx, mask": (nnx_model, {}, {"mask": CAUSAL & PADDING[:, None, None]}),
    "nnx, dropout": (nnx_model, DROPOUT, {"is_causal": True, "key": KEY}),
    "linen": (linen_model, {}, {}),
    "linen, padding": (linen_model, {}, {"mask": PADDING[:, None, None]}),
    "linen, mask": (linen_model, {}, {"mask": CAUSAL}),
    "linen, dropout": (linen_model, DROPOUT, {"mask": CAUSAL, "key": KEY}),
    "T5": (t5_model, {}, {}),
    "T5, padding": (t5_model, {}, {"mask": PADDING[:, None, None]}),
}


def report_of(name):
    """What runs the attention of a training step."""
    model, options, call = MODELS[name]
    params, loss = model(HEADS * 64, **options)
    x = jax.ShapeDtypeStruct((2, 256, HEADS * 64), "bfloat16")
    return explain(jax.value_and_grad(loss, (0, 1)), params, x, **call)


@pytest.mark.parametrize("name", MODELS)
def test_models_run_on_the_kernels_forward_and_backward(name):
    report = report_of(name)
    assert report.decisions
    assert set(report.chosen) == {"mosaic"}, report
    assert not any(decision.is_gradient for decision in report.decisions), report


def test_a_gradient_that_falls_back_is_seen(monkeypatch):
    monkeypatch.setattr(backend, "declines_gradient", lambda spec: "not today")
    report = report_of("T5, padding")
    *forward, gradient = report.decisions
    assert {decision.chosen for decision in forward} == {"mosaic"}
    assert gradient.is_gradient
    assert gradient.reasons["mosaic"] == "not today"


@pytest.mark.parametrize("implementation", ["mosaic"])
def test_the_t5_model_gives_what_it_gives_on_the_oracle(implementation):
    batch, length, width = 2, 40, HEADS * 64
    mask = np.arange(length) < np.array([[length], [23]])
    x = jnp.asarray(rand(batch, length, width, dtype="bfloat16"))

    def results(name):
        attention = functools.partial(attention_fn, implementation=name)
        params, loss = t5_model(width, attention)
        leaves, tree = jax.tree.flatten(params)
        drawn = [jnp.asarray(rand(*p.shape, seed=i)) / 8 for i, p in enumerate(leaves)]
        params = jax.tree.unflatten(tree, drawn)
        loss = functools.partial(loss, mask=mask[:, None, None])
        value, (of_params, of_x) = fast_jit(jax.value_and_grad(loss, (0, 1)))(params, x)
        return {"loss": value, "x": of_x, **dict(nnx.to_flat_state(of_params))}

    got, want = results(implementation), results("xla")
    assert len(want) == 7
    for name, exact in want.items():
        got_leaf, exact = (np.asarray(*jax.tree.leaves(y), "f8") for y in (got[name], exact))
        assert np.linalg.norm(got_leaf - exact) <= 0.01 * np.linalg.norm(exact), name
