"""Flax: an ``attention_fn`` for Flax's own modules, and a causal self-attention layer.

Drop-in use, for ``flax.nnx`` and ``flax.linen`` alike::

    nnx.MultiHeadAttention(..., attention_fn=jax_flash.layers.attention_fn)
    nn.MultiHeadDotProductAttention(..., attention_fn=jax_flash.layers.attention_fn)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes

from jax_flash import api, checks
from jax_flash.backends import UnsupportedError
from jax_flash.kv_cache import PagedKVCache
from jax_flash.spec import QUERY_DTYPES

Array = jax.Array


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    implementation: api.Implementation = None,
) -> Array:
    """``attention_fn`` of ``nnx.MultiHeadAttention`` and ``nn.MultiHeadDotProductAttention``.

    The parameters are those of Flax's own function, so that nnx (which passes all of them) and
    linen (which passes those that the signature names) both work. Choose an implementation with
    ``functools.partial(attention_fn, implementation=...)``.

    Differences from Flax's function: a query that sees no key gets 0; dropout masks always differ
    between heads and batch elements; the softmax is in fp32.

    Args:
        query: ``[batch..., Tq, Hq, D]``, any number of batch axes.
        key: ``[batch..., Tk, Hk, D]``.
        value: ``[batch..., Tk, Hk, Dv]``.
        bias: broadcastable to ``[batch..., Hq, Tq, Tk]``.
        mask: broadcastable to ``[batch..., Hq, Tq, Tk]``; nonzero is visible, whatever the dtype.
        broadcast_dropout: accepted and not used; see above.
        dropout_rng: JAX key, needed if dropout is on.
        dropout_rate: probability of dropping a softmax probability.
        deterministic: True switches dropout off.
        dtype: dtype to compute in; None infers it from the inputs.
        precision: accepted and not used: fp32 inputs are always multiplied in fp32.
        module: must be None: attention weights are never formed, so they cannot be sown.
        promote_dtype: Flax's promotion function.
        is_causal: top-left causal mask. A single query that comes with a mask is a step of cached
            decoding: its mask says which slots of the cache are filled, and this flag is ignored.
        implementation: see :func:`jax_flash.dot_product_attention`.

    Returns:
        ``[batch..., Tq, Hq, Dv]``.

    Raises:
        UnsupportedError: ``module`` was given (``sow_weights=True``).
        ValueError: see :func:`jax_flash.dot_product_attention`.
        TypeError: likewise.
    """
    del broadcast_dropout, precision
    if module is not None:
        raise UnsupportedError(
            "sow_weights=True: attention weights are never formed here. "
            "Use Flax's own attention_fn for the layer whose weights you want to look at."
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise checks.value_error(
                f"{name}.shape", x.shape, "must be [batch..., T, H, D]", "Add the missing axes"
            )
    batch_shape = query.shape[:-3]
    for name, x in (("key", key), ("value", value)):
        if x.shape[:-3] != batch_shape:
            raise checks.value_error(
                f"{name}.shape",
                x.shape,
                f"the batch axes must be those of query, {batch_shape}",
                "Give each batch element its keys and values",
            )
    full = (*batch_shape, query.shape[-2], query.shape[-3], key.shape[-3])
    if mask is not None:
        mask = checks.as_array("mask", mask).astype(bool)
        mask = checks.as_broadcastable("mask", mask, full, "[batch..., Hq, Tq, Tk]")
        mask = _flatten_batch(mask, batch_shape)
    if bias is not None:
        bias = checks.as_array("bias", bias)
        bias = checks.as_broadcastable("bias", bias, full, "[batch..., Hq, Tq, Tk]")
        bias = _flatten_batch(bias, batch_shape)
    if mask is not None and query.shape[-3] == 1 and key.shape[-3] > 1:
        is_causal = False
    use_dropout = dropout_rate > 0.0 and not deterministic
    query, key, value = (_flatten_batch(x, x.shape[:-3]) for x in (query, key, value))
    out = api.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate if use_dropout else 0.0,
        dropout_rng=dropout_rng if use_dropout else None,
        implementation=implementation,
    )
    return out.reshape(*batch_shape, *out.shape[1:])


def _flatten_batch(x: Array, batch_shape: tuple[int, ...]) -> Array:
    """``[batch...|1, *rest]`` as ``[B|1, *rest]``, where rest has three axes."""
    if math.prod(x.shape[:-3]) != 1:
        x = jnp.broadcast_to(x, batch_shape + x.shape[-3:])
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far by one attention layer.

    Attributes:
        key: ``[B, S, Hk, D]``.
        value: ``[B, S, Hk, D]``.
        lengths: int32 ``[B]``, filled slots of each row.
    """

    key: Array
    value: Array
    lengths: Array

    @property
    def capacity(self) -> int:
        """S, the slots of a row."""
        return self.key.shape[1]

    def check_fits(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError unless a layer of these sizes can use the cache for this batch."""
        expected = (batch, self.capacity, num_kv_heads, head_dim)
        remedy = "Make the cache with this layer's init_cache, for this batch size"
        checks.check_shape("cache.key", self.key, expected, "[B, S, Hk, D]", remedy)

    def append(self, key: Array, value: Array, new_lengths: Array | None) -> tuple[KVCache, Array]:
        """Stores new tokens behind the old ones; tokens that find no slot are dropped.

        Args:
            key: ``[B, T, Hk, D]``.
            value: ``[B, T, Hk, D]``.
            new_lengths: int32 ``[B]``, how many of the T tokens of each row count; None for all.

        Returns:
            The grown cache, and bool ``[B, T]``: True for a token that counts and was dropped.

        Raises:
            ValueError: tokens do not fit, where lengths are known when the call is traced.
        """
        batch, num_new = key.shape[:2]
        token = jnp.arange(num_new, dtype=jnp.int32)[None]
        counts = np.full((batch,), num_new, np.int32) if new_lengths is None else new_lengths
        known, known_counts = checks.known_values(self.lengths), checks.known_values(counts)
        if known is not None and known_counts is not None:
            longest = int((known + known_counts).max(initial=0))
            if longest > self.capacity:
                raise checks.value_error(
                    "length of the cache after this call",
                    longest,
                    f"must not exceed its capacity, {self.capacity}",
                    "Allocate a longer cache, or start again from the last tokens",
                )
        slot = self.lengths[:, None] + token
        counts_here = token < counts[:, None]
        dropped = counts_here & (slot >= self.capacity)
        # Out of range on purpose for what is not stored: mode="drop" writes nothing there.
        slot = jnp.where(counts_here & ~dropped, slot, self.capacity)
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        cache = KVCache(
            self.key.at[row, slot].set(key.astype(self.key.dtype), mode="drop"),
            self.value.at[row, slot].set(value.astype(self.value.dtype), mode="drop"),
            jnp.minimum(self.lengths + counts, self.capacity),
        )
        return cache, dropped

    def attend(
        self,
        query: Array,
        start: Array,
        new_lengths: Array | None,
        *,
        implementation: api.Implementation = None,
    ) -> Array:
        """Causal attention of new tokens, appended already, to all of their row.

        Args:
            query: ``[B, T, Hq, D]``.
            start: int32 ``[B]``, :attr:`lengths` before these tokens were appended.
            new_lengths: int32 ``[B]``, how many of the T tokens of each row count; None for all.
                The others get 0.
            implementation: see :func:`jax_flash.dot_product_attention`.

        Returns:
            ``[B, T, Hq, D]`` in the query's dtype.
        """
        stored = query.astype(self.key.dtype)
        if query.shape[1] == 1 and new_lengths is None:
            out = api.decode_attention(
                stored, self.key, self.value, self.lengths, implementation=implementation
            )
        else:
            out = api.dot_product_attention(
                stored,
                self.key,
                self.value,
                is_causal=True,
                q_offset=start,
                query_seq_lengths=new_lengths,
                key_value_seq_lengths=self.lengths,
                implementation=implementation,
            )
        return out.astype(query.dtype)


class FlashCausalSelfAttention(nnx.Module):
    """Causal self-attention with optional rotary positions, grouped heads and a key/value cache.

    One matrix projects to queries, keys and values, one projects back.

    Args:
        num_heads: query heads.
        in_features: width of the input and of the output.
        num_kv_heads: key/value heads; None for ``num_heads``.
        head_dim: None for ``in_features // num_heads``.
        rope_theta: base of the rotary position embedding (10000.0 is common); None for none.
        dropout_rate: dropout of attention probabilities.
        use_bias: whether the projections have a bias.
        dtype: dtype to compute in; None infers it from input and parameters.
        param_dtype: dtype of the parameters.
        kernel_init: initialiser of the projection kernels.
        out_kernel_init: initialiser of the output kernel; None for ``kernel_init``.
        bias_init: initialiser of the biases.
        implementation: see :func:`jax_flash.dot_product_attention`.
        rngs: the module's random streams.

    Raises:
        ValueError: head counts or dims that do not fit together.

    Source:
        Su et al. 2021 (RoPE, in the half-split form); Ainslie et al. 2023 (grouped queries).
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = None,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.lecun_normal(),  # noqa: B008 - a pure function
        out_kernel_init: Any = None,
        bias_init: Any = nnx.initializers.zeros_init(),  # noqa: B008 - a pure function
        implementation: api.Implementation = None,
        rngs: nnx.Rngs,
    ):
        self.num_heads = _positive("num_heads", num_heads)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and in_features % num_heads:
            raise checks.value_error(
                "num_heads",
                num_heads,
                f"must divide in_features, {in_features}, when head_dim is not given",
                "Pass head_dim, or change one of them",
            )
        head_dim = in_features // num_heads if head_dim is None else head_dim
        self.head_dim = _positive("head_dim", head_dim)
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise checks.value_error(
                "num_kv_heads",
                self.num_kv_heads,
                f"must divide num_heads, {num_heads}",
                "Choose a divisor",
            )
        if rope_theta is not None and self.head_dim % 2:
            raise checks.value_error(
                "head_dim",
                self.head_dim,
                "must be even for rotary positions",
                "Use an even head_dim",
            )
        self.in_features = in_features
        self.rope_theta = rope_theta
        self.dropout_rate = checks.as_rate("dropout_rate", dropout_rate)
        self.dtype = dtype
        self.implementation = implementation
        qkv_features = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        options = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        self.qkv = nnx.Linear(in_features, qkv_features, kernel_init=kernel_init, **options)
        self.out = nnx.Linear(
            num_heads * self.head_dim,
            in_features,
            kernel_init=out_kernel_init or kernel_init,
            **options,
        )

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = None) -> KVCache:
        """An empty cache.

        Args:
            batch_size: rows.
            max_length: slots of a row.
            dtype: dtype of keys and values; None for that of the layer (fp32 if it has none).

        Returns:
            A :class:`KVCache`.

        Raises:
            ValueError: a negative size.
            TypeError: a dtype that is not floating point.
        """
        for name, size in (("batch_size", batch_size), ("max_length", max_length)):
            if size < 0:
                raise checks.value_error(
                    name, size, "must be >= 0", "Pass a number of rows or slots"
                )
        dtype = jnp.dtype(dtype or self.dtype or jnp.float32)
        if dtype not in QUERY_DTYPES:
            raise checks.type_error("dtype", dtype, "must be floating point", "Use bfloat16")
        shape = (batch_size, max_length, self.num_kv_heads, self.head_dim)
        zeros = jnp.zeros(shape, dtype)
        return KVCache(zeros, zeros, jnp.zeros((batch_size,), jnp.int32))

    def __call__(
        self,
        x: Array,
        *,
        deterministic: bool = True,
        dropout_rng: Array | None = None,
        cache: KVCache | PagedKVCache | None = None,
        new_lengths: Array | None = None,
    ) -> Any:
        """Attends from each token to itself and to those before it.

        Args:
            x: ``[B, T, in_features]``.
            deterministic: True switches dropout off.
            dropout_rng: JAX key, needed if dropout is on.
            cache: what came before, contiguous or in pages; the tokens of ``x`` follow it.
            new_lengths: int32 ``[B]``, with a cache: how many of the T tokens of each row count
                (prompts of unequal lengths, padded on the right). Outputs of the others are those
                of an attention result of 0. None for all.

        Returns:
            ``[B, T, in_features]``; with a cache the pair of it and the grown cache. A token that
            found no slot changes no slot, and its output is NaN.

        Raises:
            ValueError: a wrong shape, dropout without a key, or a cache that is full (where its
                lengths are known when the call is traced).
        """
        if new_lengths is not None and cache is None:
            raise checks.value_error(
                "new_lengths", "given", "has a meaning only with a cache", "Pass cache= too"
            )
        if x.ndim != 3 or x.shape[2] != self.in_features:
            raise checks.value_error(
                "x.shape",
                x.shape,
                f"must be [B, T, in_features] with in_features = {self.in_features}",
                "Reshape the input, or build the layer for its width",
            )
        batch, length, _ = x.shape
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if cache is not None:
            cache.check_fits(batch, kv_heads, self.head_dim)
        if new_lengths is not None:
            new_lengths = checks.as_lengths("new_lengths", new_lengths, batch, length)
        qkv = self.qkv(x).reshape(batch, length, heads + 2 * kv_heads, self.head_dim)
        query, key, value = jnp.split(qkv, (heads, heads + kv_heads), axis=2)
        if self.rope_theta is not None:
            start = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths
            positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
            query = rotate(query, positions, self.rope_theta)
            key = rotate(key, positions, self.rope_theta)
        use_dropout = self.dropout_rate > 0.0 and not deterministic
        if cache is None:
            out = api.dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                dropout_rate=self.dropout_rate if use_dropout else 0.0,
                dropout_rng=dropout_rng if use_dropout else None,
                implementation=self.implementation,
            )
            return self.out(out.reshape(batch, length, -1))
        if use_dropout:
            raise checks.value_error(
                "deterministic", False, "a cache is for inference, without dropout", "Pass True"
            )
        start = cache.lengths
        cache, dropped = cache.append(key, value, new_lengths)
        out = cache.attend(query, start, new_lengths, implementation=self.implementation)
        out = jnp.where(dropped[..., None, None], jnp.nan, out)
        return self.out(out.reshape(batch, length, -1)), cache


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise checks.value_error(name, value, "must be at least 1", "Choose a positive number")
    return value


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding, in the half-split form (channel ``c`` pairs with ``c + D/2``).

    Args:
        x: ``[B, T, H, D]``, D even.
        positions: int32 ``[B, T]``.
        theta: base of the frequencies ``theta ** (-2c / D)``.

    Returns:
        The rotated array, in the dtype of ``x``; angles and products are in fp32.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)
    return rotated.astype(x.dtype)
