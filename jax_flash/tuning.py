"""Which configuration a kernel runs with: tables of measured ones, each with its provenance.

A table is one JSON file for one kind of device: ``{"schema", "device", "entries"}``, an entry being
an :class:`Entry`. Two are read: the user's, which ``jax-flash tune`` writes, and the one that ships
with this package. The entry of the very problem comes first, then the nearest one
(:func:`distance`), and without any the kernel's own default.

A table is data from outside: it is checked when read, and its configurations are rebuilt through
the kernel's dataclass, which checks itself. What is wrong is refused with one warning and never
raises. ``JAX_FLASH_TUNING`` is ``off`` for no tables at all, or the path of a file to use in place
of ``$XDG_CACHE_HOME/jax_flash/tuning/<device>.json``.

Nothing here knows a kernel: a configuration is any frozen dataclass of numbers and strings.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import os
import re
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_flash.mask import Mask

SCHEMA = 1
VARIABLE = "JAX_FLASH_TUNING"
MASKS = ("full", "causal", "window", "traced")

_SHIPPED = Path(__file__).parent / "tuning_tables"
# An entry says nothing about calls with more than twice or less than half its tokens.
_MAX_OCTAVES = 1.0
_FIXED = ("kernel", "head_dim", "value_dim", "mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """What a configuration was measured for.

    Attributes:
        kernel: ``"forward"`` or ``"backward"``.
        dtype: of the query.
        head_dim: D, as the kernel pads it.
        value_dim: Dv, likewise.
        mask: of :data:`MASKS`; "traced" is any whose key ranges are arrays.
        window: keys that a row can see under the mask "window", else 0.
        batch: B.
        q_len: Tq.
        kv_len: Tk.
        num_q_heads: Hq.
        num_kv_heads: Hk.
    """

    kernel: str
    dtype: str
    head_dim: int
    value_dim: int
    mask: str
    window: int
    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        sizes = [x for name, x in vars(self).items() if name not in ("kernel", "dtype", "mask")]
        if min(sizes) < 0 or 0 in (self.batch, self.q_len, self.kv_len, self.head_dim):
            raise ValueError(f"{self}: sizes must be positive")
        if self.mask not in MASKS:
            raise ValueError(f"mask={self.mask!r}: must be of {MASKS}")
        try:
            jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype={self.dtype!r}: is no dtype") from None

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        heads = f"H{self.num_q_heads}/{self.num_kv_heads}"
        window = f" {self.window}" * bool(self.window)
        lengths = f"Tq{self.q_len} Tk{self.kv_len}"
        return f"B{self.batch} {lengths} {heads} {dims} {self.mask}{window} {self.dtype}"


def mask_class(mask: Mask, kv_len: int) -> tuple[str, int]:
    """The fields ``mask`` and ``window`` of a :class:`Key`."""
    if not (mask.has_static_ranges and mask.is_interval):
        return "traced", 0
    if mask.window is not None:
        left, right = mask.window
        span = left + 1 + (0 if mask.is_causal else right)
        return "window", max(min(span, kv_len), 1)
    return ("causal" if mask.is_causal else "full"), 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One measured configuration.

    Attributes:
        key: the problem.
        config: every field of the kernel's configuration.
        time_us: of the fastest configuration, µs.
        source: hash of the kernel's source when it was measured.
        provenance: how and with what: method, driver, jax, version, commit, date.
        runners_up: ``{"changes": fields that differ from config, "time_us"}``, fastest first.
    """

    key: Key
    config: Mapping[str, Any]
    time_us: float
    source: str
    provenance: Mapping[str, str]
    runners_up: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        times = [self.time_us, *(runner.get("time_us") for runner in self.runners_up)]
        if not all(type(x) is float and math.isfinite(x) and x > 0.0 for x in times):
            raise ValueError(f"times must be positive numbers, with a decimal point; got {times}")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that has been read.

    Attributes:
        path: the file.
        is_user: whether it is the user's, which is worth nothing for other kernels' sources.
        entries: all of them.
    """

    path: Path
    is_user: bool
    entries: tuple[Entry, ...]


class TableError(ValueError):
    """A file that is no table for this device."""


@dataclasses.dataclass(frozen=True)
class Choice[C]:
    """The configuration of one launch, and where it came from.

    Attributes:
        key: the launch.
        problem: the kernel's own description of it.
        config: what it runs with.
        default: what it would run with if there were no tables.
        entry: the table's entry, or None for the default.
        path: of that table.
    """

    key: Key
    problem: Any
    config: C
    default: C
    entry: Entry | None = None
    path: Path | None = None

    def __str__(self) -> str:
        if self.entry is None or self.path is None:
            return f"{self.key.kernel} kernel: its default configuration, no table has this problem"
        shipped = self.path.parent == _SHIPPED
        measured = (
            f"measured at {self.entry.time_us:g} us on {self.entry.provenance.get('date', '?')}"
        )
        near = "" if self.entry.key == self.key else f" for the nearest problem, {self.entry.key}"
        return (
            f"{self.key.kernel} kernel: configuration from "
            f"{self.path.name if shipped else self.path}, {measured}{near}"
        )


def choose[C](
    key: Key,
    problem: Any,
    default: C,
    *,
    device_kind: str,
    source: str,
    fit: Callable[[C, bool], C],
) -> C:
    """The configuration of a launch: from a table, else the default.

    Args:
        key: the launch.
        problem: the kernel's own description of it, for :func:`recording`.
        default: the kernel's default, which also says of what type configurations are.
        device_kind: JAX's name of the device, such as ``"NVIDIA H200"``.
        source: hash of the kernel's source: a user's entry of another one is out of date.
        fit: ``(config, is_exact) -> config`` that runs the problem; raises ValueError if it cannot.

    Returns:
        A configuration of the default's type.
    """
    choice = Choice(key, problem, default, default)
    tables = [table for table in _tables(device_kind) if _is_current(table, key.kernel, source)]
    while tables:
        found = _nearest(key, tables)
        if found is None:
            break
        entry, table = found
        try:
            config = fit(build(type(default), entry.config), entry.key == key)
        except ValueError as error:
            _refuse(table.path, f"its configuration for {entry.key} is invalid: {error}")
            tables.remove(table)
        else:
            choice = Choice(key, problem, config, default, entry, table.path)
            break
    if (record := _recording.get()) is not None:
        record.append(choice)
    return choice.config


def _nearest(key: Key, tables: list[Table]) -> tuple[Entry, Table] | None:
    """The entry at the smallest distance; of several, the first table's."""
    pairs = [(distance(key, entry.key), entry, t) for t in tables for entry in t.entries]
    near = [(d, entry, t) for d, entry, t in pairs if d is not None]
    if not near:
        return None
    _, entry, table = min(near, key=lambda item: item[0])
    return entry, table


