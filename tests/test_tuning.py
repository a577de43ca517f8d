"""Tuning tables: which entry is found, what is refused, what is written."""

import dataclasses
import json
import os

import jax.numpy as jnp
import pytest

from jax_flash import tuning
from jax_flash.mask import Mask

H200 = "NVIDIA H200"
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
