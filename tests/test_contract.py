"""Every implementation over one table of dense calls: results, gradients and refusals.

An implementation computes a case as the float64 oracle does, within a measured tolerance, or it
refuses with the reason that its `supports` gives. The implementations are those of the table in
`jax_flash.backends`: a new one is held to all of this by being registered there.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from jax_flash import chunked, dot_product_attention
from tests.kernel_cases import ON_GPU, mostly_on_gpu
from tests.tolerance import (
    FLOATS,
    IMPLEMENTATIONS,
    ORACLE_NAMES,
    assert_close,
    gradients,
    oracle_results,
    plain_errors,
    rand,
    runs,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Tiles of 16 x 16, so that small arrays have several."""
    monkeypatch.setattr(chunked, "_MAX_BLOCK", 16)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call. Arrays are given by shape (drawn at random), or by value where values matter."""

    name: str
    _: dataclasses.KW_ONLY
    batch: int = 2
    tq: int = 33
    tk: int = 49
    hq: int = 4
    hk: int = 2
    d: int = 8
    dv: int = 8
    dtype: str = "float32"
    rank: int = 4  # 3: without the batch axis, which is of size 1 then
    # Terms
    scale: float | None = None
    alibi: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    dropout_rate: float | None = None
    # Mask parts
    causal: bool = False
    window: tuple | int | None = None
    q_offset: int | list = 0
    q_lengths: list | None = None
    kv_lengths: list | None = None
    q_segments: list | None = None
    kv_segments: list | None = None
    # A mask and a bias: bit n says that axis n of the mask (not of the bias) has its full size.
    combination: int | None = None

    def arrays(self):
        """Every array of the call by its public name."""
        b, tq, tk, hq, hk = self.batch, self.tq, self.tk, self.hq, self.hk
        arrays = {
            "query": rand(b, tq, hq, self.d, dtype=self.dtype, seed=1),
            "key": rand(b, tk, hk, self.d, dtype=self.dtype, seed=2),
            "value": rand(b, tk, hk, self.dv, dtype=self.dtype, seed=3),
        }
        if self.combination is not None:
            has_axis = [self.combination >> axis & 1 for axis in range(4)]
            full = (b, hq, tq, tk)
            mask_shape = [n if has else 1 for has, n in zip(has_axis, full, strict=True)]
            bias_shape = [1 if has else n for has, n in zip(has_axis, full, strict=True)]
            arrays["mask"] = rand(*mask_shape, seed=8) > -0.8
            bias = rand(*bias_shape, dtype=["float32", "bfloat16"][self.combination % 2], seed=4)
            hidden = (rand(*bias_shape, seed=5) > 1.0) & (bias.size > 1)
            arrays["bias"] = np.where(hidden, bias.dtype.type(-np.inf), bias)
        if self.alibi:
            arrays["alibi_slopes"] = np.float32(0.1) * rand(hq, seed=6)
        if self.sinks:
            arrays["sinks"] = rand(hq, seed=7)
        if self.dropout_rate is not None:
            arrays["dropout_rng"] = jax.random.key(9)
        if self.rank == 3:
            arrays |= {name: arrays[name][0] for name in ("query", "key", "value", "mask", "bias")}
        values = {
            "q_offset": self.q_offset if isinstance(self.q_offset, list) else None,
            "query_seq_lengths": self.q_lengths,
            "key_value_seq_lengths": self.kv_lengths,
            "query_segment_ids": self.q_segments,
            "key_value_segment_ids": self.kv_segments,
        }
        return arrays | {name: np.int32(x) for name, x in values.items() if x is not None}

    def static(self):
        """Every static keyword of the call that is not at its default."""
        static = {
            "scale": self.scale,
            "logits_soft_cap": self.soft_cap,
            "dropout_rate": self.dropout_rate,
            "is_causal": self.causal or None,
            "local_window_size": self.window,
            "q_offset": (self.q_offset or None) if isinstance(self.q_offset, int) else None,
        }
        return {name: x for name, x in static.items() if x is not None}

    def cotangents(self):
        """Those of out and lse."""
        shape = (self.batch, self.tq, self.hq)[4 - self.rank :]
        return rand(*shape, self.dv, dtype=self.dtype, seed=10), rand(*shape, seed=11)


def some_ids(length, segments, seed, sort=False):
    ids = np.random.default_rng(seed).integers(0, segments, (2, length))
    return (np.sort(ids) if sort else ids).tolist()


ALL_MASKS_AND_TERMS = [
    Case("nothing"),
    Case("causal with static negative offset and int window", causal=True, q_offset=-5, window=7),
    Case("causal with offsets per batch row", causal=True, q_offset=[16, -7]),
    Case("causal with offsets beyond all keys or before all", causal=True, q_offset=[60, -33]),
    Case("alibi", alibi=True, window=(3, 9), q_offset=[9, -9], scale=0.7, combination=2),
    Case("window of one key", window=(0, 0), combination=15),
    Case(
        "window to the right, and sinks",
        window=(0, 4),
        q_offset=[20, -40],
        sinks=True,
        combination=14,
    ),
    Case("causal window with offsets", causal=True, window=(5, 2), q_offset=[7, -3]),
    Case("causal window that leaves the keys", causal=True, window=(5, 2), q_offset=[40, -30]),
    Case("lengths", q_lengths=[33, 17], kv_lengths=[49, 16], combination=3),
    Case("lengths of zero and one", q_lengths=[0, 33], kv_lengths=[1, 0], combination=3),
    Case(
        "causal with key lengths of which one is zero",
        dtype="float16",
        causal=True,
        kv_lengths=[30, 0],
        sinks=True,
        alibi=True,
        combination=13,
    ),
    Case(
        "sorted segments",
        combination=0,
        q_segments=some_ids(33, 3, seed=1, sort=True),
        kv_segments=some_ids(49, 3, seed=2, sort=True),
    ),
    Case(
        "unsorted segments with negative and huge ids",
        combination=0,
        q_segments=np.choose(some_ids(33, 3, seed=3), [-1, 2**31 - 1, 5]).tolist(),
        kv_segments=np.choose(some_ids(49, 3, seed=4), [-1, 2**31 - 1, 5]).tolist(),
    ),
    Case(
        "padding segments that nobody shares",
        combination=0,
        q_segments=[[1] * 20 + [0] * 13, [7] * 33],
        kv_segments=[[1] * 30 + [-1] * 19, [8] * 49],
    ),
    Case(
        "causal, segments, lengths, soft cap",
        causal=True,
        soft_cap=1.5,
        q_segments=some_ids(33, 2, seed=5, sort=True),
        kv_segments=some_ids(49, 2, seed=6),
        q_lengths=[33, 20],
        kv_lengths=[20, 33],
        combination=1,
    ),
]
MANY = 71 if ON_GPU else 7
BOTTOM_RIGHT_2X15 = {"causal": True, "q_offset": 13}
RANK_3 = {"batch": 1, "rank": 3, "q_lengths": [16], "kv_lengths": [17], "q_offset": [2]}
ALL_SHAPES = [
    Case(name, tq=tq, tk=tk, hq=hq, hk=hk, d=d, dv=dv, dtype=dtype, **terms)
    for name, tq, tk, hq, hk, d, dv, dtype, terms in [
        ("1x1 of D1", 1, 1, 5, 1, 1, 3, "float32", {"dropout_rate": 0.0}),
        ("2x15 of D40", 2, 15, 6, 2, 40, 24, "bfloat16", BOTTOM_RIGHT_2X15 | {"combination": 4}),
        ("15x2 of D80", 15, 2, 12, 3, 80, 80, "float16", {"causal": True, "combination": 5}),
        ("16x16 with prime heads", 16, 16, MANY, 1, 64, 64, "bfloat16", {"combination": 6}),
        ("17x63 of D96", 17, 63, 2, 1, 96, 128, "float32", {"combination": 7}),
        ("63x17 of D256", 63, 17, 4, 4, 256, 16, "bfloat16", {"combination": 8}),
        ("65x1", 65, 1, 6, 2, 8, 8, "float16", {"dropout_rate": 1.0}),
        ("1x65", 1, 65, 5, 1, 40, 40, "bfloat16", {"causal": True, "q_offset": 64}),
        ("127x129", 127, 129, 2, 1, 8, 8, "float32", {"causal": True, "combination": 9}),
        ("no batch axis", 17, 18, 2, 1, 8, 8, "float32", RANK_3 | {"combination": 11}),
        ("129x127", 129, 127, 3, 3, 128, 128, "bfloat16", {"window": (20, 0), "combination": 10}),
    ]
]
EVERYTHING = {
    "alibi": True,
    "soft_cap": 3.0,
    "sinks": True,
    "dropout_rate": 0.5,
    "scale": 0.5,
    "causal": True,
    "window": (20, 5),
    "q_offset": [16, 3],
    "q_lengths": [33, 30],
    "kv_lengths": [45, 49],
    "q_segments": some_ids(33, 2, seed=7, sort=True),
    "kv_segments": some_ids(49, 2, seed=8, sort=True),
}
ALL_MIXTURES = [
    Case("everything in fp32", dv=12, combination=11, **EVERYTHING),
    Case("everything in bf16", dtype="bfloat16", d=64, dv=64, combination=12, **EVERYTHING),
]
ALL_ZERO_SIZES = [
    Case(f"zero {name}", causal=True, sinks=True, alibi=True, combination=14, **sizes)
    for name, sizes in {
        "batch": {"batch": 0},
        "queries": {"tq": 0},
        "keys": {"tk": 0},
        "heads": {"hq": 0, "hk": 0},
    }.items()
]
ALL_CASES = ALL_MASKS_AND_TERMS + ALL_SHAPES + ALL_MIXTURES + ALL_ZERO_SIZES
ALL_KERNEL_CASES = [  # kernels may leave fp32 to others, or take longer over it
    dataclasses.replace(case, name=f"{case.name}, bf16 of D64", dtype="bfloat16", d=64, dv=64)
    for case in ALL_MASKS_AND_TERMS
    if ON_GPU or case.dtype == "float32"
]
ALL_PAIRS = [
    *itertools.product(ALL_CASES, IMPLEMENTATIONS),
    *itertools.product(ALL_KERNEL_CASES, IMPLEMENTATIONS if ON_GPU else ("mosaic",)),
]
# In interpret mode mixtures and odd shapes; the kernels' own tests have each feature by itself.
ON_GPU_ONLY = {
    (case, "mosaic")
    for case in ALL_MASKS_AND_TERMS + ALL_SHAPES + ALL_KERNEL_CASES
    if case.name.startswith(("alibi", "causal with offsets", "lengths", "nothing"))
    or case.name.startswith(("padding segments", "sorted segments", "window of one key"))
    or (case.dtype == "float32" and case not in ALL_ZERO_SIZES)
    or case.name == "16x16 with prime heads"
}


@functools.cache
def program(implementation, static, with_lse):
    return gradients(
        dot_product_attention,
        implementation=implementation,
        return_residual=with_lse,
        **dict(static),
    )


@functools.cache
def expectation(case, with_lse):
    """What is right, and the errors of the plain computation."""
    do, dlse = case.cotangents()
    dlse = dlse if with_lse else np.zeros_like(dlse)
    keywords = case.arrays() | case.static()
    if case.rank == 3:
        do, dlse = do[None], dlse[None]
        keywords |= {name: keywords[name][None] for name in ("query", "key", "value")}
    want = oracle_results(keywords, do, dlse)
    errors = plain_errors(keywords, want, do, dlse)
    if case.rank == 3:
        want |= {name: want[name][0] for name in ("out", "lse", "dq", "dk", "dv")}
    return want, errors


def check(case, implementation, with_lse):
    arrays = case.arrays()
    floats = {name: arrays.pop(name) for name in FLOATS if name in arrays}
    cotangents = case.cotangents() if with_lse else case.cotangents()[:1]
    run = program(implementation, tuple(case.static().items()), with_lse)
    results, grads = run(floats, arrays, cotangents)
    got = dict(zip(("out", "lse"), results, strict=False))
    got |= {grad_name(name): x for name, x in grads.items()}
    dtypes = {"out": case.dtype, "lse": "float32"}
    dtypes |= {grad_name(name): x.dtype for name, x in floats.items()}
    want, errors = expectation(case, with_lse)
    is_split = (implementation, case.dtype) == ("mosaic", "float32")
    for name, x in got.items():
        assert x.dtype == dtypes[name], name
        # Tensor cores add up with truncation, which shows in arrays of a few numbers, where plain
        # sums are short or one number is what is left of many.
        slack = 2.0 if is_split and x.size < 8 else 1.0
        # dS = P (dP - Δ) of a query's only key is 0 but for the log-sum-exp's gradient. The plain
        # computation has the same number twice; a kernel computes dP and Δ apart, and their
        # roundings stay.
        is_difference = is_split and case.tk == 1 and name == "dq"
        largest = max(1.0, largest_term_of_dq(case)) if is_difference else 1.0
        assert_close(x, want[name], errors[name], name, slack=slack, largest=largest)


def largest_term_of_dq(case):
    """The largest |scale dP K|, of a query, a key and a dim."""
    arrays, (do, _) = case.arrays(), case.cotangents()
    k, v = (np.repeat(arrays[name], case.hq // case.hk, axis=2) for name in ("key", "value"))
    dp = np.einsum("bthd,bshd->bhts", do, v)
    terms = np.einsum("bhts,bshd->bhtsd", dp, k)
    return float(np.abs(terms).max()) * abs(case.d**-0.5 if case.scale is None else case.scale)


def grad_name(name):
    """The oracle's name for the gradient of a public keyword."""
    return f"d{ORACLE_NAMES.get(name, name)}"


