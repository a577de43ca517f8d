"""A paged key/value cache: one layer's pools on the device, and the tables that lead into them.

    page of token t      block_tables[b, t // S]
    slot of token t      page * S + t % S                 S: tokens of a page (page_size)

:class:`jax_flash.BlockManager` decides on the host which pages a table names. Page 0 belongs to
nobody: an entry of 0 (or less) names no page, which is what tables are padded with.

Source: Kwon et al. 2023 (PagedAttention).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import api, checks
from jax_flash.spec import QUERY_DTYPES

Array = jax.Array

MAX_DECODE_TOKENS = 16
"""New tokens up to which :func:`jax_flash.paged_attention` reads pages in place on a GPU."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of one attention layer in pages, and the sequences that a call is about.

    Takes the place of a :class:`jax_flash.layers.KVCache` in ``FlashCausalSelfAttention``. Donate
    it under ``jax.jit`` and its pools are updated in place.

    Attributes:
        key_pages: ``[P, Hk, S, D]``, P pages of S tokens; page 0 is never read or written.
        value_pages: ``[P, Hk, S, D]``.
        block_tables: int32 ``[B, max_pages]``, page numbers; 0 where there is no page.
        lengths: int32 ``[B]``, tokens of each sequence that are stored.
    """

    key_pages: Array
    value_pages: Array
    block_tables: Array
    lengths: Array

    @classmethod
    def create(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
    ) -> PagedKVCache:
        """Empty pools and no sequences.

        Args:
            num_pages: P, page 0 included.
            page_size: S.
            num_kv_heads: Hk.
            head_dim: D.
            dtype: floating point.

        Returns:
            A cache of zeros; give it sequences with :meth:`with_sequences`.

        Raises:
            ValueError: a size below 1, or no page besides page 0.
            TypeError: a dtype that is not floating point.
        """
        sizes = {"page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size < 1:
                raise checks.value_error(name, size, "must be >= 1", "Pass a positive number")
        if num_pages < 2:
            raise checks.value_error(
                "num_pages", num_pages, "must be >= 2: page 0 is reserved", "Add pages"
            )
        dtype = jnp.dtype(dtype)
        if dtype not in QUERY_DTYPES:
            raise checks.type_error("dtype", dtype, "must be floating point", "Use bfloat16")
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        # Two arrays, not one twice: a buffer cannot be donated twice.
        return cls(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((0, 0), jnp.int32),
            jnp.zeros((0,), jnp.int32),
        )

    @property
    def page_size(self) -> int:
        """S, the tokens of a page."""
        return self.key_pages.shape[2]

    @property
    def capacity(self) -> int:
        """The most tokens that a row of the tables can name."""
        return self.block_tables.shape[1] * self.page_size

    def with_sequences(self, block_tables: Array, lengths: Array) -> PagedKVCache:
        """The same pools for other sequences.

        Args:
            block_tables: int32 ``[B, max_pages]``.
            lengths: int32 ``[B]``, tokens that are stored already.

        Returns:
            The cache, sharing its pools.

        Raises:
            ValueError: shapes that do not go together.
            TypeError: a wrong dtype.
        """
        tables = checks.as_index_array("block_tables", block_tables)
        checks.check_rank("block_tables", tables, (2,), "[B, max_pages]")
        lengths = checks.as_index_array("lengths", lengths)
        checks.check_shape("lengths", lengths, tables.shape[:1], "[B]", "One length a table row")
        return dataclasses.replace(self, block_tables=tables, lengths=lengths)

    def check_fits(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError unless a layer of these sizes can use the cache for this batch."""
        pool = (self.key_pages.shape[0], num_kv_heads, self.page_size, head_dim)
        remedy = "Create the cache with the layer's num_kv_heads and head_dim"
        checks.check_shape("cache.key_pages", self.key_pages, pool, "[P, Hk, S, D]", remedy)
        remedy = "Name this batch with with_sequences"
        checks.check_shape("cache.lengths", self.lengths, (batch,), "[B]", remedy)

    def slots(self, num_new: int, new_lengths: Array | None = None) -> tuple[Array, Array]:
        """Where new tokens go, for :func:`jax_flash.append_kv`.

        Args:
            num_new: T, new tokens a row.
            new_lengths: int32 ``[B]``, how many of the T tokens of each row count; None for all.

        Returns:
            int32 ``[B, T]``, -1 for what is not stored, and bool ``[B, T]``: True for a token that
            counts and for which the table names no page.
        """
        token = jnp.arange(num_new, dtype=jnp.int32)[None]
        position = self.lengths[:, None] + token
        column, max_pages = position // self.page_size, self.block_tables.shape[1]
        page = jnp.zeros_like(position)
        if max_pages:
            inside = jnp.clip(column, 0, max_pages - 1)
            page = jnp.take_along_axis(self.block_tables, inside, axis=1)
        has_page = (column < max_pages) & (page > 0) & (page < self.key_pages.shape[0])
        counts = jnp.ones_like(position, bool)
        if new_lengths is not None:
            counts = token < new_lengths[:, None]
        slot = page * self.page_size + position % self.page_size
        return jnp.where(counts & has_page, slot, -1), counts & ~has_page

    def append(
        self, key: Array, value: Array, new_lengths: Array | None = None
    ) -> tuple[PagedKVCache, Array]:
        """Stores new tokens behind the old ones; tokens that find no page are dropped.

        Args:
            key: ``[B, T, Hk, D]``.
            value: ``[B, T, Hk, D]``.
            new_lengths: int32 ``[B]``, how many of the T tokens of each row count; None for all.

        Returns:
            The grown cache, and bool ``[B, T]``: True for a token that counts and was dropped.

        Raises:
            ValueError: a wrong shape.
            TypeError: a wrong dtype.
        """
        batch, num_new = key.shape[:2]
        slots, dropped = self.slots(num_new, new_lengths)
        key_pages, value_pages = api.append_kv(
            self.key_pages,
            self.value_pages,
            key.reshape(batch * num_new, *key.shape[2:]),
            value.reshape(batch * num_new, *value.shape[2:]),
            slots.reshape(-1),
        )
        assert value_pages is not None
        counts = num_new if new_lengths is None else new_lengths
        lengths = jnp.minimum(self.lengths + counts, self.capacity)
        return PagedKVCache(key_pages, value_pages, self.block_tables, lengths), dropped

    def attend(
        self,
        query: Array,
        start: Array,
        new_lengths: Array | None = None,
        *,
        implementation: api.Implementation = None,
        **terms: Any,
    ) -> Array:
        """Causal attention of new tokens, appended already, to all of their sequence.

        A few tokens a row go to :func:`jax_flash.paged_attention`. For more of them, a chunk of a
        prompt, each row's pages are gathered once and :func:`jax_flash.dot_product_attention` runs
        over them: its tiles reuse a key for every query of the chunk, which the copy is small to.

        Args:
            query: ``[B, T, Hq, D]``.
            start: int32 ``[B]``, :attr:`lengths` before these tokens were appended.
            new_lengths: int32 ``[B]``, how many of the T tokens of each row count; None for all.
                The others get 0.
            implementation: see :func:`jax_flash.dot_product_attention`.
            **terms: ``scale``, ``local_window_size``, ``logits_soft_cap``, ``sinks`` and
                ``alibi_slopes``, as there.

        Returns:
            ``[B, T, Hq, D]`` in the query's dtype.

        Raises:
            ValueError: a wrong shape or value.
            TypeError: a wrong dtype.
            UnsupportedError: the implementations named cannot compute this call.
        """
        num_new = query.shape[1]
        stored = query.astype(self.key_pages.dtype)
        terms["implementation"] = implementation
        if num_new == 1 or (new_lengths is None and num_new <= MAX_DECODE_TOKENS):
            lengths = self.lengths
            if new_lengths is not None:  # a row without a new token reads nothing
                lengths = jnp.where(new_lengths > 0, lengths, 0)
            # Every layer makes the same one: in one program the compiler keeps the first.
            plan = api.decode_plan(
                lengths,
                num_new_tokens=num_new,
                local_window_size=terms.get("local_window_size"),
            )
            pools = self.key_pages, self.value_pages
            out = api.paged_attention(
                stored, *pools, self.block_tables, lengths, plan=plan, **terms
            )
            return out.astype(query.dtype)
        out = api.dot_product_attention(
            stored,
            self._gathered(self.key_pages),
            self._gathered(self.value_pages),
            is_causal=True,
            q_offset=start,
            query_seq_lengths=new_lengths,
            key_value_seq_lengths=self.lengths,
            **terms,
        )
        return out.astype(query.dtype)

    def _gathered(self, pool: Array) -> Array:
        """The pages of each row, one after another: ``[B, max_pages * S, Hk, D]``."""
        batch = self.block_tables.shape[0]
        # Past the length an entry may hold anything, and what it reads is hidden.
        pages = jnp.swapaxes(pool.at[self.block_tables].get(mode="clip"), 2, 3)
        return pages.reshape(batch, self.capacity, *pages.shape[3:])

    def copy_pages(self, sources: Array, targets: Array) -> PagedKVCache:
        """Copies whole pages, as a fork's copy-on-write asks.

        Args:
            sources: int32 ``[N]``, page numbers.
            targets: int32 ``[N]``, page numbers, none twice but 0 (padding: 0 onto 0).

        Returns:
            The cache with the copies in it.
        """
        key_pages, value_pages = (
            pool.at[targets].set(pool.at[sources].get(mode="clip"), mode="drop")
            for pool in (self.key_pages, self.value_pages)
        )
        return dataclasses.replace(self, key_pages=key_pages, value_pages=value_pages)