def distance(key: Key, measured: Key) -> tuple[float, ...] | None:
    """How far a measured problem is from another one, to be compared; None if it says nothing.

    Kernel, head dims, mask class and the size of the dtype must agree, and lengths must be within a
    factor of two of each other. Lengths count first (in octaves), then the number of heads in the
    launch, their grouping, and the dtype itself; among equals the longer problem is the nearer.
    """
    if key == measured:
        return (0.0,)
    if any(getattr(key, name) != getattr(measured, name) for name in _FIXED):
        return None
    if jnp.dtype(key.dtype).itemsize != jnp.dtype(measured.dtype).itemsize:
        return None

    def octaves(one: float, other: float) -> float:
        return abs(math.log2(one / other))

    lengths = [octaves(key.q_len, measured.q_len), octaves(key.kv_len, measured.kv_len)]
    lengths.append(octaves(max(key.window, 1), max(measured.window, 1)))
    if max(lengths) > _MAX_OCTAVES:
        return None
    heads = octaves(
        max(key.batch * key.num_q_heads, 1), max(measured.batch * measured.num_q_heads, 1)
    )
    same_group = key.num_q_heads * measured.num_kv_heads == key.num_kv_heads * measured.num_q_heads
    is_same_dtype = key.dtype == measured.dtype
    return sum(lengths), heads, not same_group, not is_same_dtype, -measured.q_len


def build[T](kind: type[T], fields: Any, what: str = "it") -> T:
    """A dataclass of numbers and strings from an object of JSON, checked.

    Raises:
        ValueError: a field that is missing, unknown or of another type than declared, or that the
            dataclass itself refuses.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"{what} must be an object; got {fields!r}")
    hints = _hints(typing.cast(Any, kind))
    missing, unknown = sorted(hints.keys() - fields.keys()), sorted(fields.keys() - hints.keys())
    if missing or unknown:
        raise ValueError(
            f"{what} must have the fields {list(hints)}; missing are {missing}, unknown {unknown}"
        )
    for name, value in fields.items():
        if type(value) not in (typing.get_args(hints[name]) or (hints[name],)):
            raise ValueError(f"{name} must be of type {hints[name]}; got {value!r}")
    try:
        return kind(**fields)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"{what} cannot be: {error}") from error


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


# Files.


def file_name(device_kind: str) -> str:
    """``"NVIDIA H200"`` is ``"nvidia_h200.json"``."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


def user_table(device_kind: str) -> Path | None:
    """Where the user's table for a device is; None if tables are switched off."""
    value = os.environ.get(VARIABLE, "")
    if value == "off":
        return None
    if value:
        return Path(value)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jax_flash" / "tuning" / file_name(device_kind)


def _tables(device_kind: str) -> list[Table]:
    user = user_table(device_kind)
    if user is None:
        return []
    paths = ((user, True), (_SHIPPED / file_name(device_kind), False))
    tables = [_cached(path, device_kind, is_user) for path, is_user in paths]
    return [table for table in tables if table is not None]


