"""What the tests of serving share: a tiny model with opinions, and what it must say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.data import CharTokenizer
from models.minigpt import MiniGPT, MiniGPTConfig

CHARACTERS = "\n abcdefghijklm"
TOKENIZER = CharTokenizer(CHARACTERS)
CONTEXT = 48
CONFIG = MiniGPTConfig(
    vocab_size=len(CHARACTERS),
    context_length=CONTEXT,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    width=32,
    position="rope",
)


@functools.cache
def make_model(config=CONFIG, scale=10.0):
    """Parameters larger than the usual ones, so that no two tokens are about equally likely."""
    graph, params = nnx.split(MiniGPT(config, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, jax.tree.map(lambda x: scale * x, params))


def prompt_of(length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, len(CHARACTERS), length).tolist()


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(graph, params, tokens):
    return jax.nn.log_softmax(nnx.merge(graph, params)(tokens), axis=-1)


def log_probabilities(tokens, model=None):
    """Of the token after each of these, by one full pass without any cache: `[len(tokens), V]`."""
    graph, params = nnx.split(model or make_model())
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_log_probabilities(graph, params, jnp.asarray(padded))[0, : len(tokens)])


def greedy_tokens(prompt, count, model=None):
    """The most likely continuation, by full passes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(log_probabilities(tokens, model)[-1].argmax()))
    return tokens[len(prompt) :]
