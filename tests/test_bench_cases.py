"""The named cases of the bench: names, shapes, what is counted as work."""

import dataclasses
import itertools

import numpy as np
import pytest

from bench import cases
from bench.cases import Case

DENSE = Case(2, 60, 4, 2, 16)
RAGGED = Case(1, 60, 4, 2, 16, True, lengths=(7, 0, 40, 13))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(4, 4096, 16, 16, 128, True), "B4 S4096 H16/16 D128 causal bf16"),
        (Case(4, 4096, 32, 8, 128), "B4 S4096 H32/8 D128 full bf16"),
        (Case(64, 256, 6, 6, 64, dtype="float16"), "B64 S256 H6/6 D64 full fp16"),
        (
            Case(1, 16384, 16, 16, 128, True, window=(1023, 0)),
            "B1 S16384 H16/16 D128 causal window (1023, 0) bf16",
        ),
        (RAGGED, "ragged 4 documents 60 tokens H4/2 D16 causal bf16"),
    ],
)
def test_a_case_has_the_name_that_result_files_use(case, name):
    assert case.name == name


def test_names_are_unique_and_the_grid_is_whole():
    for suite, modes in cases.SUITES.values():
        assert len({case.name for case in suite}) == len(suite)
        assert set(modes) <= cases.FLOPS_OF_MODE.keys()
    assert len(cases.GRID) == 19
    assert {case.batch * case.seq_len for case in cases.GRID} == {16384}
    forward, _ = cases.SUITES["forward"]
    assert set(cases.SUSTAINED) <= set(forward)


def visible(case, i, j):
    """Whether query i sees key j, of one sequence, by the definition of the masks."""
    in_window = case.window is None or -case.window[0] <= j - i <= case.window[1]
    return in_window and (j <= i or not case.is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (5, 0), (3, 9), (100, 100)])
@pytest.mark.parametrize("case", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_flops_are_those_of_the_pairs_that_are_visible(case, is_causal, window):
    case = dataclasses.replace(case, is_causal=is_causal, window=window)
    lengths = case.lengths or (case.seq_len,) * case.batch
    pairs = sum(
        visible(case, i, j)
        for length in lengths
        for i, j in itertools.product(range(length), repeat=2)
    )
    assert case.pairs == pairs
    # Two matrix products, each a multiplication and an addition a pair, head and column.
    assert case.flops("fwd") == 2 * 2 * pairs * case.num_q_heads * case.head_dim
    assert case.flops("bwd") == 2.5 * case.flops("fwd")
    assert case.flops("fwd+bwd") == case.flops("fwd") + case.flops("bwd")


def test_flops_of_a_long_case_do_not_overflow():
    assert Case(1, 2**17, 1, 1, 64).pairs == 2**34


def test_shapes_and_boundaries():
    assert DENSE.shapes == ((2, 60, 4, 16), (2, 60, 2, 16), (2, 60, 2, 16))
    assert RAGGED.shapes == ((60, 4, 16), (60, 2, 16), (60, 2, 16))
    np.testing.assert_array_equal(RAGGED.cu_seqlens, [0, 7, 7, 47, 60])
    assert RAGGED.cu_seqlens.dtype == np.int32


def test_errors_are_measured_on_the_last_sequence_and_the_longest():
    assert DENSE.probes == ((1, slice(0, 60)),)
    assert RAGGED.probes == ((None, slice(7, 47)), (None, slice(47, 60)))


@pytest.mark.parametrize("changes", [{"lengths": (59,)}, {"batch": 2, "lengths": (60,)}])
def test_packed_sequences_fill_their_array(changes):
    with pytest.raises(ValueError, match="packed sequences"):
        dataclasses.replace(DENSE, **({"batch": 1} | changes))


@pytest.mark.parametrize(("count", "tokens"), [(64, 65536), (5, 5), (7, 100), (3, 1000)])
def test_documents_fill_their_tokens_always_alike(count, tokens):
    lengths = cases.lognormal_lengths(count, tokens)
    assert len(lengths) == count
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert lengths == cases.lognormal_lengths(count, tokens)


def test_document_lengths_are_mixed():
    lengths = cases.lognormal_lengths(64, 65536)
    assert np.std(np.log(lengths)) == pytest.approx(0.8, abs=0.15)