def _cached(path: Path, device_kind: str, is_user: bool) -> Table | None:
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _refuse(path, f"it cannot be read ({error})")
        return None
    return _read_once(path, device_kind, is_user, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@functools.lru_cache(maxsize=16)
def _read_once(path: Path, device_kind: str, is_user: bool, stamp: Any) -> Table | None:
    del stamp  # part of the cache's key: a file that has changed is read again
    try:
        return Table(path, is_user, read(path, device_kind))
    except TableError as error:
        _refuse(path, str(error))
        return None


def read(path: Path, device_kind: str) -> tuple[Entry, ...]:
    """The entries of a table.

    Args:
        path: the file.
        device_kind: the device for which the table must be.

    Raises:
        TableError: the file cannot be read, is no table, or one of another schema or device.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TableError(f"it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict) or content.keys() != {"schema", "device", "entries"}:
        raise TableError("it must be an object with the keys schema, device and entries")
    if content["schema"] != SCHEMA:
        raise TableError(f"its schema is {content['schema']!r}, not {SCHEMA}")
    if content["device"] != device_kind:
        raise TableError(f"it is for the device {content['device']!r}, not {device_kind!r}")
    if not isinstance(content["entries"], list):
        raise TableError(f"its entries must be a list; got {content['entries']!r}")
    try:
        entries = tuple(map(_entry, content["entries"]))
    except ValueError as error:
        raise TableError(f"it has an invalid entry: {error}") from error
    if len({entry.key for entry in entries}) != len(entries):
        raise TableError("it has two entries for one problem")
    return entries


def _entry(content: Any) -> Entry:
    names = [field.name for field in dataclasses.fields(Entry)]
    if not isinstance(content, dict) or sorted(content) != sorted(names):
        raise ValueError(f"an entry must be an object with the keys {names}; got {content!r}")
    for name, kind in (
        ("config", dict),
        ("source", str),
        ("provenance", dict),
        ("runners_up", list),
    ):
        if not isinstance(content[name], kind):
            raise ValueError(f"{name} must be of type {kind.__name__}; got {content[name]!r}")
    if not all(isinstance(text, str) for text in content["provenance"].values()):
        raise ValueError(f"provenance must hold texts; got {content['provenance']!r}")
    if not all(isinstance(runner, dict) for runner in content["runners_up"]):
        raise ValueError(f"runners_up must hold objects; got {content['runners_up']!r}")
    parts = {"key": build(Key, content["key"], "key"), "runners_up": tuple(content["runners_up"])}
    return Entry(**{**content, **parts})


def write(
    path: Path, device_kind: str, entries: Iterable[Entry], *, drop_stale: bool = False
) -> None:
    """Adds entries to a table, in the place of those for the same problems. Whole or not at all.

    A file that is no table for the device is replaced.

    Args:
        path: the file; folders are made.
        device_kind: the device.
        entries: new ones.
        drop_stale: drop entries of the same kernels that were measured with another source.
    """
    new = {entry.key: entry for entry in entries}
    sources = {entry.key.kernel: entry.source for entry in new.values()}
    try:
        old = read(path, device_kind) if path.exists() else ()
    except TableError as error:
        _refuse(path, str(error))
        old = ()
    if drop_stale:
        old = tuple(e for e in old if sources.get(e.key.kernel, e.source) == e.source)
    merged = {entry.key: entry for entry in old} | new
    ordered = sorted(merged.values(), key=lambda entry: tuple(vars(entry.key).values()))
    # One line an entry, so that a change to one is a change of one line.
    lines = ",\n".join(json.dumps(dataclasses.asdict(entry), allow_nan=False) for entry in ordered)
    text = (
        f'{{"schema": {SCHEMA}, "device": {json.dumps(device_kind)}, "entries": [\n{lines}\n]}}\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = path.stat().st_mode if path.exists() else 0o644
        os.chmod(scratch, mode & 0o777)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _is_current(table: Table, kernel: str, source: str) -> bool:
    """Whether a user's entries for a kernel were measured with its present source."""
    if not table.is_user:
        return True
    if any(e.key.kernel == kernel and e.source != source for e in table.entries):
        _refuse(table.path, f"it was measured with another version of the {kernel} kernel")
        return False
    return True


def _refuse(path: Path, reason: str) -> None:
    """Warns once for each file and reason."""
    if (path, reason) in _refused:
        return
    _refused.add((path, reason))
    warnings.warn(
        f"jax_flash: the tuning table {path} is not used: {reason}. "
        "Delete it, or measure anew with `jax-flash tune`.",
        skip_file_prefixes=(os.path.dirname(__file__),),
    )


_refused: set[tuple[Path, str]] = set()
_recording: contextvars.ContextVar[list[Choice[Any]] | None] = contextvars.ContextVar(
    "jax_flash_tuning_recording", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice[Any]]]:
    """Collects the choice of each launch that is traced inside the context."""
    choices: list[Choice[Any]] = []
    token = _recording.set(choices)
    try:
        yield choices
    finally:
        _recording.reset(token)