@pytest.mark.filterwarnings("ignore:jax_flash. the gradient of attention:UserWarning")  # is lent
@pytest.mark.parametrize(
    ("case", "implementation"),
    mostly_on_gpu(ALL_PAIRS, ON_GPU_ONLY),
    ids=lambda x: getattr(x, "name", x),
)
def test_results_and_gradients_equal_the_oracle_or_the_call_is_refused(case, implementation):
    for with_lse in (True, False):  # an implementation may have out, but no lse
        keywords = case.arrays() | case.static() | {"return_residual": with_lse}
        if runs(implementation, dot_product_attention, **keywords):
            check(case, implementation, with_lse)
            break


def test_the_table_has_every_broadcast_of_mask_and_bias():
    """Each of the four axes has size 1 or its full size, which must not be 1 too."""
    seen = {
        case.combination for case in ALL_CASES if min(case.batch, case.tq, case.tk, case.hq) > 1
    }
    assert seen - {None} == set(range(16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bias_gradient_has_the_shape_and_dtype_of_the_bias(implementation):
    q, k, do = (rand(2, n, h, 8) for n, h in ((3, 4), (5, 2), (3, 4)))
    shapes = itertools.product((1, 2), (1, 4), (1, 3), (1, 5))
    # The table has the other dtype of each shape.
    biases = [rand(*shape, dtype=["float32", "bfloat16"][shape[0] > 1]) for shape in shapes]
    if not runs(implementation, dot_product_attention, q, k, k, biases[-1]):
        return
    call = functools.partial(dot_product_attention, q, k, k, implementation=implementation)
    for bias in biases:
        dbias = jax.eval_shape(lambda bias: jax.vjp(call, bias)[1](do)[0], bias)
        assert (dbias.shape, dbias.dtype) == (bias.shape, bias.dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_of_a_broadcast_bias_is_summed_in_fp32(implementation):
    """Over 32 blocks of rows whose parts nearly cancel, as a sum in bf16 would not."""
    tq, tk = 512, 16
    arrays = {name: rand(1, tq, 1, 1, seed=seed) for name, seed in (("query", 1), ("do", 2))}
    arrays |= {name: rand(1, tk, 1, 1, seed=seed) for name, seed in (("key", 3), ("value", 4))}
    do = arrays.pop("do")
    bias = {"bias": rand(1, 1, 1, tk, dtype="bfloat16", seed=5)}
    if not runs(implementation, dot_product_attention, **arrays, **bias):
        return
    _, grads = program(implementation, (), False)(bias, arrays, (do,))
    want = oracle_results(arrays | bias, do, None)["dbias"]
    # As if the right sum were rounded once; 2e-5 is for its fp32 terms.
    np.testing.assert_allclose(np.float64(grads["bias"]), want, rtol=2**-8, atol=2e-5)
