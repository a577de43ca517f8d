"""The text, the character tokenizer, and batches of windows.

`load_text` finds the text: an explicit path, else the environment variable JAX_FLASH_DATA, else a
cached copy of tinyshakespeare, else a download of it, else (no network) the source of the Python
standard library, which is about as long and always there.

Tokens live in memory-mapped uint16 files. A batch is a pure function of (seed, step), which is what
makes a resumed run see the very windows that the uninterrupted one would have seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

NAME = "tinyshakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NUM_BYTES = 1_115_394
ENVIRONMENT_VARIABLE = "JAX_FLASH_DATA"
DOWNLOAD_TIMEOUT_S = 10.0
TRAIN_FRACTION = 0.9


@dataclasses.dataclass(frozen=True)
class Text:
    """A text, what to call it, and where it came from."""

    content: str
    name: str
    source: str

    @property
    def sha256(self) -> str:
        """Identifies the text, so that a resumed run can tell whether it is still the same."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text(
    path: str | os.PathLike[str] | None = None, say: Callable[[str], None] = print
) -> Text:
    """Finds the training text, in the order that the module's docstring gives.

    Args:
        path: a UTF-8 file of any text. None: look further.
        say: told, in one line, when something other than the obvious happens.

    Raises:
        OSError: the path given cannot be read.
        ValueError: the file is not UTF-8, or the download is not the text that it should be.
    """
    if path is None:
        path = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if path is not None:
        raw = Path(path).read_bytes()
        name = NAME if _is_tinyshakespeare(raw) else Path(path).stem
        return Text(_decode(raw, str(path)), name, str(path))
    cached = cache_folder() / f"{NAME}.txt"
    if cached.is_file():
        if _is_tinyshakespeare(cached.read_bytes()):
            return Text(cached.read_bytes().decode(), NAME, str(cached))
        say(f"{cached} is damaged: removed")
        cached.unlink()
    say(f"downloading {URL}")
    try:
        raw = _download(URL)
    except (OSError, http.client.HTTPException) as error:
        say(
            f"no network ({error}): training on the Python standard library's source instead; "
            "--data PATH trains on a text of yours"
        )
        return standard_library_text()
    if not _is_tinyshakespeare(raw):
        raise ValueError(
            f"{URL} sent {len(raw):,} bytes with sha256 {hashlib.sha256(raw).hexdigest()}, not the "
            f"{NUM_BYTES:,} bytes with sha256 {SHA256} of tinyshakespeare; nothing was kept. Fetch "
            "the text by other means and pass it with --data PATH"
        )
    _write_atomically(cached, raw)
    return Text(raw.decode(), NAME, str(cached))


