"""Text from token ids as they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MOST_HELD_BACK = 8
"""Tokens after which an incomplete character is taken for a wrong one."""


class TextStream:
    """Turns one text's tokens into pieces that can be shown at once and never taken back.

    Held back are tokens that end inside a character (a byte-level tokenizer cuts them anywhere) and
    the end of the text as long as it may be the beginning of a stop string.

    Args:
        decode: text of token ids.
        stop: strings that end the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._held = ""

    def push(self, token: int) -> str:
        """Takes a token; returns the text that is certain now. `stopped` is True after a stop."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(INCOMPLETE) and len(self._tokens) < MOST_HELD_BACK:
            return ""
        self._tokens.clear()
        return self._advance(text)

    def flush(self) -> str:
        """The rest, once no token comes any more."""
        text = self._advance(self._decode(self._tokens)) if self._tokens else ""
        rest, self._held, self._tokens = self._held, "", []
        return text + rest

    def _advance(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a proper beginning of `stop` equals."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
