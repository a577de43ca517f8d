"""The algebra of a tile in the backward kernel: from products to P' and dS', masks and terms.

Keys are rows and queries are columns. See :mod:`pallas_kernels.backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_flash.mask import dropout_threshold
from pallas_kernels import ops as primitives
from pallas_kernels import schedule as schedules
from pallas_kernels import tiles
from pallas_kernels.backward_config import GROUPS
from pallas_kernels.backward_terms import folds_positions
from pallas_kernels.column_sums import add_column_sums
from pallas_kernels.config import Problem
from pallas_kernels.ops import Ops
from pallas_kernels.terms import Terms

Array = jax.Array
Ref = Any

ROWS = tiles.WARPGROUP_ROWS
QUERY_BOUNDS = ("query_start", "query_end")  # of keys, where they are known at run time only
KEY_SUMS = ("dbias_keys", "dslopes")  # gradients of terms that are sums over queries
PUBLISHED_ROWS = 128  # of a bias's gradient, at a time: telling others takes time
ALL_ROWS = np.iinfo(np.int32).max


def key_vectors(problem: Problem) -> tuple[str, ...]:
    """Names of what masks compare that is a number a key: int32 ``[B|1, keys]``."""
    bounds = () if problem.mask.has_static_ranges else QUERY_BOUNDS
    return bounds if problem.mask.kv_segments is None else (*bounds, "kv_segments")


class Step(NamedTuple):
    """One query tile of one query head.

    Attributes:
        turn: how many steps this thread block has made.
        batch: batch element.
        slab: where dQ keeps this batch element's part.
        head: query head.
        row: first query.
        key: first key of the thread block.
        kv_slot: where in the ring of K and V these are.
        masked: whether keys may be hidden: False, True, or a traced bool.
    """

    turn: Any
    batch: Any
    slab: Any
    head: Any
    row: Any
    key: Any
    kv_slot: Any
    masked: Any


class Given(NamedTuple):
    """What the terms of a call say about a tile of scores, read before the scores are there.

    Attributes:
        of_keys: fp32, one entry a row: what is added to the logits of each key; None for nothing.
        of_queries: fp32, one entry a column: likewise of each query.
        bias: the tile's bias, or None.
        visible: fp32, one entry a row: 0 hides a key from all queries; None hides none.
        row_keys: int32, one entry a column, for dropout, or None.
        seed: int32 scalar, likewise.
        place: where in the ring of Q the tile's queries are.
    """

    of_keys: Array | None
    of_queries: Array | None
    bias: Array | None
    visible: Array | None
    row_keys: Array | None
    seed: Any
    place: tuple[Any, ...]


class Probabilities(NamedTuple):
    """P' of a tile, in the forms that products need; the same array where there is no difference.

    Attributes:
        kept: factors of dO in dV: without what is dropped (and without ``1 / (1 - rate)``).
        slopes: times the soft cap's derivative; negative where dropped.
    """

    kept: Array
    slopes: Array


class Tiles:
    """What a consumer computes of a tile; one instance a trace.

    Attributes:
        problem: static facts.
        ops: primitives.
        edges: what is known at trace time about masked tiles.
        refs: by name.
        terms: of the call.
        has_visits: whether key tiles have lists of query tiles, because of a boolean mask.
        value_scale: factor of dV.
        writes_bias: whether a bias's gradient is written at first, not added to zeros.
        warpgroup: this one's index.
    """

    def __init__(
        self,
        problem: Problem,
        ops: Ops,
        edges: schedules.QueryEdges,
        refs: dict[str, Ref],
        writes_bias: bool = False,
    ):
        self.problem = problem
        self.ops = ops
        self.edges = edges
        self.refs = refs
        self.terms = Terms(ops, problem, refs)
        self.has_visits = "visits" in refs
        self.value_scale = 1.0 / (1.0 - problem.dropout_rate)
        self.writes_bias = writes_bias
        self.warpgroup = lax.axis_index("warpgroup")

    def hide(self, step: Step, s: Array, given: Given, row: Any, key: Any) -> Array:
        """Scores with -inf where a query does not see a key, a boolean mask aside.

        Args:
            step: the step.
            s: scores of keys from ``key`` on (rows) and queries from ``row`` on (columns).
            given: of this tile.
            row: first query.
            key: first key.
        """
        ops, mask = self.ops, self.problem.mask
        of_queries = of_keys = None
        if mask.q_segments is not None:
            if "q_segments_s" in self.refs:
                of_queries = ops.load_shared_columns(self.refs["q_segments_s"].at[given.place])
            else:
                source = self.of_batch("q_segments", step.batch).at[pl.ds(row, s.shape[1])]
                of_queries = ops.load_columns(source)
            of_keys = self.key_vector("kv_segments", step, key, s.shape[0])
        if not mask.has_static_ranges:
            # Two numbers a key are 4 in each thread, and at hand. Two numbers a query would be 32,
            # from global memory, and for want of registers be waited for in four rounds.
            start, end = (self.key_vector(name, step, key, s.shape[0]) for name in QUERY_BOUNDS)
            return tiles.hide(ops, s, tiles.RowBounds(start, end, of_keys), row, of_queries)
        position = ops.column_iota(s.shape[1]) + (row + mask.q_offset)
        start, end = mask.static_interval(position, self.problem.kv_len)
        start = None if isinstance(start, int) else start
        bounds = tiles.RowBounds(start, end, of_queries)
        visible = tiles.visible_columns(ops, s.shape, bounds, key, of_keys)
        return jnp.where(visible, s, -jnp.inf)

    def key_vector(self, name: str, step: Step, key: Any, count: int) -> Array:
        """One of :func:`key_vectors`, of the keys from ``key`` on."""
        if "of_keys_s" not in self.refs:
            return self.ops.load_rows(self.of_batch(name, step.batch).at[pl.ds(key, count)])
        place = key_vectors(self.problem).index(name), pl.ds(key - step.key, count)
        return self.ops.load_rows(self.refs["of_keys_s"].at[step.kv_slot, *place])

    def of_batch(self, name: str, batch: Any) -> Ref:
        """Of an array ``[B|1, ...]`` the element's part."""
        ref = self.refs[name]
        return ref.at[batch if ref.shape[0] > 1 else 0]

    def given(
        self, step: Step, row: Any, key: Any, shape: tuple[int, int], place: tuple[Any, ...]
    ) -> Given:
        """Reads what terms say about a tile.

        Args:
            step: the step.
            row: first query.
            key: first key.
            shape: keys by queries.
            place: where in the ring of Q these queries are.
        """
        terms, (num_keys, num_queries) = self.terms, shape
        at, names = (step.batch, step.head), self.refs
        of_keys = of_queries = bias = visible = row_keys = seed = None
        if not self.problem.has_plain_scores:
            # Positions are relative to a near one: large ones then cost no accuracy.
            folds = folds_positions(self.problem)
            origin = row + self.problem.mask.q_offset if folds else key
            of_keys = terms.of_keys(*at, key, num_keys, origin, as_rows=True)
            if not folds:
                of_queries = terms.of_queries(*at, row, num_queries, key, as_rows=False)
        if "bias" in names and "bias_s" not in names:
            tile = terms.of("bias", *at).at[:, pl.ds(row, num_queries)]
            bias = self.ops.gather_rows(tile, key, num_keys)
        if "visible_keys" in names:
            visible = self.ops.load_rows(terms.of("visible_keys", *at).at[pl.ds(key, num_keys)])
        if "row_keys" in names:
            row_keys = self.ops.load_shared_columns(names["row_keys_s"].at[place])
            seed = names["seeds"][step.batch]
        return Given(of_keys, of_queries, bias, visible, row_keys, seed, place)

    def probabilities(
        self, step: Step, s: Array, lse: Array, given: Given, row: Any, key: Any
    ) -> Probabilities:
        """P' of products."""
        problem, ops = self.problem, self.ops
        of_queries = given.of_queries
        if of_queries is not None and problem.soft_cap is None:
            unit = 1.0 if problem.is_wide else tiles.LOG2_E
            lse, of_queries = lse - of_queries * unit, None
        s = self.terms.scores(
            s, rows=given.of_keys, columns=of_queries, bias=given.bias, hides=False
        )

        def hide() -> Array:
            return self.hide_by_array(step, self.hide(step, s, given, row, key), given, row, key)

        x = s
        if step.masked is True:
            x = hide()
        elif step.masked is not False:
            x = lax.cond(step.masked, hide, lambda: s)
        exponent = tiles.exponent(x, lse, problem.scale_log2, wide=problem.is_wide, axis=1)
        # Far from 0, fp32 logits are apart by more than probabilities allow. Where a bias hides a
        # key, or has a NaN, for which its row has no gradient, the exponent may be NaN.
        p = ops.exp2(exponent) if problem.bias is None else ops.probability(exponent)
        kept = p
        if problem.dropout_rate > 0.0:
            threshold = dropout_threshold(problem.dropout_rate)
            p = ops.drop(p, given.row_keys, key, given.seed, threshold, keys_axis=0, negate=True)
            kept = jnp.maximum(p, 0.0)
        if problem.soft_cap is not None:
            # The score is a hyperbolic tangent t, with the derivative 1 - t^2; hidden: 0.
            hides = problem.bias is not None or self.edges.masked
            t = jnp.maximum(x, -1.0) if hides else x
            p = p * (1.0 - t * t)
        return Probabilities(kept, p)

    def hide_by_array(self, step: Step, s: Array, given: Given, row: Any, key: Any) -> Array:
        """Scores with -inf where the boolean mask says so."""
        if given.visible is not None:
            visible = lax.broadcast_in_dim(given.visible, s.shape, [0])
            return jnp.where(visible > 0.0, s, -jnp.inf)
        if "visible_bits" in self.refs:
            words = self.terms.of("visible_bits", step.batch, step.head)
            return self.ops.hide_by_bits(s, words, key, row)
        return s

    def score_gradients(self, step: Step, p: Array, dp: Array, delta: Array) -> Array:
        """From P' (:attr:`Probabilities.slopes`) and dP' to dS'."""
        rate = self.problem.dropout_rate
        delta = lax.broadcast_in_dim(delta, p.shape, [1])
        if rate > 0.0:
            # Dropped probabilities are negative, and their dP' is 0.
            ds = p * jnp.where(p > 0.0, dp * (1.0 / (1.0 - rate)) - delta, delta)
        else:
            ds = p * (dp - delta)

        def hide() -> Array:
            # A hidden value may have made dP' anything.
            return jnp.where(p == 0.0, 0.0, ds)

        if step.masked is True or self.problem.bias is not None:
            return hide()
        if step.masked is not False:
            return lax.cond(step.masked, hide, lambda: ds)
        return ds

    def no_sums(self) -> tuple[Array, ...]:
        """Sums over queries of which there are none yet, for each of this warpgroup's keys."""
        return tuple(self.ops.full_rows(ROWS, 0.0) for name in KEY_SUMS if name in self.refs)

    def add_to_sums(
        self, sums: tuple[Array, ...], ds: Array, step: Step, row: Any, key: Any
    ) -> tuple[Array, ...]:
        """Adds dS' of the queries from ``row`` on."""
        if not sums:
            return sums
        total = ds.sum(axis=1)
        more = []
        if "dbias_keys" in self.refs:
            more.append(total)
        if "dslopes" in self.refs:  # the distance of each key and query, relative to this key
            own = self.ops.float_iota(ROWS, primitives.ROWS)
            other = self.terms.query_positions(step.batch, row, ds.shape[1], key, as_rows=False)
            weighted = ds * lax.broadcast_in_dim(other, ds.shape, [1])
            more.append(total * own - weighted.sum(axis=1))
        return tuple(old + new for old, new in zip(sums, more, strict=True))

    def store_sums(self, sums: tuple[Array, ...], batch: Any, head: Any, key: Any) -> None:
        """Writes the sums of one query head, of the keys from ``key`` on."""
        if not sums:
            return
        staging = self.refs["sums_s"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for place, value in enumerate(sums):
            staging[place] = value
        plgpu.commit_smem()
        names = [name for name in KEY_SUMS if name in self.refs]
        for place, name in enumerate(names):
            target = self.refs[name].at[batch, head, pl.ds(key, ROWS)]
            plgpu.copy_smem_to_gmem(staging.at[place], target)

    def add_to_bias(self, ds: Array, step: Step, row: Any, key: Any) -> None:
        """Adds dS', or its sums over keys, to the bias's gradient in global memory."""
        if "dbias_queries" in self.refs:
            target = self.refs["dbias_queries"].at[self.warpgroup, step.batch, step.head]
            add_column_sums(self.ops, ds, target.at[pl.ds(row, ds.shape[1])])
        if "dbias" not in self.refs:
            return
        target = self.terms.of("dbias", step.batch, step.head)
        if self.writes_bias and "dbias_rows" not in self.refs:  # nobody adds to it
            target = target.at[pl.ds(row, ds.shape[1]), pl.ds(key, ROWS)]
            self.ops.write_transposed(target, ds.astype(target.dtype))
            return
        staging = self.refs["dbias_s" if "dbias_s" in self.refs else "dq_s"]
        source = staging.at[self.warpgroup if staging.shape[0] > 1 else 0]
        count = source.shape[0]
        is_first = self.is_first_of_bias(step.batch)
        for first in range(0, ds.shape[1], count):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.ops.store_transposed(source, ds[:, first : first + count])
            plgpu.commit_smem()
            piece = target.at[pl.ds(row + first, count), pl.ds(key, ROWS)]

            def write(source: Ref = source, piece: Ref = piece, first: int = first) -> None:
                if first == 0:  # what was written before has had a step's time to arrive
                    is_due = lax.rem(row, jnp.int32(PUBLISHED_ROWS)) == 0
                    pl.when(is_due)(lambda: self.publish_bias(step.head, step.key, row))
                plgpu.copy_smem_to_gmem(source, piece)

            choose(is_first, write, functools.partial(self.ops.reduce_store, source, piece))

    def is_first_of_bias(self, batch: Any) -> Any:
        """Whether a batch element writes its part of the bias's gradient, before others add to it.

        Otherwise it adds: to what the first has written, or to zeros.
        """
        return batch == 0 if "dbias_rows" in self.refs else False

    def publish_bias(self, head: Any, key: Any, rows: Any) -> None:
        """Tells others, if there are any, that the first ``rows`` of the gradient are there."""
        if "dbias_rows" not in self.refs:
            return
        plgpu.wait_smem_to_gmem(0)
        kv_tile = lax.div(key, jnp.int32(GROUPS * ROWS))
        place = head, kv_tile, pl.ds(self.warpgroup, 1)
        self.ops.publish(self.refs["dbias_rows"].at[place], rows)


def choose(condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
    """Runs one of two functions; a condition that is known at trace time leaves one."""
    if isinstance(condition, bool):
        (yes if condition else no)()
    else:
        lax.cond(condition, yes, no)
