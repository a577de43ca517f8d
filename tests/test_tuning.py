"""Tuning tables: which entry is found, what is refused, what is written. And the one that ships."""

import dataclasses
import importlib.resources
import json
import os
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
from tests.conftest import ROOT

H200 = "NVIDIA H200"
SHIPPED = ROOT / "jax_flash/tuning_tables/nvidia_h200.json"
FOUND = "tuning table"


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64
    growth: float = 8.0
    is_shared: bool = False

    def __post_init__(self):
        if self.block % 64:
            raise ValueError(f"block={self.block}: must be a multiple of 64")


KEY = tuning.Key(
    kernel="forward", dtype="bfloat16", head_dim=128, value_dim=128, mask="causal", window=0,
    batch=2, q_len=1024, kv_len=1024, num_q_heads=8, num_kv_heads=8,
)  # fmt: skip


def like(key=KEY, **changes):
    return dataclasses.replace(key, **changes)


def tokens(count, **changes):
    return like(q_len=count, kv_len=count, **changes)


def entry(key=KEY, config=None, time_us=100.0, source="now"):
    config = dataclasses.asdict(config or Config(128))
    return tuning.Entry(
        key=key, config=config, time_us=time_us, source=source, provenance={"date": "2026-01-01"}
    )


@pytest.fixture
def user_table(monkeypatch, tmp_path):
    """The path of a user's table that is not there yet; no table ships."""
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuning, "_refused", set())
    return tmp_path / "jax_flash/tuning/nvidia_h200.json"


@pytest.fixture
def shipped_table(user_table, tmp_path):
    return tmp_path / "shipped/nvidia_h200.json"


def choose(key=KEY, source="now", fit=lambda config, is_exact: config):
    return tuning.choose(key, "problem", Config(), device_kind=H200, source=source, fit=fit)


def choice(key=KEY, **options):
    with tuning.recording() as choices:
        config = choose(key, **options)
    (recorded,) = choices
    assert recorded.config == config
    return recorded


# Which entry.


def test_masks_have_classes():
    assert tuning.mask_class(Mask(), 100) == ("full", 0)
    assert tuning.mask_class(Mask(is_causal=True, q_offset=5), 100) == ("causal", 0)
    assert tuning.mask_class(Mask(is_causal=True, window=(30, 7)), 100) == ("window", 31)
    assert tuning.mask_class(Mask(window=(30, 7)), 100) == ("window", 38)
    assert tuning.mask_class(Mask(window=(2**29, 2**29)), 100) == ("window", 100)
    lengths = jnp.zeros((2, 1), jnp.int32)
    assert tuning.mask_class(Mask(is_causal=True, kv_ends=lengths), 100) == ("traced", 0)
    segments = jnp.zeros((2, 100), jnp.int32)
    assert tuning.mask_class(Mask(q_segments=segments, kv_segments=segments), 100)[0] == "traced"
    assert tuning.mask_class(Mask(array=jnp.ones((1, 1, 9, 100), bool)), 100)[0] == "traced"


@pytest.mark.parametrize(
    "other",
    [
        like(kernel="backward"),
        like(head_dim=64),
        like(value_dim=64),
        like(mask="full"),
        like(dtype="float32"),
        like(q_len=511),
        like(kv_len=2049),
        like(mask="window", window=100),
    ],
    ids=str,
)
def test_other_problems_say_nothing(other):
    assert tuning.distance(KEY, other) is None
    assert tuning.distance(other, KEY) is None


def test_windows_are_compared():
    narrow, wide = (like(mask="window", window=x) for x in (100, 201))
    assert tuning.distance(narrow, wide) is None
    assert tuning.distance(narrow, like(narrow, window=150)) is not None


NEAREST_FIRST = [
    KEY,
    like(dtype="float16"),
    like(num_kv_heads=2),
    like(batch=4),
    like(batch=1, num_q_heads=64, num_kv_heads=64),
    like(q_len=1100),
    tokens(1100),
    tokens(2048),  # as far as the next, but longer
    tokens(512),
]


