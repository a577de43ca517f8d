"""MiniGPT: shapes, initialisation, cache and what it refuses."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.minigpt import MiniGPT, MiniGPTConfig, dropout, num_parameters

TINY = MiniGPTConfig(vocab_size=11, context_length=8, num_layers=2, num_heads=2, width=16)
VARIANTS = {
    "learned": TINY,
    "rope and grouped heads": dataclasses.replace(
        TINY, num_heads=4, num_kv_heads=2, position="rope"
    ),
    "rmsnorm and swiglu": dataclasses.replace(TINY, norm="rmsnorm", mlp="swiglu", use_bias=False),
    "untied, no biases": dataclasses.replace(TINY, tie_weights=False, use_bias=False),
}
ROPE = VARIANTS["rope and grouped heads"]


@functools.cache
def make(config=TINY, seed=0):
    return MiniGPT(config, rngs=nnx.Rngs(seed))


@nnx.jit
def forward(model, tokens, **options):
    return model(tokens, **options)


def random_tokens(batch=3, length=8):
    return jax.random.randint(jax.random.key(5), (batch, length), 0, TINY.vocab_size, jnp.int32)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_fp32_and_finite(name):
    for dtype in ("float32", "bfloat16"):
        model = make(dataclasses.replace(VARIANTS[name], dtype=dtype))
        logits = forward(model, random_tokens())
        assert (logits.shape, logits.dtype) == ((3, 8, 11), jnp.float32)
        assert np.isfinite(logits).all()


def test_bfloat16_computes_in_bfloat16_but_keeps_fp32_parameters():
    model = make(dataclasses.replace(TINY, dtype="bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"float32"}
    low, full = forward(model, random_tokens()), forward(make(), random_tokens())
    assert (low != full).any()
    np.testing.assert_allclose(low, full, atol=0.01)


def test_a_token_changes_no_logits_before_it():
    tokens = random_tokens()
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 11)
    before, after = forward(make(), tokens), forward(make(), changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_the_count_of_parameters_is_that_of_the_layout():
    c, v, t = 16, 11, 8
    block = (3 * c * c + 3 * c) + (c * c + c) + (8 * c * c + 5 * c) + 4 * c
    assert num_parameters(make()) == v * c + t * c + 2 * block + 2 * c
    modern = make(VARIANTS["rmsnorm and swiglu"])
    inside = 64  # 8/3 of 16, up to a multiple of 32
    block = 4 * c * c + 3 * inside * c + 2 * c
    assert num_parameters(modern) == v * c + t * c + 2 * block + c
    untied = make(dataclasses.replace(TINY, tie_weights=False))
    assert num_parameters(untied) == num_parameters(make()) + v * c


def test_the_initialisation_is_that_of_gpt2():
    model = make(MiniGPTConfig(vocab_size=50, num_layers=2, num_heads=4, width=256))
    block = model.blocks[0]
    residual = 0.02 / np.sqrt(4)
    for array, std in (
        (model.token_embedding, 0.02),
        (model.position_embedding, 0.02),
        (block.mlp.up.kernel, 0.02),
        (block.attention.qkv.kernel, 0.02),
        (block.attention.out.kernel, residual),
        (block.mlp.down.kernel, residual),
    ):
        np.testing.assert_allclose(np.std(array[...]), std, rtol=0.05)
    probabilities = jax.nn.softmax(forward(model, random_tokens()))
    targets = (random_tokens() + 20)[..., None]
    loss = -jnp.log(jnp.take_along_axis(probabilities, targets, axis=-1)).mean()
    assert abs(float(loss) - np.log(50)) < 0.5


def test_rmsnorm_and_swiglu_are_what_their_papers_say():
    model = make(VARIANTS["rmsnorm and swiglu"])
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 16), jnp.float32), np.float64)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(model.norm(jnp.asarray(x, jnp.float32)), rms, atol=1e-5)
    mlp = model.blocks[0].mlp
    gate, value = np.split(x @ np.asarray(mlp.up.kernel[...], np.float64), 2, axis=-1)
    expected = (gate / (1 + np.exp(-gate)) * value) @ np.asarray(mlp.down.kernel[...], np.float64)
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), expected, atol=1e-6)


def test_tied_weights_get_gradients_from_both_ends():
    graph, params = nnx.split(make())
    tokens = jnp.full((1, 4), 3, jnp.int32)
    gradients = jax.jit(jax.grad(lambda p: nnx.merge(graph, p)(tokens)[..., 7].sum()))(params)
    gradient = gradients["token_embedding"][...]
    assert (gradient[3] != 0).any()
    assert (gradient[7] != 0).any()


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("learned", (1,) * 8),
        ("learned", (5, 1, 1, 1)),
        ("learned", (4, 4)),
        ("rope and grouped heads", (1,) * 8),
        ("rope and grouped heads", (4, 4)),
        ("untied, no biases", (5, 1, 1, 1)),
    ],
)
def test_a_cache_filled_in_pieces_gives_the_logits_of_one_pass(name, chunks):
    model, tokens = make(VARIANTS[name]), random_tokens()
    caches = model.init_caches(batch_size=3)
    outputs = []
    for start, length in zip(np.cumsum((0, *chunks)), chunks, strict=False):
        logits, caches = forward(model, tokens[:, start : start + length], caches=caches)
        outputs.append(logits)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), forward(model, tokens), atol=1e-5)
    assert caches[-1].lengths.tolist() == [8, 8, 8]


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_of_unequal_lengths_share_a_batch(name):
    model, tokens = make(VARIANTS[name]), random_tokens()
    lengths = np.array([2, 5, 7], np.int32)
    caches = model.init_caches(3)
    logits, caches = forward(model, tokens[:, :7], caches=caches, new_lengths=lengths)
    following = jnp.asarray([[tokens[row, lengths[row]]] for row in range(3)])
    after, _ = forward(model, following, caches=caches)
    expected = forward(model, tokens)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], atol=1e-5)
        np.testing.assert_allclose(after[row, 0], expected[row, length], atol=1e-5)


def test_tokens_past_the_capacity_give_nan_and_leave_the_cache_as_it_was():
    model, tokens = make(), random_tokens()
    _, full = forward(model, tokens, caches=model.init_caches(3))
    logits, after = forward(model, tokens[:, :1], caches=full)
    assert np.isnan(logits).all()
    jax.tree.map(np.testing.assert_array_equal, full, after)


def test_an_id_outside_the_vocabulary_is_loud_and_local():
    for bad in (11, -1):
        tokens = random_tokens().at[1, 4].set(bad)
        logits = forward(make(), tokens)
        assert np.isnan(logits[1, 4:]).all()
        assert np.isfinite(logits[1, :4]).all()
        assert np.isfinite(logits[::2]).all()


def test_dropout_needs_a_key_and_is_a_function_of_it():
    model = make(dataclasses.replace(TINY, dropout_rate=0.5))
    tokens = random_tokens()
    drop = nnx.jit(lambda model, key: model(tokens, deterministic=False, dropout_rng=key))
    once, again, other = (drop(model, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(once, again)
    assert (once != other).any()
    with_key = forward(model, tokens, dropout_rng=jax.random.key(0))
    np.testing.assert_array_equal(forward(model, tokens), with_key)
    with pytest.raises(ValueError, match="deterministic=False needs dropout_rng"):
        model(tokens, deterministic=False)


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = jnp.ones((100, 100), jnp.float32)
    y = dropout(x, 0.25, jax.random.key(0))
    assert abs(float(y.mean()) - 1.0) < 0.02
    assert abs(float((y == 0).mean()) - 0.25) < 0.02
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_the_implementation_reaches_attention():
    default = forward(make(), random_tokens())
    for name in ("chunked", ("chunked", "xla")):
        logits = forward(make(dataclasses.replace(TINY, implementation=name)), random_tokens())
        np.testing.assert_allclose(logits, default, atol=1e-5)
    with pytest.raises(ValueError, match="no-such"):
        make(dataclasses.replace(TINY, implementation="no-such"))(random_tokens())


def test_a_config_survives_json():
    config = dataclasses.replace(TINY, implementation=("chunked", "xla"), num_kv_heads=1)
    again = MiniGPTConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config
    assert hash(again) == hash(config)
    with pytest.raises(ValueError, match=r"unknown MiniGPTConfig fields \['depth'\]"):
        MiniGPTConfig.from_dict({"vocab_size": 3, "depth": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"num_layers": 1.5}, "num_layers must be a positive integer, got 1.5"),
        ({"num_heads": 3}, r"num_heads \(3\) must divide width \(16\)"),
        ({"num_kv_heads": 3}, r"num_kv_heads \(3\) must divide num_heads \(2\)"),
        ({"num_heads": 16, "position": "rope"}, "head_dim .* must be even"),
        ({"norm": "batch"}, r"norm must be one of .* got 'batch'"),
        ({"mlp": "relu"}, r"mlp must be one of .* got 'relu'"),
        ({"position": "sine"}, r"position must be one of .* got 'sine'"),
        ({"dtype": "float64"}, r"dtype must be one of .* got 'float64'"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ({"dropout_rate": float("nan")}, "dropout_rate must be .* got nan"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **fields)


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        (np.zeros((2, 4), np.float32), {}, TypeError, "tokens must be integers, got float32"),
        (np.zeros((4,), np.int32), {}, ValueError, r"must have shape \[B, T\], got \(4,\)"),
        (np.zeros((1, 9), np.int32), {}, ValueError, r"length 9, more than context_length \(8\)"),
        (
            np.zeros((1, 4), np.int32),
            {"new_lengths": np.array([2], np.int32)},
            ValueError,
            "new_lengths has a meaning only with caches",
        ),
        (np.zeros((1, 4), np.int32), {"caches": []}, ValueError, "must hold 2 entries, got 0"),
    ],
)
def test_a_call_that_cannot_work_is_refused_by_argument(tokens, options, error, message):
    with pytest.raises(error, match=message):
        make()(jnp.asarray(tokens), **options)


def test_a_cache_longer_than_the_learned_positions_is_refused():
    with pytest.raises(ValueError, match=r"max_length \(9\) must be at most context_length \(8\)"):
        make().init_caches(1, max_length=9)
    assert make(ROPE).init_caches(1, max_length=9)[0].key.shape == (1, 9, 2, 4)
