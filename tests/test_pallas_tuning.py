"""The forward kernel's configurations: from tables and to be measured. And the table that ships."""

import dataclasses
import importlib.resources
import json
import warnings

import jax
import jax.numpy as jnp
import pytest

from bench import cases, results
from bench import tune as bench_tune
from jax_flash import backends, dot_product_attention, explain, tuning
from jax_flash.mask import Mask
from jax_flash.spec import Device
from pallas_kernels import forward as kernel
from pallas_kernels import tune
from pallas_kernels.config import HEAD_DIMS
from tests.conftest import ROOT

H200 = "NVIDIA H200"
SHIPPED = ROOT / "jax_flash/tuning_tables/nvidia_h200.json"


def problem(tokens=4096, mask=None, d=128, **changes):
    fields = {
        "batch": 4, "q_len": tokens, "kv_len": tokens, "num_q_heads": 16, "num_kv_heads": 16,
        "head_dim": d, "value_dim": d, "dtype": jnp.dtype("bfloat16"), "scale": 0.1,
        "mask": mask or Mask(is_causal=True),
    }  # fmt: skip
    return kernel.Problem(**fields | changes)


@pytest.fixture
def on_h200(monkeypatch, tmp_path):
    """Choices as on an H200; the path of a user's table that is not there yet."""
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_refused", set())
    monkeypatch.setattr(tune, "device_kind", lambda: H200)
    return tmp_path / "jax_flash/tuning/nvidia_h200.json"


def kernel_entry(problem, source=None, **changes):
    config = dataclasses.asdict(kernel.default_config(problem)) | changes
    return tuning.Entry(
        key=tune.key_of(problem), config=config, time_us=1.0, source=source or tune.source(),
        provenance={},
    )  # fmt: skip


def test_a_users_entry_is_taken(on_h200):
    assert tune.tuned_config(problem()) == kernel.default_config(problem())
    tuning.write(
        on_h200, H200, [kernel_entry(problem(), num_stages=1, early_wait=False, head_group=3)]
    )
    exact, near = (tune.tuned_config(problem(n)) for n in (4096, 4100))
    assert (exact.num_stages, exact.head_group) == (1, 3)
    assert (near.num_stages, near.head_group) == (1, 0)  # heads depend on the number of tiles


def test_without_an_h200_nothing_is_read(on_h200, monkeypatch):
    tuning.write(on_h200, H200, [kernel_entry(problem(), num_stages=1, early_wait=False)])
    monkeypatch.setattr(tune, "device_kind", lambda: "cpu")
    assert tune.tuned_config(problem()) == kernel.default_config(problem())


NONSENSE = [
    {"num_warpgroups": 0},
    {"num_warpgroups": 4, "consumer_registers": 120},
    {"block_kv": 72},
    {"block_kv": 0},
    {"num_stages": 0},
    {"num_stages": 7},  # more shared memory than there is
    {"num_stages": 1, "early_wait": True},  # would wait for ever
    {"consumer_registers": 241},
    {"consumer_registers": 256},
    {"lazy_growth": 1e9},  # sums would overflow
    {"lazy_growth": -1.0},
    {"lazy_growth": float("nan")},
    {"head_group": -1},
    {"num_stages": 2.0},
    {"take_turns": 1},
    {"stages": 2},
]


@pytest.mark.parametrize("changes", NONSENSE, ids=str)
def test_nonsense_is_refused(changes, on_h200):
    on_h200.parent.mkdir(parents=True)
    entry = dataclasses.asdict(kernel_entry(problem(), **changes))
    on_h200.write_text(json.dumps({"schema": 1, "device": H200, "entries": [entry]}))
    with pytest.warns(UserWarning, match="its configuration for B4 Tq4096"):
        assert tune.tuned_config(problem()) == kernel.default_config(problem())


def test_a_users_entry_for_another_kernel_source_is_refused(on_h200):
    tuning.write(
        on_h200, H200, [kernel_entry(problem(), source="0123", num_stages=1, early_wait=False)]
    )
    with pytest.warns(UserWarning, match="another version of the forward kernel"):
        assert tune.tuned_config(problem()) == kernel.default_config(problem())


