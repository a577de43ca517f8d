"""One step of the engine on the device: append, paged attention and the draw in one program.

What a call needs from the host travels as one int32 array, one row a sequence:

    token ids [T] | block table [max_pages] | the fields of `FIELDS`, floats bit by bit

and what comes back is one, `[draws, 2, rows]`: the drawn ids and the bits of their
log-probabilities. The newest token of every slot stays on the device, so that a step can follow
another unread, and a row draw several tokens in one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_flash import PagedKVCache
from models import sampling
from models.minigpt import MiniGPT
from models.scheduler import Call

_MOST = np.iinfo(np.int32).max
FIELDS = ("start", "count", "slot", "seed", "draw", "num_draws", "temperature", "top_k", "top_p")


class Graph:
    """The structure of a model, as a static argument that costs nothing to look up.

    Hashing nnx's own takes longer than launching a step, so equal ones become one object here, and
    that is compared by identity. Made by `split`.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph


_graph = functools.lru_cache(maxsize=64)(Graph)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What lives on the device from step to step, donated to each.

    Attributes:
        pools: keys and values `[pages, Hk, page_size, D]`, of each block of the model.
        newest: int32 `[slots]`, the token that each slot drew last.
    """

    pools: list[tuple[jax.Array, jax.Array]]
    newest: jax.Array

    def caches(self, tables: jax.Array, lengths: jax.Array) -> list[PagedKVCache]:
        """The pools with the sequences of a call."""
        return [PagedKVCache(*pools, tables, lengths) for pools in self.pools]

    def replace(self, caches: Sequence[PagedKVCache], newest: jax.Array) -> State:
        """The state with the pools of caches."""
        return State([(cache.key_pages, cache.value_pages) for cache in caches], newest)


def init_state(model: MiniGPT, num_slots: int, num_pages: int, page_size: int, dtype: Any) -> State:
    """Empty pools for all blocks of a model."""
    config = model.config
    create = functools.partial(
        PagedKVCache.create, num_pages, page_size, config.kv_heads, config.head_dim, dtype
    )
    caches = [create() for _ in range(config.num_layers)]
    pools = [(cache.key_pages, cache.value_pages) for cache in caches]
    return State(pools, jnp.zeros((num_slots,), jnp.int32))


def place(model: MiniGPT, state: State) -> tuple[Graph, Any, State]:
    """The arguments that `run` keeps getting, on the device that the model is on.

    All of them are committed to it: if only some were, what `run` returns would be of another kind
    than what it first got, and it would be compiled a second time. The model stays as it is.
    """
    graph, params = nnx.split(_with_cast_layers(model))
    (device, *_) = jax.tree.leaves(params)[0].devices()
    params, state = jax.device_put((params, state), device)
    return _graph(graph), params, state


def _with_cast_layers(model: MiniGPT) -> MiniGPT:
    """A copy whose products hold what they multiply with: each step would cast it anew.

    The embedding that the logits are made of is one of them, though it be tied to that of tokens.
    """
    model = nnx.clone(model)
    output = model.token_embedding if model.output_embedding is None else model.output_embedding
    cast = output.get_value().astype(model.config.dtype)
    model.output_embedding = nnx.data(nnx.Param(cast))
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Linear):
            for param in (layer.kernel, layer.bias):
                if param is not None:
                    param.set_value(param.get_value().astype(layer.dtype))
    return model


@functools.cache
def _padding(num_slots: int) -> np.ndarray:
    """The fields of a row that computes nothing: no slot, and no filter to draw with."""
    fields = np.zeros(len(FIELDS), np.int32)
    fields[FIELDS.index("slot")] = num_slots
    fields[FIELDS.index("top_p")] = np.float32(1.0).view(np.int32)
    return fields


def pack(call: Call, tables: Sequence[Sequence[int]], max_pages: int, num_slots: int) -> np.ndarray:
    """The rows of a call as one array; rows of padding compute nothing and draw to no slot.

    Args:
        call: the rows and the shape to pad them to.
        tables: the pages of each row's sequence.
        max_pages: columns of the block table.
        num_slots: a slot that there is not.

    Returns:
        int32 `[rows, T + max_pages + len(FIELDS)]`.
    """
    num_rows, num_tokens = call.shape
    packed = np.zeros((num_rows, num_tokens + max_pages + len(FIELDS)), np.int32)
    packed[len(call.rows) :, -len(FIELDS) :] = _padding(num_slots)
    _fill(packed[:, :num_tokens], [row.tokens for row in call.rows])
    _fill(packed[:, num_tokens : num_tokens + max_pages], tables)
    rows = call.rows
    params = [row.sequence.params for row in rows]

    def fill(name: str, values: list[Any], dtype: Any = np.int32) -> None:
        packed[: len(rows), FIELDS.index(name) - len(FIELDS)].view(dtype)[:] = values

    fill("start", [row.start for row in rows])
    fill("count", [len(row.tokens) for row in rows])
    fill("slot", [row.sequence.slot for row in rows])
    fill("seed", [row.sequence.seed for row in rows], np.uint32)
    fill("draw", [row.draw or 0 for row in rows])
    fill("num_draws", [0 if row.draw is None else row.num_draws for row in rows])
    fill("temperature", [one.temperature for one in params], np.float32)
    fill("top_k", [min(one.top_k or 0, _MOST) for one in params])
    fill("top_p", [1.0 if one.top_p is None else one.top_p for one in params], np.float32)
    return packed


def _fill(columns: np.ndarray, rows: Sequence[Sequence[int]]) -> None:
    """Writes the beginnings of the first rows, all at once."""
    lengths = np.array([len(row) for row in rows], np.int32)
    is_written = np.arange(columns.shape[1]) < lengths[:, None]
    values = itertools.chain.from_iterable(rows)
    columns[: len(rows)][is_written] = np.fromiter(values, np.int32, lengths.sum())


_bits = jax.lax.bitcast_convert_type


@functools.partial(
    jax.jit,
    static_argnames=("graph", "num_tokens", "has_filters", "num_draws"),
    donate_argnames="state",
)
def run(
    graph: Graph,
    params: Any,
    state: State,
    packed: jax.Array,
    *,
    num_tokens: int,
    has_filters: bool,
    num_draws: int,
) -> tuple[State, jax.Array]:
    """Computes a call.

    Args:
        graph: from `place`.
        params: from `place`.
        state: donated.
        packed: from `pack`.
        num_tokens: T; 1 where rows draw more than once.
        has_filters: whether a row has a `top_k` or `top_p`: these sort the vocabulary, which costs
            more than the rest of the draw. Static, for a branch on the device would make the host
            wait for it before it can launch what follows.
        num_draws: the most that a row draws.

    Returns:
        The next state, and int32 `[num_draws, 2, rows]`: ids (-1 where the logits are no
        distribution) and the bits of their fp32 log-probabilities under the model, before
        temperature and filters. What a row did not draw is anything.
    """
    tables = packed[:, num_tokens : -len(FIELDS)]
    field = {name: packed[:, i - len(FIELDS)] for i, name in enumerate(FIELDS)}
    nobody = state.newest.shape[0]

    def draw(index: Any, carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, result = carry
        newest = state.newest.at[field["slot"]].get(mode="fill", fill_value=0)
        tokens = packed[:, :num_tokens]
        tokens = jnp.where((tokens < 0) | (index > 0), newest[:, None], tokens)
        counts = jnp.where((index == 0) | (index < field["num_draws"]), field["count"], 0)
        logits, caches = nnx.merge(graph.graph, params)(
            tokens,
            caches=state.caches(tables, field["start"] + index),
            new_lengths=counts,
            logits_at=jnp.maximum(counts - 1, 0),
        )
        drawn = sampling.sample_rows(
            _bits(field["seed"], jnp.uint32),
            field["draw"] + index,
            logits,
            _bits(field["temperature"], jnp.float32),
            field["top_k"] if has_filters else None,
            _bits(field["top_p"], jnp.float32) if has_filters else None,
        )
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        logprobs = jnp.take_along_axis(logprobs, jnp.maximum(drawn, 0)[:, None], axis=-1)[:, 0]
        target = jnp.where(index < field["num_draws"], field["slot"], nobody)
        newest = state.newest.at[target].set(drawn, mode="drop")
        result = result.at[index, 0].set(drawn).at[index, 1].set(_bits(logprobs, jnp.int32))
        return state.replace(caches, newest), result

    start = state, jnp.zeros((num_draws, 2, packed.shape[0]), jnp.int32)
    return draw(0, start) if num_draws == 1 else jax.lax.fori_loop(0, num_draws, draw, start)


@functools.partial(jax.jit, donate_argnames="state")
def copy_pages(state: State, pairs: jax.Array) -> State:
    """Copies pages in all layers; `pairs` is int32 `[N, 2]`, source and target, padded with 0."""
    nobody = jnp.zeros((0, 0), jnp.int32), jnp.zeros((0,), jnp.int32)
    caches = [cache.copy_pages(pairs[:, 0], pairs[:, 1]) for cache in state.caches(*nobody)]
    return state.replace(caches, state.newest)
