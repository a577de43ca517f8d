"""MiniGPT: a pre-norm decoder in Flax nnx whose attention is `jax_flash`.

    x = token_embedding[tokens] + position_embedding[positions]
    for each block:  x += attention(norm(x));  x += mlp(norm(x))
    logits = norm(x) @ token_embedding.T

The layout and the initialisation are GPT-2's (Radford et al., 2019): normal(0.02) everywhere, and
normal(0.02 / sqrt(2 * num_layers)) for the two projections per block that write to the residual
stream, so that its variance at initialisation does not grow with depth. Rotary positions, RMSNorm,
SwiGLU and grouped heads are options.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jax_flash import PagedKVCache
from jax_flash.layers import FlashCausalSelfAttention, KVCache

Cache = KVCache | PagedKVCache

INIT_STD = 0.02
ROPE_THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class MiniGPTConfig:
    """The static facts of a MiniGPT. Hashable, and `dataclasses.asdict` of it is plain JSON.

    Attributes:
        vocab_size: number of token ids.
        context_length: most tokens the model sees at once.
        num_layers: number of blocks.
        num_heads: query heads per block; divides `width`.
        width: channels of the residual stream.
        num_kv_heads: key/value heads (grouped-query attention); divides `num_heads`. None: as many.
        norm: "layernorm", or "rmsnorm" (Zhang & Sennrich, 2019), which has no mean and no bias.
        mlp: "gelu", four times as wide inside, or "swiglu" (Shazeer, 2020), 8/3 times with a gate:
            about as many parameters.
        position: "learned" adds a trained embedding per position, "rope" rotates queries and keys.
        dropout_rate: applied to the embeddings, the attention weights and both residual branches.
        tie_weights: the output projection is the token embedding itself.
        use_bias: linear layers and norms have biases.
        dtype: "float32" or "bfloat16", what the blocks compute in. Parameters and logits are fp32.
        implementation: passed to `jax_flash.dot_product_attention`; None lets it choose.
    """

    vocab_size: int
    context_length: int = 256
    num_layers: int = 6
    num_heads: int = 6
    width: int = 384
    num_kv_heads: int | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    position: Literal["learned", "rope"] = "learned"
    dropout_rate: float = 0.0
    tie_weights: bool = True
    use_bias: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    implementation: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "num_layers", "num_heads", "width"):
            _check_positive(name, getattr(self, name))
        if self.num_kv_heads is not None:
            _check_positive("num_kv_heads", self.num_kv_heads)
        _check_divides("num_heads", self.num_heads, "width", self.width)
        _check_divides("num_kv_heads", self.kv_heads, "num_heads", self.num_heads)
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"head_dim (width / num_heads) must be even with position='rope', got "
                f"{self.head_dim}; change width or num_heads, or use position='learned'"
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate must be in [0, 1), got {self.dropout_rate}")
        for name, allowed in (
            ("norm", ("layernorm", "rmsnorm")),
            ("mlp", ("gelu", "swiglu")),
            ("position", ("learned", "rope")),
            ("dtype", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads, the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MiniGPTConfig:
        """The inverse of `dataclasses.asdict`, also after a trip through JSON."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ValueError(f"unknown MiniGPTConfig fields {unknown}; known: {sorted(known)}")
        fields = dict(fields)
        if isinstance(fields.get("implementation"), list):
            fields["implementation"] = tuple(fields["implementation"])
        return cls(**fields)


