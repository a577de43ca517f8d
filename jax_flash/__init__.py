"""Attention for JAX on NVIDIA GPUs: every mask and term, in one call that says what ran it.

Start with :func:`dot_product_attention`, a drop-in for ``jax.nn.dot_product_attention``, and
:func:`explain`, which says what runs a call. Flax layers are in :mod:`jax_flash.layers`.
"""

from jax_flash.api import (
    append_kv,
    decode_attention,
    decode_plan,
    dot_product_attention,
    merge_attention,
    paged_attention,
    ragged_attention,
)
from jax_flash.backends import UnsupportedError
from jax_flash.block_manager import BlockManager, OutOfPagesError
from jax_flash.cache_calls import DecodePlan
from jax_flash.kv_cache import PagedKVCache
from jax_flash.report import Report, explain

__all__ = [
    "BlockManager",
    "DecodePlan",
    "OutOfPagesError",
    "PagedKVCache",
    "Report",
    "UnsupportedError",
    "append_kv",
    "decode_attention",
    "decode_plan",
    "dot_product_attention",
    "explain",
    "merge_attention",
    "paged_attention",
    "ragged_attention",
]
__version__ = "0.1.0"