def test_the_nearest_entry_is_found(user_table):
    for first in range(len(NEAREST_FIRST)):
        rest = NEAREST_FIRST[first:]
        user_table.unlink(missing_ok=True)
        tuning.write(
            user_table, H200, [entry(k, Config(64 * (2 + rest.index(k)))) for k in reversed(rest)]
        )
        found = choice()
        assert found.entry.key == rest[0]
        assert found.config == Config(128)


def test_without_an_entry_the_default_runs(user_table):
    assert choice().entry is None
    tuning.write(user_table, H200, [entry(tokens(8192)), entry(like(head_dim=64))])
    assert choice().config == Config()
    assert "default configuration" in str(choice())


def test_the_users_table_comes_first_but_for_exact_entries(user_table, shipped_table):
    tuning.write(shipped_table, H200, [entry(KEY, Config(192)), entry(tokens(3000), Config(256))])
    tuning.write(user_table, H200, [entry(tokens(1100), Config(128))])
    assert choice(KEY).path == shipped_table
    assert choice(tokens(1100)).path == user_table
    assert choice(tokens(1050)).config == Config(192)  # the nearer
    tuning.write(user_table, H200, [entry(KEY, Config(320))])
    assert choice(KEY).config == Config(320)
    assert "nearest problem" not in str(choice(KEY))
    assert str(user_table) in str(choice(KEY))
    assert "nearest problem, B2 Tq3000" in str(choice(tokens(3100)))
    assert ": configuration from nvidia_h200.json" in str(choice(tokens(3100)))


def test_other_devices_have_other_tables(user_table):
    tuning.write(user_table, H200, [entry()])
    assert tuning.user_table("NVIDIA H100 80GB HBM3").name == "nvidia_h100_80gb_hbm3.json"
    options = {"source": "now", "fit": lambda config, is_exact: config}
    for device_kind in ("NVIDIA H100 80GB HBM3", "cpu"):
        config = tuning.choose(KEY, None, Config(), device_kind=device_kind, **options)
        assert config == Config()


def test_a_changed_file_is_read_again(user_table):
    for block in (128, 192):
        tuning.write(user_table, H200, [entry(config=Config(block))])
        assert choose() == Config(block)
    user_table.unlink()
    assert choose() == Config()


def test_the_variable_switches_off_or_names_a_file(
    user_table, shipped_table, tmp_path, monkeypatch
):
    tuning.write(user_table, H200, [entry(config=Config(128))])
    tuning.write(shipped_table, H200, [entry(tokens(4096), config=Config(192))])
    mine = tmp_path / "mine.json"
    tuning.write(mine, H200, [entry(config=Config(256))])
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert choose() == choose(tokens(4096)) == Config()
    assert tuning.user_table(H200) is None
    monkeypatch.setenv(tuning.VARIABLE, str(mine))
    assert choose() == Config(256)
    assert choose(tokens(4096)) == Config(192)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert choose() == Config(128)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning.user_table(H200) == tmp_path / "home/.cache/jax_flash/tuning/nvidia_h200.json"


# What is refused.


def tampered(**changes):
    """A table whose entry has other fields: {"config.block": 3}; None removes one."""
    content = {"schema": 1, "device": H200, "entries": [json_of(entry())]}
    for name, value in changes.items():
        *path, last = name.split("__")
        place = content if path and path[0] == "table" else content["entries"][0]
        for part in path:
            place = place if part == "table" else place[part]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(content)


def json_of(item):
    return json.loads(json.dumps(dataclasses.asdict(item)))