class Norm(nnx.Module):
    """Layer normalisation (Ba et al., 2016) or RMSNorm over the last axis, in fp32."""

    def __init__(self, config: MiniGPTConfig) -> None:
        self.is_centred = config.norm == "layernorm"
        has_bias = self.is_centred and config.use_bias
        self.scale = nnx.Param(jnp.ones((config.width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((config.width,), jnp.float32)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., C] -> [..., C]`, in the dtype of `x`."""
        y = x.astype(jnp.float32)
        if self.is_centred:
            y = jax.nn.standardize(y, axis=-1, epsilon=1e-5)
        else:
            y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
        y = y * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


class MLP(nnx.Module):
    """Feed-forward layer: GELU, or SwiGLU with gate and value in one matrix."""

    def __init__(self, config: MiniGPTConfig, *, rngs: nnx.Rngs) -> None:
        self.is_gated = config.mlp == "swiglu"
        # 8/3 of the width, up to a multiple of 32: three matrices, and what tiles divide.
        inside = -(-config.width // 12) * 32 if self.is_gated else 4 * config.width
        outputs = 2 * inside if self.is_gated else inside
        self.up = _linear(config, config.width, outputs, INIT_STD, rngs)
        self.down = _linear(config, inside, config.width, _residual_std(config), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, C] -> [B, T, C]`."""
        x = self.up(x)
        if not self.is_gated:
            return self.down(nnx.gelu(x, approximate=True))
        gate, value = jnp.split(x, 2, axis=-1)
        return self.down(nnx.silu(gate) * value)


class Block(nnx.Module):
    """One pre-norm block: attention, then MLP, each added to the stream."""

    def __init__(self, config: MiniGPTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm_attention = Norm(config)
        self.attention = FlashCausalSelfAttention(
            config.num_heads,
            config.width,
            num_kv_heads=config.num_kv_heads,
            rope_theta=ROPE_THETA if config.position == "rope" else None,
            dropout_rate=config.dropout_rate,
            use_bias=config.use_bias,
            dtype=jnp.dtype(config.dtype),
            kernel_init=nnx.initializers.normal(INIT_STD),
            out_kernel_init=nnx.initializers.normal(_residual_std(config)),
            implementation=config.implementation,
            rngs=rngs,
        )
        self.norm_mlp = Norm(config)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout_rate = config.dropout_rate

    def __call__(
        self,
        x: jax.Array,
        *,
        dropout_rng: jax.Array | None,
        cache: Cache | None,
        new_lengths: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        """`x [B, T, C]` and the cache after it; without `dropout_rng` there is no dropout."""
        keys = _split(dropout_rng, 3)
        y = self.attention(
            self.norm_attention(x),
            deterministic=dropout_rng is None,
            dropout_rng=keys[0],
            cache=cache,
            new_lengths=new_lengths,
        )
        if cache is not None:
            y, cache = y
        x = x + dropout(y, self.dropout_rate, keys[1])
        x = x + dropout(self.mlp(self.norm_mlp(x)), self.dropout_rate, keys[2])
        return x, cache


class MiniGPT(nnx.Module):
    """The language model.

    Example:
        >>> model = MiniGPT(MiniGPTConfig(vocab_size=65), rngs=nnx.Rngs(0))
        >>> logits = model(tokens)                                  # [B, T] -> fp32 [B, T, vocab]
        >>> caches = model.init_caches(batch_size=1)
        >>> logits, caches = model(tokens, caches=caches)           # prefill, then one token a call
    """

    def __init__(self, config: MiniGPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.token_embedding = _matrix(config.vocab_size, config.width, rngs)
        self.position_embedding = (
            _matrix(config.context_length, config.width, rngs)
            if config.position == "learned"
            else None
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = Norm(config)
        self.output_embedding = (
            None if config.tie_weights else _matrix(config.vocab_size, config.width, rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        deterministic: bool = True,
        dropout_rng: jax.Array | None = None,
        caches: Sequence[Cache] | None = None,
        new_lengths: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> Any:
        """Next-token logits at every position, or at one of each row.

        Args:
            tokens: integer `[B, T]`, `T <= context_length`. An id outside the vocabulary makes that
                row's logits NaN from there on (ids are traced, so it cannot be an error here).
            deterministic: True turns dropout off.
            dropout_rng: key for dropout; needed when `deterministic=False` and `dropout_rate > 0`.
            caches: one `KVCache` per block, from `init_caches` or an earlier call, or one
                `PagedKVCache` per block. The new tokens follow those already in the cache. Tokens
                past its capacity are dropped and their logits are NaN.
            new_lengths: int32 `[B]`, only with `caches`: how many of the T tokens of each row are
                real, the rest being padding on the right. None: all.
            logits_at: int32 `[B]`, the only token of each row whose logits are wanted.

        Returns:
            fp32 logits `[B, T, vocab_size]`, with `logits_at` `[B, vocab_size]`; with `caches` also
            the list of updated caches.

        Raises:
            TypeError: tokens are not integers.
            ValueError: wrong rank or length, or arguments that do not go together.
        """
        config = self.config
        self._check_call(tokens, deterministic, dropout_rng, caches, new_lengths)
        if deterministic or config.dropout_rate == 0.0:
            dropout_rng = None
        keys = _split(dropout_rng, config.num_layers + 1)
        dtype = jnp.dtype(config.dtype)
        x = _rows(self.token_embedding[...], tokens)
        # The gradient of the positions sums over the batch. For that XLA would lay all activations
        # out with the batch innermost, and transpose them before and after every product.
        x = with_layout_constraint(x, Layout((0, 1, 2)))
        if self.position_embedding is not None:
            x = x + _positions(self.position_embedding[...], tokens.shape[1], caches)
        x = dropout(x.astype(dtype), config.dropout_rate, keys[-1])

        new_caches: list[Cache | None] = []
        for index, block in enumerate(self.blocks):
            cache = None if caches is None else caches[index]
            x, cache = block(x, dropout_rng=keys[index], cache=cache, new_lengths=new_lengths)
            new_caches.append(cache)

        if logits_at is not None:  # before the largest product of all, not after it
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        output = self.token_embedding if self.output_embedding is None else self.output_embedding
        logits = jnp.einsum(
            "btc,vc->btv",
            self.norm(x),
            output[...].astype(dtype),
            preferred_element_type=jnp.float32,
        )
        if logits_at is not None:
            logits = logits[:, 0]
        return logits if caches is None else (logits, new_caches)

    def init_caches(
        self, batch_size: int, max_length: int | None = None, dtype: Any = None
    ) -> list[KVCache]:
        """Empty caches, one per block.

        Args:
            batch_size: rows.
            max_length: tokens per row; None: `context_length`, all that learned positions allow.
            dtype: element type of the keys and values; None: the config's.
        """
        config = self.config
        max_length = config.context_length if max_length is None else max_length
        if config.position == "learned" and max_length > config.context_length:
            raise ValueError(
                f"max_length ({max_length}) must be at most context_length "
                f"({config.context_length}) with learned positions; use position='rope' to go on"
            )
        dtype = jnp.dtype(config.dtype) if dtype is None else dtype
        return [block.attention.init_cache(batch_size, max_length, dtype) for block in self.blocks]

    def _check_call(
        self,
        tokens: jax.Array,
        deterministic: bool,
        dropout_rng: jax.Array | None,
        caches: Sequence[Cache] | None,
        new_lengths: jax.Array | None,
    ) -> None:
        config = self.config
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers, got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape [B, T], got {tokens.shape}")
        if caches is None and tokens.shape[1] > config.context_length:
            raise ValueError(
                f"tokens have length {tokens.shape[1]}, more than context_length "
                f"({config.context_length}); pass the last {config.context_length}"
            )
        if not deterministic and config.dropout_rate > 0.0 and dropout_rng is None:
            raise ValueError("deterministic=False needs dropout_rng: pass a jax.random key")
        if new_lengths is not None and caches is None:
            raise ValueError("new_lengths has a meaning only with caches; pass caches or drop it")
        if caches is not None and len(caches) != config.num_layers:
            raise ValueError(f"caches must hold {config.num_layers} entries, got {len(caches)}")


def num_parameters(params: Any) -> int:
    """Number of trained scalars of a model or of its parameters, tied weights counted once."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest; no key, no dropout."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def _split(key: jax.Array | None, count: int) -> tuple[jax.Array | None, ...]:
    return (None,) * count if key is None else tuple(jax.random.split(key, count))


def _positions(table: jax.Array, length: int, caches: Sequence[Cache] | None) -> jax.Array:
    """Position embeddings `[T, C]`; with caches `[B, T, C]`, starting where each row ends."""
    if caches is None:
        return table[:length]
    offsets = jnp.arange(length, dtype=jnp.int32)
    return _rows(table, caches[0].lengths[:, None] + offsets[None, :])


def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]`, NaN where an id is out of range (plain indexing would clamp or wrap it)."""
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _matrix(rows: int, columns: int, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Param(init(rngs.params(), (rows, columns), jnp.float32))


def _linear(
    config: MiniGPTConfig, inputs: int, outputs: int, std: float, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=config.use_bias,
        dtype=jnp.dtype(config.dtype),
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def _residual_std(config: MiniGPTConfig) -> float:
    return INIT_STD / math.sqrt(2 * config.num_layers)


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_divides(name: str, value: int, other: str, total: int) -> None:
    if total % value:
        raise ValueError(f"{name} ({value}) must divide {other} ({total})")