def standard_library_text(num_bytes: int = NUM_BYTES) -> Text:
    """The standard library's own modules in alphabetical order, ASCII files only, cut to size."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    total = 0
    for file in sorted(folder.glob("*.py")):
        raw = file.read_bytes()
        if raw.isascii():
            parts.append(raw.decode())
            total += len(raw)
        if total >= num_bytes:
            break
    if not parts:
        raise ValueError(f"no Python source in {folder}; pass a text with --data PATH")
    return Text("".join(parts)[:num_bytes], "Python's standard library", str(folder))


def cache_folder() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/jax_flash, by default ~/.cache/jax_flash."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jax_flash"


class CharTokenizer:
    """One id per character: its place among the vocabulary's characters in code point order."""

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        if not self.characters:
            raise ValueError("the vocabulary is empty: the text has no characters")
        if len(self.characters) > np.iinfo(np.uint16).max + 1:
            raise ValueError(
                f"the text has {len(self.characters):,} different characters, more than the 65,536 "
                "that uint16 token files can tell apart"
            )
        self._code_points = _code_points(self.characters)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.characters)

    @property
    def start_token(self) -> int:
        """What generation starts from when the prompt is empty: a newline, or id 0 without one."""
        return max(self.characters.find("\n"), 0)

    def encode(self, text: str) -> np.ndarray:
        """Ids of the characters, uint16 `[len(text)]`; ValueError for a character never seen."""
        points = _code_points(text)
        ids = np.searchsorted(self._code_points, points)
        known = self._code_points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            where = int(np.argmin(known))
            raise ValueError(
                f"the character {text[where]!r} (U+{ord(text[where]):04X}) at position {where} is "
                f"not among the {self.vocab_size} of this vocabulary; leave it out, or train on a "
                "text that has it"
            )
        return ids.astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that the ids stand for; ValueError for an id outside `[0, vocab_size)`."""
        return "".join(self.characters[i] for i in self.check(ids))

    def check(self, ids: Iterable[int]) -> list[int]:
        """The ids as Python integers, or a ValueError that names the first one out of range."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside [0, {self.vocab_size})")
        return ids

    def to_json(self) -> str:
        """The tokenizer as JSON."""
        return json.dumps({"kind": "char", "characters": self.characters})

    @classmethod
    def from_json(cls, text: str) -> CharTokenizer:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        if fields.get("kind") != "char":
            raise ValueError(f"not a character tokenizer: kind is {fields.get('kind')!r}")
        return cls(fields["characters"])


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as tokens: the first 90 % for training, the last 10 % for validation.

    Attributes:
        tokenizer: made from the whole text.
        training: uint16 `[N]`.
        validation: uint16 `[M]`.
    """

    tokenizer: CharTokenizer
    training: np.ndarray
    validation: np.ndarray

    @classmethod
    def from_text(cls, text: str) -> Corpus:
        """Makes the tokenizer, encodes and splits."""
        tokenizer = CharTokenizer(text)
        tokens = tokenizer.encode(text)
        cut = int(TRAIN_FRACTION * len(tokens))
        return cls(tokenizer, tokens[:cut], tokens[cut:])

    def check(self, context_length: int) -> None:
        """ValueError unless both splits hold at least one window and its targets."""
        for name in ("training", "validation"):
            if len(getattr(self, name)) <= context_length:
                raise ValueError(
                    f"the {name} split has {len(getattr(self, name)):,} tokens, but a window of "
                    f"context {context_length} needs {context_length + 1:,}; use a longer text or "
                    "a smaller --context"
                )

    def memory_mapped(self, folder: Path) -> Corpus:
        """Writes the tokens to `train.bin` and `val.bin` and returns the same corpus on disk."""
        return dataclasses.replace(
            self,
            training=_on_disk(folder / "train.bin", self.training),
            validation=_on_disk(folder / "val.bin", self.validation),
        )


def training_batch(
    tokens: np.ndarray, *, seed: int, step: int, batch_size: int, context_length: int
) -> np.ndarray:
    """Random windows, a pure function of (seed, step).

    Returns:
        int32 `[batch_size, context_length + 1]`: inputs are all but the last column, targets all
        but the first.
    """
    random = np.random.default_rng([seed, step])
    starts = random.integers(0, len(tokens) - context_length, size=batch_size)
    return _windows(tokens, starts, context_length)


def validation_batches(
    tokens: np.ndarray, *, num_batches: int, batch_size: int, context_length: int
) -> np.ndarray:
    """The same evenly spaced windows every time: int32 `[num_batches, batch_size, T + 1]`."""
    last = len(tokens) - context_length - 1
    starts = np.linspace(0, last, num_batches * batch_size).astype(np.int64)
    windows = _windows(tokens, starts, context_length)
    return windows.reshape(num_batches, batch_size, context_length + 1)


def _windows(tokens: np.ndarray, starts: np.ndarray, context_length: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context_length + 1)].astype(np.int32)


def _on_disk(path: Path, tokens: np.ndarray) -> np.ndarray:
    _write_atomically(path, tokens.astype("<u2").tobytes())
    return np.memmap(path, dtype="<u2", mode="r")


def _code_points(text: str) -> np.ndarray:
    """uint32 code points; lone surrogates (undecodable bytes of a command line) pass through."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from None


def _is_tinyshakespeare(raw: bytes) -> bool:
    return len(raw) == NUM_BYTES and hashlib.sha256(raw).hexdigest() == SHA256


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
        content: bytes = response.read(NUM_BYTES + 1)  # one more than it should have: no more
        return content


def _write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old file or the whole new one, and a failure leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
