"""Bad input of every public call, message by message.

An error reads `name=value: rule. remedy.` Each row below gives its beginning (the argument and what
it was given), a piece of the rule and a piece of the remedy. The calls are made eagerly, and again
while `jax.jit` traces them with every array an argument.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
from jax_flash.layers import FlashCausalSelfAttention, attention_fn

V, T = ValueError, TypeError
KEY = jax.random.key(0)


def z(*shape, dtype="float32"):
    return jnp.asarray(np.zeros(shape, dtype))  # jnp.zeros would compile a program for each shape


def z32(*shape):
    return z(*shape, dtype="int32")


def zbool(*shape):
    return z(*shape, dtype=bool)


def ints(*values):
    return jnp.array(values, jnp.int32)


def kv(*shape, dtype="float32"):
    return {"key": z(*shape, dtype=dtype), "value": z(*shape, dtype=dtype)}


def cache(*shape, dtype="float32"):
    return {"key_cache": z(*shape, dtype=dtype), "value_cache": z(*shape, dtype=dtype)}


def pages(*shape, dtype="float32"):
    return {"key_pages": z(*shape, dtype=dtype), "value_pages": z(*shape, dtype=dtype)}


def segments(q_ids, kv_ids):
    return {"query_segment_ids": q_ids, "key_value_segment_ids": kv_ids}


# A valid call of each function. A row replaces some of its arguments.
CU_SEQLENS = {"cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 3, 9)}
TOKENS = {"new_key": z(3, 2, 8), "new_value": z(3, 2, 8), "slot_mapping": ints(0, 1, 2)}
DENSE = {"query": z(2, 5, 4, 8), **kv(2, 7, 2, 8)}
RAGGED = {"query": z(6, 4, 8), **kv(9, 2, 8), **CU_SEQLENS, "is_causal": True}
DECODE = {"query": z(2, 1, 4, 8), **cache(2, 7, 2, 8), "kv_lens": ints(3, 7)}
TABLES = {"block_tables": z32(2, 3), "kv_lens": ints(3, 12)}
PAGED = {"query": z(2, 1, 4, 8), **pages(6, 2, 4, 8), **TABLES}
PLAN = jax_flash.decode_plan(ints(3, 4, 5))
ODD_POOL = {"key_pages": z(6, 3, 2, 4, 8), "value_pages": None}
MERGE = {"outs": [z(2, 3, 8), z(2, 3, 8)], "lses": [z(2, 3), z(2, 3)]}
FUNCTIONS = {
    "dense": (jax_flash.dot_product_attention, DENSE),
    "ragged": (jax_flash.ragged_attention, RAGGED),
    "decode": (jax_flash.decode_attention, DECODE),
    "paged": (jax_flash.paged_attention, PAGED),
    "append": (jax_flash.append_kv, {**pages(6, 2, 4, 8), **TOKENS}),
    "merge": (jax_flash.merge_attention, MERGE),
    "plan": (jax_flash.decode_plan, {"kv_lens": ints(3, 7)}),
    "flax": (attention_fn, DENSE),
}


@dataclass(frozen=True)
class Row:
    """One bad call: the exception's type, the message's beginning and pieces of its two halves.

    `values` says that only the values of an array are wrong, so that a traced one cannot tell.
    """

    function: str
    error: type | tuple[type, ...]
    start: str
    rule: str
    remedy: str
    changes: dict[str, Any]
    values: bool = False

    def __str__(self):
        return f"{self.function} {self.start}"


def bad(function, error, start, rule="", remedy="", /, **changes):
    return Row(function, error, start, rule, remedy, changes)


def bad_values(function, error, start, rule="", remedy="", /, **changes):
    return Row(function, error, start, rule, remedy, changes, values=True)


FLOATS, FP32 = "bfloat16, float16, float32 or float64", "query.dtype (float32)"
AXES, CAST, INT32 = "Add or remove axes", "Cast", "astype('int32')"

ARRAYS = [
    # Rank.
    bad("dense", V, "query.shape=(5, 8)", "[B, T, H, D] or [T, H, D]", AXES, query=z(5, 8)),
    bad("dense", V, "query.shape=(1, 2, 5, 4, 8)", "[T, H, D]", AXES, query=z(1, 2, 5, 4, 8)),
    bad("dense", V, "key.shape=(7, 2, 8)", "batch", "", **kv(7, 2, 8)),
    bad("ragged", V, "query.shape=(1, 6, 4, 8)", "[tokens, H, D]", AXES, query=z(1, 6, 4, 8)),
    bad("ragged", V, "key.shape=(9, 8)", "[tokens, H, D]", AXES, key=z(9, 8)),
    bad("decode", V, "query.shape=(2, 4, 8)", "[B, new_tokens, Hq, D]", AXES, query=z(2, 4, 8)),
    bad("decode", V, "key_cache.shape=(7, 2, 8)", "[B, S, Hk, D]", AXES, key_cache=z(7, 2, 8)),
    bad("plan", V, "kv_lens.shape=(2, 2)", "[B]", AXES, kv_lens=z32(2, 2)),
    bad("plan", V, "num_new_tokens=0", ">= 1", "axis Tq", num_new_tokens=0),
    bad("decode", T, "plan=int", "a DecodePlan", "decode_plan", plan=3),
    bad("paged", V, "plan.chunk_ends.shape=(3,)", "[B]", "lengths", plan=PLAN),
    bad("paged", V, "query.shape=(4, 8)", "[B, new_tokens, Hq, D]", AXES, query=z(4, 8)),
    bad("paged", V, "value_pages.shape=(6, 4, 8)", "[P, S, Hk, D]", AXES, value_pages=z(6, 4, 8)),
    bad("append", V, "key_pages.shape=(6, 2, 8)", "[P, Hk, S, D]", AXES, key_pages=z(6, 2, 8)),
    bad("append", V, "key_pages.shape=(6, 2, 4, 8)", "[P, 2,", AXES, value_pages=None),
    bad("append", V, "slot_mapping.shape=(3, 1)", "[tokens]", AXES, slot_mapping=z32(3, 1)),
    bad("flax", V, "query.shape=(5, 8)", "[batch..., T, H, D]", "missing axes", query=z(5, 8)),
    # Dtype.
    bad("dense", T, "query.dtype=int32", FLOATS, CAST, query=z32(2, 5, 4, 8)),
    bad("dense", T, "key.dtype=bfloat16", FP32, CAST, **kv(2, 7, 2, 8, dtype="bfloat16")),
    bad("dense", T, "value.dtype=int32", FP32, CAST, value=z32(2, 7, 2, 8)),
    bad("ragged", T, "key.dtype=float16", FP32, CAST, **kv(9, 2, 8, dtype="float16")),
    bad("decode", T, "query.dtype=int32", FLOATS, CAST, query=z32(2, 1, 4, 8)),
    bad("decode", T, "key_cache.dtype=int32", FP32, CAST, key_cache=z32(2, 7, 2, 8)),
    bad("decode", T, "value_cache.dtype=int32", "float32", CAST, value_cache=z32(2, 7, 2, 8)),
    bad("paged", T, "key_pages.dtype=int32", FP32, CAST, key_pages=z32(6, 2, 4, 8)),
    bad("append", T, "key_pages.dtype=int32", "float8_e4m3fn", "Alloc", key_pages=z32(6, 2, 4, 8)),
    bad("append", T, "value_pages.dtype=int32", "or int8", "Alloc", value_pages=z32(6, 2, 4, 8)),
    bad("append", T, "new_key.dtype=int32", "floating point", "Cast new_key", new_key=z32(3, 2, 8)),
    bad("append", T, "slot_mapping.dtype=float32", "int32", INT32, slot_mapping=z(3)),
    # A dtype that a cache can't have: the message lists those that it can.
    bad("decode", T, "key_cache.dtype=uint8", "int8", "", **cache(2, 7, 2, 8, dtype="uint8")),
    # No array at all.
    bad("dense", T, "query=NoneType", "must be an array", "jax.Array", query=None),
    bad("dense", T, "bias=str", "must be an array", "jax.Array", bias="a"),
    bad("merge", T, "outs=NoneType", "must be an array", "jax.Array", outs=None),
    # Shapes that belong together.
    bad("dense", V, "value.shape=(2, 6, 2, 8)", "key, (2, 7, 2, 8)", "value", value=z(2, 6, 2, 8)),
    bad("dense", V, "value.shape=(2, 7, 4, 8)", "key, (2, 7, 2, 8)", "value", value=z(2, 7, 4, 8)),
    bad("dense", V, "key.shape=(2, 7, 2, 4)", "of query, 8", "one head dim", **kv(2, 7, 2, 4)),
    bad("dense", V, "key.shape=(3, 7, 2, 8)", "batch must be that of query, 2", **kv(3, 7, 2, 8)),
    bad("ragged", V, "value.shape=(8, 2, 8)", "key, (9, 2, 8)", "one value", value=z(8, 2, 8)),
    bad("ragged", V, "key.shape=(9, 2, 4)", "of query, 8", "one head dim", **kv(9, 2, 4)),
    bad("decode", V, "key_cache.shape=(3, 7, 2, 8)", "query, 2", "row", **cache(3, 7, 2, 8)),
    bad("decode", V, "key_cache.shape=(2, 7, 2, 4)", "query, 8", "dim", **cache(2, 7, 2, 4)),
    bad("paged", V, "value_pages.shape=(5, 2, 4, 8)", "key_pages", value_pages=z(5, 2, 4, 8)),
    bad("paged", V, "key_pages.shape=(6, 2, 0, 8)", "must hold a token", **pages(6, 2, 0, 8)),
    bad("append", V, "value_pages.shape=(6, 2, 5, 8)", "key_pages", value_pages=z(6, 2, 5, 8)),
    bad("append", V, "key_pages.shape=(6, 3, 2, 4, 8)", "be 2", "value_pages", **ODD_POOL),
    bad("append", T, "rotary=float", "(cos, sin)", "two arrays", rotary=1.0),
    bad("append", V, "rotary[0].shape=(3, 5)", "R <= 8", "own", rotary=(z(3, 5), z(3, 5))),
    bad("append", V, "rotary[0].shape=(2, 4)", "3 tokens", "own", rotary=(z(2, 4), z(2, 4))),
    bad("append", V, "rotary[1].shape=(3, 2)", "rotary[0]", "sin", rotary=(z(3, 4), z(3, 2))),
    bad("append", V, "new_key.shape=(3, 4, 8)", "(3, 2, 8)", new_key=z(3, 4, 8)),
    bad("append", V, "new_value.shape=(3, 2, 9)", "(3, 2, 8)", new_value=z(3, 2, 9)),
    bad("append", V, "new_key.shape=(3, 2, 8)", "(2, 2, 8)", slot_mapping=ints(0, 1)),
    # Parts to merge.
    bad("merge", V, "shapes of outs=[]", "at least one", outs=[], lses=[]),
    bad("merge", V, "shapes of outs=[(2, 3, 8), (2", "one shape", outs=[z(2, 3, 8), z(2, 4, 8)]),
    bad("merge", V, "lses.shape=(3, 2, 3)", "(2, 2, 3)", "of each out", lses=[z(2, 3)] * 3),
    bad("merge", V, "lses.shape=(2, 2, 4)", "(2, 2, 3)", "of each out", lses=[z(2, 4)] * 2),
    bad("merge", T, "outs.dtype=int32", "floating point", CAST, outs=z32(2, 2, 3, 8)),
    bad("merge", T, "lses.dtype=int32", "floating point", CAST, lses=z32(2, 2, 3)),
    bad("merge", (T, V), "", "", outs=[z(2, 3, 8), z(2, 3, 8, dtype="bfloat16")]),
    bad("merge", V, "outs.shape=()", outs=z(), lses=z()),
]
HEADS = [
    bad(name, V, "heads of query=4", f"multiple of the heads of key and value, {heads}",
        "Hq % Hk == 0", **changes)
    for name, heads, changes in (
        ("dense", 3, kv(2, 7, 3, 8)),
        ("dense", 8, kv(2, 7, 8, 8)),
        ("dense", 0, kv(2, 7, 0, 8)),
        ("ragged", 3, kv(9, 3, 8)),
        ("decode", 3, cache(2, 7, 3, 8)),
        ("paged", 3, pages(6, 3, 4, 8)),
        ("flax", 3, kv(2, 7, 3, 8)),
    )
]  # fmt: skip
FULL, SIZES = "[B, Hq, Tq, Tk] = (2, 4, 5, 7)", "1 or the full"
MASKS = [
    bad("dense", V, "mask.shape=(2, 4, 5, 6)", FULL, SIZES, mask=zbool(2, 4, 5, 6)),
    bad("dense", V, "mask.shape=(1, 1, 1, 1, 7)", FULL, SIZES, mask=zbool(1, 1, 1, 1, 7)),
    bad("dense", V, "mask.shape=(2, 7)", FULL, SIZES, mask=zbool(2, 7)),  # not (1, 1, 2, 7)
    bad("dense", T, "mask.dtype=float32", "True means visible", "bias=", mask=z(2, 4, 5, 7)),
    bad("dense", T, "mask.dtype=int32", "be bool", "mask.astype(bool)", mask=z32(2, 4, 5, 7)),
    bad("dense", V, "bias.shape=(2, 3, 5, 7)", FULL, SIZES, bias=z(2, 3, 5, 7)),
    bad("dense", V, "bias.shape=(1, 1, 1, 1, 7)", FULL, SIZES, bias=z(1, 1, 1, 1, 7)),
    bad("dense", T, "bias.dtype=bool", "floating point", "mask=", bias=zbool(2, 4, 5, 7)),
    bad("dense", T, "bias.dtype=int32", "floating point", bias=z32(1, 1, 1, 7)),
    bad("flax", V, "mask.shape=(2, 4, 5, 6)", "(2, 4, 5, 7)", mask=z(2, 4, 5, 6)),
    bad("flax", V, "mask.shape=(3, 4, 5, 7)", mask=z(3, 4, 5, 7)),
    bad("flax", V, "mask.shape=(1, 2, 4, 5, 7)", mask=z(1, 2, 4, 5, 7)),
    bad("flax", V, "bias.shape=(3, 4, 5, 7)", bias=z(3, 4, 5, 7)),
]
BOTH, EACH = "query_segment_ids and key_value_segment_ids", "one id for each token"
SEGMENTS = [
    bad("dense", V, "key_value_segment_ids=None", "both", BOTH, query_segment_ids=z32(2, 5)),
    bad("dense", V, "query_segment_ids=None", "both", BOTH, key_value_segment_ids=z32(2, 7)),
    bad("dense", V, "query_segment_ids.shape=(2, 6)", "(2, 5)", EACH,
        **segments(z32(2, 6), z32(2, 7))),
    bad("dense", V, "key_value_segment_ids.shape=(3, 7)", "(2, 7)", EACH,
        **segments(z32(2, 5), z32(3, 7))),
    bad("dense", T, "query_segment_ids.dtype=float32", "int32", INT32,
        **segments(z(2, 5), z32(2, 7))),
]  # fmt: skip
Q_LENGTHS, KV_LENGTHS = "query_seq_lengths", "key_value_seq_lengths"
OF_BATCH, ONE = "[B] = (2,)", "one length for each batch element"
LENGTHS = [
    bad_values("dense", V, Q_LENGTHS + "=6", "[0, 5]", "Clip", query_seq_lengths=ints(1, 6)),
    bad_values("dense", V, KV_LENGTHS + "=8", "[0, 7]", "Clip", key_value_seq_lengths=ints(8, 1)),
    bad_values("dense", V, KV_LENGTHS + "=-1", "[0, 7]", "Clip",
               key_value_seq_lengths=np.array([-1, 1], np.int32)),
    bad_values("dense", V, KV_LENGTHS + "=4294967295", "int32", "",
               key_value_seq_lengths=np.array([1, 2**32 - 1], np.uint32)),
    bad("dense", V, Q_LENGTHS + ".shape=(3,)", OF_BATCH, ONE, query_seq_lengths=ints(1, 2, 3)),
    bad("dense", V, KV_LENGTHS + ".shape=()", OF_BATCH, ONE, key_value_seq_lengths=jnp.int32(3)),
    bad("dense", T, Q_LENGTHS + ".dtype=float32", "int32", INT32, query_seq_lengths=z(2)),
    bad("dense", T, KV_LENGTHS + ".dtype=bool", "int32", INT32, key_value_seq_lengths=zbool(2)),
    bad_values("decode", V, "kv_lens=8", "[0, 7]", "Clip", kv_lens=ints(1, 8)),
    bad_values("decode", V, "kv_lens=-3", "[0, 7]", "Clip", kv_lens=ints(1, -3)),
    bad("decode", V, "kv_lens.shape=(1,)", OF_BATCH, ONE, kv_lens=ints(1)),
    bad("decode", T, "kv_lens.dtype=float32", "int32", INT32, kv_lens=z(2)),
    bad_values("paged", V, "kv_lens=13", "[0, 12]", "Clip", kv_lens=ints(1, 13)),
    bad_values("paged", V, "kv_lens=-1", "[0, 12]", "Clip", kv_lens=ints(-1, 1)),
    bad("paged", V, "kv_lens.shape=(3,)", OF_BATCH, ONE, kv_lens=ints(1, 2, 3)),
    bad("paged", V, "block_tables.shape=(6,)", "B = 2", "one row of page", block_tables=z32(6)),
    bad("paged", V, "block_tables.shape=(3, 3)", "B = 2", "one row", block_tables=z32(3, 3)),
    bad("paged", T, "block_tables.dtype=float32", "int32", INT32, block_tables=z(2, 3)),
    # Lists are arrays too, so their values are checked as well.
    bad_values("dense", V, KV_LENGTHS + "=8", "[0, 7]", "Clip", key_value_seq_lengths=[3, 8]),
    bad_values("dense", (T, V), KV_LENGTHS + "=", key_value_seq_lengths=[[1], [1, 2]]),
    bad_values("decode", V, "kv_lens=8", "[0, 7]", "Clip", kv_lens=[1, 8]),
    # q_offset.
    bad("dense", T, "q_offset=1.5", "an int or an int32 array [B]", q_offset=1.5),
    bad("dense", T, "q_offset=True", "an int or an int32 array [B]", q_offset=True),
    bad("dense", T, "q_offset=None", "an int or an int32 array [B]", q_offset=None),
    bad("dense", T, "q_offset=[1, 2]", "an int or an int32 array [B]", q_offset=[1, 2]),
    bad("dense", T, "q_offset.dtype=float32", "int32", INT32, q_offset=z(2)),
    bad("dense", V, "q_offset.shape=(3,)", OF_BATCH, "one offset", q_offset=ints(1, 2, 3)),
    bad("dense", V, "q_offset=1073741824", "2**29", "Shift", q_offset=2**30),
    bad_values("dense", V, "q_offset=2147483647", "2**29", "Shift", q_offset=ints(0, 2**31 - 1)),
]  # fmt: skip
FALLS, OUTSIDE, SUM, WRONG = "not decrease", "[0, 6], the number of tokens", "running sum", "batch"
CU_SEQLENS_ROWS = [
    bad_values("ragged", V, "cu_seqlens_q=[0, 4, 2]", FALLS, SUM, cu_seqlens_q=ints(0, 4, 2)),
    bad_values("ragged", V, "cu_seqlens_k=[0, 9, 3]", FALLS, SUM, cu_seqlens_k=ints(0, 9, 3)),
    bad_values("ragged", V, "cu_seqlens_q=array of 31", FALLS, SUM,
               cu_seqlens_q=ints(*[0] * 10, 5, *[1] * 20), cu_seqlens_k=z32(31)),
    bad_values("ragged", V, "cu_seqlens_q=[-1", OUTSIDE, WRONG, cu_seqlens_q=ints(-1, 2, 6)),
    bad_values("ragged", V, "cu_seqlens_q=[0, ..., 7]", OUTSIDE, WRONG, cu_seqlens_q=ints(0, 2, 7)),
    bad_values("ragged", V, "cu_seqlens_k=[0, ..., 10]", "[0, 9]", WRONG,
               cu_seqlens_k=ints(0, 2, 10)),
    bad_values("ragged", V, "cu_seqlens_q=[0, ..., 7]", OUTSIDE, WRONG, cu_seqlens_q=[0, 2, 7]),
    bad("ragged", T, "cu_seqlens_q.dtype=float32", "int32", INT32, cu_seqlens_q=z(3)),
    bad("ragged", V, "cu_seqlens_q.shape=(1, 3)", "[num_sequences + 1]", SUM,
        cu_seqlens_q=z32(1, 3)),
    bad("ragged", V, "cu_seqlens_q.shape=(0,)", "[num_sequences + 1]", SUM, cu_seqlens_q=z32(0)),
    bad("ragged", V, "cu_seqlens_k.shape=(2,)", "(3,)", "Every seq", cu_seqlens_k=ints(0, 9)),
    bad("ragged", V, "cu_seqlens_k=None", "9 keys for 6 queries", SUM, cu_seqlens_k=None),
    bad("ragged", T, "cu_seqlens_q=None", cu_seqlens_q=None),
]  # fmt: skip
STATIC, PAIR, NAN = "a Python bool", "int or a pair of ints (left, right)", float("nan")
KEY_NEEDED = ("is needed when dropout_rate=0.5 is above 0", "jax.random.key(seed)")
TERMS = [
    row
    for name in ("dense", "ragged", "decode", "paged")
    for row in (
        bad(name, V, "local_window_size=-1", ">= 0", "Use None", local_window_size=-1),
        bad(name, V, "local_window_size=(2, -1)", ">= 0", "None", local_window_size=(2, -1)),
        bad(name, V, "logits_soft_cap=0.0", "> 0", "Use None for no cap", logits_soft_cap=0.0),
        bad(name, V, "sinks.shape=(2,)", "[Hq] = (4,)", "one value for each", sinks=z(2)),
        bad(name, V, "alibi_slopes.shape=(2,)", "(4,)", "one value for each", alibi_slopes=z(2)),
        bad(name, V, "scale=nan", "must be finite", "None", scale=NAN),
        bad(name, V, "implementation='flash'", "'xla'", "None", implementation="flash"),
        bad(name, T, "is_causal=1", STATIC, "static_argnames", is_causal=1),
        bad(name, T, "return_residual=1", STATIC, "static_argnames", return_residual=1),
        bad(name, T, "deterministic=no", STATIC, "static_argnames", deterministic="no"),
    )
] + [
    bad("dense", T, "local_window_size=(1, 2, 3)", PAIR, "None", local_window_size=(1, 2, 3)),
    bad("dense", T, "local_window_size=2.5", PAIR, "None", local_window_size=2.5),
    bad("dense", T, "local_window_size=True", PAIR, "None", local_window_size=True),
    bad("dense", T, "local_window_size=ab", PAIR, "None", local_window_size="ab"),
    bad("dense", T, "local_window_size=(3, None)", PAIR, "None", local_window_size=(3, None)),
    bad("dense", V, "logits_soft_cap=-3.0", "> 0", "None", logits_soft_cap=-3),
    bad("dense", V, "logits_soft_cap=inf", "finite", "None", logits_soft_cap=np.inf),
    bad("dense", T, "logits_soft_cap='a'", "a Python number", logits_soft_cap="a"),
    bad("dense", T, "scale='a'", "a Python number", scale="a"),
    bad("dense", T, "scale=True", "a Python number", scale=True),
    bad("dense", V, "scale.shape=(3,)", "scalar", "query", scale=jnp.ones(3)),
    bad("dense", T, "sinks.dtype=int32", "floating point", "Cast sinks", sinks=z32(4)),
    bad("dense", V, "sinks.shape=(2, 4)", "[Hq] = (4,)", "each", sinks=z(2, 4)),
    bad("dense", T, "alibi_slopes.dtype=int32", "floating point", CAST, alibi_slopes=z32(4)),
    bad("dense", V, "alibi_slopes.shape=()", "[Hq] = (4,)", "each", alibi_slopes=0.5),
    # Traced, where a Python value is needed.
    bad("dense", T, "is_causal=", STATIC, is_causal=jnp.bool_(True)),
    bad("dense", T, "deterministic=", STATIC, deterministic=jnp.bool_(True)),
    bad("dense", T, "return_residual=", STATIC, return_residual=jnp.bool_(True)),
    bad("dense", T, "logits_soft_cap=", "a Python number", logits_soft_cap=jnp.ones(())),
    bad("dense", T, "dropout_rate=", "a Python number", dropout_rate=jnp.ones(())),
    bad("dense", T, "local_window_size=", PAIR, local_window_size=jnp.int32(3)),
    # Implementations.
    bad("dense", V, "implementation=()", "names no implementation", "'xla'", implementation=()),
    bad("dense", V, "implementation=[]", "names no implementation", "None", implementation=[]),
    bad("dense", V, "implementation=''", "'mosaic'", "None", implementation=""),
    bad("dense", V, "implementation='fa3'", "'cudnn'", "None", implementation=["xla", "fa3"]),
    bad("dense", (T, V), "implementation=3", implementation=3),
    bad("flax", V, "implementation='flax'", "'xla'", "None", implementation="flax"),
    # Dropout.
    bad("dense", V, "dropout_rng=None", *KEY_NEEDED, dropout_rate=0.5),
    bad("ragged", V, "dropout_rng=None", *KEY_NEEDED, dropout_rate=0.5),
    bad("flax", V, "dropout_rng=None", *KEY_NEEDED, dropout_rate=0.5),
    bad("dense", V, "dropout_rate=1.5", "[0, 1]", "prob", dropout_rate=1.5, dropout_rng=KEY),
    bad("dense", V, "dropout_rate=-0.1", "[0, 1]", "prob", dropout_rate=-0.1, dropout_rng=KEY),
    bad("dense", V, "dropout_rate=nan", "finite", dropout_rate=NAN, dropout_rng=KEY),
    bad("dense", T, "dropout_rate='0.1'", "number", dropout_rate="0.1", dropout_rng=KEY),
    bad("dense", T, "dropout_rate=None", "number", dropout_rate=None),
    bad("dense", T, "dropout_rng", dropout_rate=0.5, dropout_rng=0),
    bad("dense", T, "dropout_rng", dropout_rate=0.5, dropout_rng=z(2)),
    bad("dense", (T, V), "dropout_rng", dropout_rate=0.5, dropout_rng=jax.random.split(KEY, 2)),
]  # fmt: skip
LAYOUTS, PER_TOKEN = "'HND' ([P, Hk, S, D]) or 'NHD' ([P, S, Hk, D])", "[B, S, Hk] = (2, 7, 2)"
PAGES = [
    row
    for name in ("paged", "append")
    for row in (
        bad(name, V, "page_layout='BHSD'", LAYOUTS, "Name the layout", page_layout="BHSD"),
        bad(name, V, "page_layout=None", LAYOUTS, "Name the layout", page_layout=None),
        bad(name, V, "k_scale.shape=(3,)", "[Hk] = [2]", "scale", k_scale=z(3)),
        bad(name, V, "v_scale.shape=(4, 1)", "must be a scalar", "scale", v_scale=z(4, 1)),
        bad(name, T, "v_scale=str", "must be an array", "jax.Array", v_scale="a"),
    )
] + [
    bad("decode", V, "k_scale.shape=(4,)", "[Hk] = [2], or one a token", "", k_scale=z(4)),
    bad("decode", V, "v_scale.shape=(2, 7)", PER_TOKEN, "Broadcast", v_scale=z(2, 7)),
    # The scales of the other layout.
    bad("paged", V, "k_scale.shape=(6, 4, 2)", "= (6, 2, 4)", "Broadcast", k_scale=z(6, 4, 2)),
]

ROWS = ARRAYS + HEADS + MASKS + SEGMENTS + LENGTHS + CU_SEQLENS_ROWS + TERMS + PAGES


def check_message(error, error_type, start, rule, remedy):
    message = str(error)
    assert isinstance(error, error_type), f"{type(error).__name__}: {message}"
    assert re.fullmatch(r".+=.*: .+\. .+\.", message, re.DOTALL), message
    assert message.startswith(start), message
    explanation = message.partition(": ")[2]
    assert rule in explanation, message
    assert remedy in explanation, message


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bad_input_is_refused_with_name_value_rule_and_remedy(row):
    function, arguments = FUNCTIONS[row.function]
    with pytest.raises((TypeError, ValueError)) as info:
        function(**arguments | row.changes)
    check_message(info.value, row.error, row.start, row.rule, row.remedy)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bad_input_is_refused_while_jit_traces(row):
    function, arguments = FUNCTIONS[row.function]
    arguments = arguments | row.changes
    # Every array is an argument, except one whose values alone are wrong: it is a constant.
    constants = row.changes if row.values else {}
    traced = {
        name: x
        for name, x in arguments.items()
        if name not in constants and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
    }
    with pytest.raises((TypeError, ValueError)) as info:
        jax.jit(lambda traced: function(**arguments | traced)).trace(traced)
    check_message(info.value, row.error, row.start, row.rule, row.remedy)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_calls_that_the_rows_change_are_valid(name):
    function, arguments = FUNCTIONS[name]
    flags = {name: x for name, x in arguments.items() if isinstance(x, bool)}
    arrays = {name: x for name, x in arguments.items() if name not in flags}
    outputs = jax.eval_shape(lambda arrays: function(**arrays, **flags), arrays)
    dtype = jnp.dtype("int32" if name == "plan" else "float32")
    assert {x.dtype for x in jax.tree.leaves(outputs)} == {dtype}


def test_lists_of_numbers_are_accepted_as_arrays_are():
    x = [[[1.0, 2.0]]]  # [T, H, D] = [1, 1, 2]
    np.testing.assert_array_equal(jax_flash.dot_product_attention(x, x, x), x)


def test_unknown_lengths_outside_the_cache_are_clipped():
    arguments = DECODE | {"value_cache": jax.random.normal(KEY, (2, 7, 2, 8))}
    decode = jax.jit(lambda lens: jax_flash.decode_attention(**arguments | {"kv_lens": lens}))
    np.testing.assert_array_equal(decode(ints(9, -4)), decode(ints(7, 0)))
    np.testing.assert_array_equal(decode(ints(9, -4))[1], 0.0)


def test_explain_raises_the_errors_of_the_call():
    x, wrong = (jax.ShapeDtypeStruct((2, 5, heads, 8), jnp.float32) for heads in (4, 3))
    with pytest.raises(ValueError, match="implementation='flash': must be None or of"):
        jax_flash.explain(jax_flash.dot_product_attention, x, x, x, implementation="flash")
    with pytest.raises(ValueError, match="heads of query=4: must be a multiple"):
        jax_flash.explain(jax_flash.dot_product_attention, x, wrong, wrong)


def test_sown_attention_weights_are_refused_with_the_remedy():
    with pytest.raises(jax_flash.UnsupportedError, match=r"sow_weights=True.*Use Flax's own"):
        attention_fn(**DENSE, module=object())


def test_attention_fn_refuses_batch_axes_that_do_not_agree():
    query, key = z(2, 3, 5, 4, 8), z(3, 2, 7, 4, 8)  # six batch elements both
    with pytest.raises(ValueError, match=r"key\.shape=\(3, 2, 7, 4, 8\)"):
        attention_fn(query, key, key)


def layer(num_heads=2, in_features=8, **options):
    return FlashCausalSelfAttention(num_heads, in_features, rngs=nnx.Rngs(0), **options)


def cached(x, slots=8, batch=1, heads=2, **options):
    return layer()(x, cache=layer(heads).init_cache(batch, slots), **options)


NOISY = {"deterministic": False, "dropout_rng": KEY}
LAYERS = [
    (lambda: layer(3), "num_heads=3", "divide in_features, 8", "head_dim"),
    (lambda: layer(0), "num_heads=0", "", ""),
    (lambda: layer(4, num_kv_heads=3), "num_kv_heads=3", "divide num_heads, 4", "divisor"),
    (lambda: layer(4, num_kv_heads=0), "num_kv_heads=0", "divide num_heads, 4", "divisor"),
    (lambda: layer(1, 3, rope_theta=1e4), "head_dim=3", "even", "even head_dim"),
    (lambda: layer()(z(3, 8)), "x.shape=(3, 8)", "[B, T, in_features]", ""),
    (lambda: layer()(z(1, 3, 9)), "x.shape=(1, 3, 9)", "8", ""),
    (lambda: layer(dropout_rate=0.5)(z(1, 3, 8), deterministic=False), "dropout_rng=None",
     *KEY_NEEDED),
    (lambda: layer(dropout_rate=1.5)(z(1, 3, 8), **NOISY), "dropout_rate=1.5", "[0, 1]", "prob"),
    (lambda: layer()(z(1, 3, 8), new_lengths=ints(2)), "new_lengths=", "with a cache", "cache="),
    (lambda: cached(z(1, 5, 8), slots=4), "length of the cache after this call=5", "capacity, 4",
     "longer cache"),
    (lambda: cached(z(2, 3, 8)), "cache", "", ""),
    (lambda: cached(z(1, 3, 8), heads=4), "cache", "", ""),
    (lambda: cached(z(1, 3, 8), new_lengths=ints(1, 2)), "new_lengths.shape=(2,)", "(1,)", ""),
    (lambda: cached(z(1, 3, 8), new_lengths=ints(5)), "new_lengths=5", "[0, 3]", ""),
    (lambda: cached(z(1, 3, 8), new_lengths=ints(-1)), "new_lengths=-1", "[0, 3]", ""),
    (lambda: layer().init_cache(-1, 4), "batch_size=-1", "", ""),
    (lambda: layer().init_cache(1, -4), "max_length=-4", "", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case[1])
def test_the_layer_refuses_bad_input_with_name_value_rule_and_remedy(case):
    call, start, rule, remedy = case
    with pytest.raises((TypeError, ValueError)) as info:
        call()
    check_message(info.value, ValueError, start, rule, remedy)


def test_the_layer_refuses_wrong_dtypes_of_lengths_and_cache():
    with pytest.raises(TypeError, match=r"^new_lengths.*float32"):
        cached(z(1, 3, 8), new_lengths=z(1))
    with pytest.raises(TypeError, match=r"^dtype=int8"):
        layer().init_cache(1, 8, jnp.int8)


def test_windows_and_offsets_at_their_limits_do_not_overflow():
    q = k = v = jnp.ones((1, 4, 1, 8))
    for offset in (2**29, -(2**29)):
        out = jax_flash.dot_product_attention(
            q, k, v, q_offset=offset, local_window_size=(2**31, 2**31)
        )
        np.testing.assert_allclose(out, 1.0)


def test_numbers_that_int32_cannot_hold_are_out_of_range_not_wrapped_around():
    with jax.enable_x64(True):
        pool = jnp.zeros((2, 1, 4, 8), jnp.float32)
        new = jnp.ones((2, 1, 8), jnp.float32)
        slots = jnp.array([2**32 + 1, 2], jnp.int64)
        written, _ = jax.jit(jax_flash.append_kv)(pool, pool, new, new, slots)
        np.testing.assert_array_equal(written[0, 0, :, 0], [0, 0, 1, 0])