MASKS = {"full": Mask(), "causal": Mask(is_causal=True), "window": Mask(window=(1000, 0))}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_candidates_are_valid_and_the_default_is_the_first(d, mask):
    case = problem(d=d, mask=MASKS[mask])
    default = kernel.default_config(case)
    candidates = tune.candidates(case)
    assert candidates[0] == default
    assert len(set(candidates)) == len(candidates) >= (3 if d <= 192 else 1)
    for base in candidates:
        assert tune.fit(case, base) == base
        neighbours = tune.neighbours(case, base)
        assert base not in neighbours
        assert len(set(neighbours)) == len(neighbours) > 2
        options = [
            {k for k, x in dataclasses.asdict(c).items() if x != getattr(base, k)}
            for c in neighbours
        ]
        assert all(len(changed) == 1 for changed in options)
        assert ({"split_edges"} in options) == (mask != "full")


def test_candidates_lower_for_cuda():
    """A few of them; the rest differ in numbers only."""
    case = problem(256, d=128)
    candidates = tune.candidates(case)
    x = jax.ShapeDtypeStruct((4, 256, 16, 128), jnp.bfloat16)
    for config in candidates[1 :: max(len(candidates) // 3, 1)]:
        launch = jax.jit(
            lambda q, k, v, config=config: kernel.attention_forward(
                case, q, k, v, case.mask, config=config
            )
        )
        assert "mosaic_gpu" in launch.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def explained(on_h200, monkeypatch):
    """A function that explains a causal call on an H200."""
    monkeypatch.setattr(backends, "device_of", lambda *_: Device("gpu", "9.0", H200))

    def report(tokens):
        x = jax.ShapeDtypeStruct((4, tokens, 16, 128), jnp.bfloat16)
        return explain(dot_product_attention, x, x, x, is_causal=True)

    return report


def test_explain_says_where_a_configuration_comes_from(explained, on_h200):
    report = explained(4096)
    assert report.tuned[0].config == kernel.default_config(problem())
    assert "configuration from nvidia_h200.json, measured at" in str(report)
    assert "nearest" not in str(report)
    assert "no table has this problem" in str(explained(256))
    tuning.write(on_h200, H200, [kernel_entry(problem(256), num_stages=1, early_wait=False)])
    assert f"configuration from {on_h200}" in str(explained(256))
    assert explained(256).tuned[0].config.num_stages == 1


# The table that ships.


def test_the_table_that_ships_is_packaged():
    packaged = importlib.resources.files("jax_flash") / "tuning_tables" / SHIPPED.name
    assert packaged.read_text() == SHIPPED.read_text()


def test_the_table_that_ships_is_valid_and_covers_the_grid(on_h200):
    entries = tuning.read(SHIPPED, H200)
    for measured in entries:
        assert {"method", "jax", "commit", "date", "driver"} <= measured.provenance.keys()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = tuning.build(kernel.ForwardConfig, measured.config)
        key = measured.key
        mask = {"full": Mask(), "causal": Mask(is_causal=True)}.get(key.mask)
        mask = mask or Mask(is_causal=True, window=(key.window - 1, 0))
        case = problem(
            key.q_len, mask, key.head_dim, batch=key.batch, num_q_heads=key.num_q_heads,
            num_kv_heads=key.num_kv_heads, dtype=jnp.dtype(key.dtype), value_dim=key.value_dim,
        )  # fmt: skip
        assert tune.key_of(case) == key
        assert tune.tuned_config(case) == tune.fit(case, config)
    covered = {
        (k.batch, k.q_len, k.num_q_heads, k.num_kv_heads, k.head_dim, k.mask == "causal")
        for k in (measured.key for measured in entries)
    }
    assert covered >= {
        (c.batch, c.seq_len, c.num_q_heads, c.num_kv_heads, c.head_dim, c.is_causal)
        for c in cases.GRID
    }


def test_what_ships_unmeasured_is_what_the_kernel_does_by_default(explained, tmp_path, capsys):
    """Or a better default would hide behind it.

    Make it anew: python -m bench tune --from-results bench/results/forward.json
    """
    timed = ROOT / "bench/results/forward.json"
    chosen = [case for case in cases.GRID if case.name in results.read(timed).times("fwd")]
    device, entries = bench_tune.from_results(timed, chosen)
    assert device == H200
    assert len(entries) == len(chosen) >= 19
    shipped = {measured.key: measured for measured in tuning.read(SHIPPED, H200)}
    for made in entries:
        there, budget = shipped[made.key], {"spill_bytes": 0}
        if there.provenance["method"] == made.provenance["method"]:
            assert {**there.config, **budget} == {**made.config, **budget}, made.key