BAD_TABLES = {
    "not JSON": ("{", "cannot be read"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
    "empty": ("", "cannot be read"),
    "deep": ("[" * 100_000, "cannot be read"),
    "a list": ("[]", "must be an object with the keys"),
    "no device": (tampered(table__device=None), "must be an object with the keys"),
    "other schema": (tampered(table__schema=2), "its schema is 2, not 1"),
    "other device": (tampered(table__device="NVIDIA B200"), "is for the device 'NVIDIA B200'"),
    "entries are no list": (tampered(table__entries={}), "entries must be a list"),
    "an entry is no object": (tampered(table__entries=[3]), "an entry must be an object"),
    "an unknown part": (tampered(comment="hm"), "an entry must be an object with the keys"),
    "no time": (tampered(time_us=None), "an entry must be an object with the keys"),
    "negative time": (tampered(time_us=-1.0), "times must be positive"),
    "NaN time": (tampered(time_us=float("nan")), "times must be positive"),
    "text for a time": (tampered(time_us="fast"), "times must be positive"),
    "runners without time": (tampered(runners_up=[{}]), "times must be positive"),
    "runner is no object": (tampered(runners_up=[1]), "runners_up must hold objects"),
    "provenance of numbers": (tampered(provenance={"date": 3}), "provenance must hold texts"),
    "source of another type": (tampered(source=3), "source must be of type str"),
    "a key's field is missing": (tampered(key__mask=None), "missing are ['mask']"),
    "a key's text is a number": (tampered(key__batch="2"), "batch must be of type"),
    "a key's size": (tampered(key__q_len=0), "sizes must be positive"),
    "a key's mask": (tampered(key__mask="odd"), "mask='odd': must be of"),
    "a key's dtype": (tampered(key__dtype="float17"), "is no dtype"),
    "a field is missing": (tampered(config__block=None), "missing are ['block']"),
    "a field is unknown": (tampered(config__blocks=64), "unknown ['blocks']"),
    "bool for int": (tampered(config__block=True), "block must be of type"),
    "int for bool": (tampered(config__is_shared=1), "is_shared must be of type"),
    "null": (tampered(config={"block": None}), "missing are ['growth', 'is_shared']"),
    "refused by the dataclass": (tampered(config__block=65), "must be a multiple of 64"),
    "other source": (tampered(source="then"), "another version of the forward kernel"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables_are_refused_once_and_never_fatal(name, user_table, shipped_table):
    text, reason = BAD_TABLES[name]
    user_table.parent.mkdir(parents=True)
    user_table.write_bytes(text if isinstance(text, bytes) else text.encode())
    tuning.write(shipped_table, H200, [entry(tokens(1500), Config(192))])
    with pytest.warns(UserWarning, match=FOUND) as caught:
        assert choose() == Config(192)  # the table that ships is still good
    (warning,) = caught
    message = str(warning.message)
    assert str(user_table) in message
    assert reason in message
    assert message.endswith("Delete it, or measure anew with `jax-flash tune`.")
    assert choose() == Config(192)


def test_two_entries_for_one_problem_are_refused(user_table):
    user_table.parent.mkdir(parents=True)
    twice = json.loads(tampered())
    twice["entries"] *= 2
    user_table.write_text(json.dumps(twice))
    with pytest.warns(UserWarning, match="two entries for one problem"):
        assert choose() == Config()


def test_a_folder_is_no_table(user_table):
    user_table.mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert choose() == Config()


def test_a_configuration_that_does_not_fit_is_refused(user_table):
    tuning.write(user_table, H200, [entry()])

    def fit(config, is_exact):
        raise ValueError("needs more shared memory than there is")

    with pytest.warns(UserWarning, match="more shared memory than there is"):
        assert choose(fit=fit) == Config()


def test_the_table_that_ships_may_be_of_another_source(shipped_table):
    tuning.write(shipped_table, H200, [entry(source="then")])
    assert choose() == Config(128)


# What is written.


def test_writing_keeps_what_is_there(user_table):
    far = entry(tokens(8192), Config(192), source="then")
    tuning.write(user_table, H200, [entry(), far])
    better = dataclasses.replace(
        entry(config=Config(256)), runners_up=({"changes": {"block": 128}, "time_us": 101.5},)
    )
    tuning.write(user_table, H200, [better])
    assert set(map(str, tuning.read(user_table, H200))) == {str(better), str(far)}
    tuning.write(user_table, H200, [better], drop_stale=True)
    assert tuning.read(user_table, H200) == (better,)
    assert [path.name for path in user_table.parent.iterdir()] == [user_table.name]
    assert user_table.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_table_as_it_was(user_table, monkeypatch):
    tuning.write(user_table, H200, [entry()])
    before = user_table.read_text()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        tuning.write(user_table, H200, [entry(tokens(4096))])
    assert user_table.read_text() == before
    assert len(list(user_table.parent.iterdir())) == 1
    with pytest.raises(ValueError, match="JSON compliant"):
        tuning.write(user_table, H200, [entry(config=Config(growth=float("inf")))])
    assert user_table.read_text() == before


def test_a_foreign_table_is_replaced(user_table):
    tuning.write(user_table, "NVIDIA B200", [entry(tokens(4096))])
    with pytest.warns(UserWarning, match="NVIDIA B200"):
        tuning.write(user_table, H200, [entry()])
    assert tuning.read(user_table, H200) == (entry(),)


# The forward kernel.


def problem(tokens=4096, mask=None, d=128, **changes):
    fields = {
        "batch": 4, "q_len": tokens, "kv_len": tokens, "num_q_heads": 16, "num_kv_heads": 16,
        "head_dim": d, "value_dim": d, "dtype": jnp.dtype("bfloat16"), "scale": 0.1,
        "mask": mask or Mask(is_causal=True),
    }  # fmt: skip
    return kernel.Problem(**fields | changes)


@pytest.fixture
def on_h200(monkeypatch, user_table):
    """Choices as on an H200: with the table that ships, and a user's that is not there yet."""
    monkeypatch.setattr(tuning, "_SHIPPED", SHIPPED.parent)
    monkeypatch.setattr(tune, "device_kind", lambda: H200)
    return user_table


def kernel_entry(problem, source=None, **changes):
    config = dataclasses.asdict(kernel.default_config(problem)) | changes
    return tuning.Entry(
        key=tune.key_of(problem), config=config, time_us=1.0, source=source or tune.source(),
        provenance={},
    )  # fmt: skip


def test_a_users_entry_is_taken(on_h200):
    assert tune.tuned_config(problem()) == kernel.default_config(problem())
    tuning.write(on_h200, H200, [kernel_entry(problem(), num_stages=1, head_group=3)])
    exact, near = (tune.tuned_config(problem(n)) for n in (4096, 4100))
    assert (exact.num_stages, exact.head_group) == (1, 3)
    assert (near.num_stages, near.head_group) == (1, 0)  # heads depend on the number of tiles


def test_without_an_h200_nothing_is_read(on_h200, monkeypatch):
    tuning.write(on_h200, H200, [kernel_entry(problem(), num_stages=1)])
    monkeypatch.setattr(tune, "device_kind", lambda: "cpu")
    assert tune.tuned_config(problem()) == kernel.default_config(problem())


NONSENSE = [
    {"num_warpgroups": 0},
    {"num_warpgroups": 4, "consumer_registers": 120},
    {"block_kv": 72},
    {"block_kv": 0},
    {"num_stages": 0},
    {"num_stages": 7},  # more shared memory than there is
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
    content = {
        "schema": 1,
        "device": H200,
        "entries": [json_of(kernel_entry(problem(), **changes))],
    }
    on_h200.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="its configuration for B4 Tq4096"):
        assert tune.tuned_config(problem()) == kernel.default_config(problem())


def test_a_users_entry_for_another_kernel_source_is_refused(on_h200):
    tuning.write(on_h200, H200, [kernel_entry(problem(), source="0123", num_stages=1)])
    with pytest.warns(UserWarning, match="another version of the forward kernel"):
        assert tune.tuned_config(problem()) == kernel.default_config(problem())


MASKS = {"full": Mask(), "causal": Mask(is_causal=True), "window": Mask(window=(1000, 0))}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", kernel.HEAD_DIMS)
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
    launch = kernel.attention_forward

    def tuned(problem, *args, config=None, **options):
        return launch(problem, *args, config=config or tune.tuned_config(problem), **options)

    monkeypatch.setattr(kernel, "attention_forward", tuned)
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
    tuning.write(on_h200, H200, [kernel_entry(problem(256), num_stages=1)])
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
