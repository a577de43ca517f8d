"""Which sequence owns which page of a paged cache: plain Python, without JAX.

The tables that it keeps are what :class:`jax_flash.PagedKVCache` reads.

Source: Kwon et al. 2023 (PagedAttention).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence


class OutOfPagesError(RuntimeError):
    """There are fewer pages than a call needs. The manager is as it was before the call."""


class BlockManager:
    """Who owns which page: a free list, reference counts, reuse of prefixes, copy on write.

    Full pages may be registered under the hash of all tokens up to their end. Sequences that begin
    with the same tokens then share them, at the same time or later: a page that nobody owns any
    more keeps its contents until it is needed, the longest unused first.

    Example:
        >>> manager = BlockManager(num_pages=64, page_size=16)
        >>> stored = manager.allocate("a", prompt)     # the first `stored` tokens are there already
        >>> copies = manager.reserve("a", stored, len(prompt))     # may be written from here on
        >>> manager.register("a", prompt)              # full pages can be shared from here on
        >>> manager.free("a")

    Args:
        num_pages: P, page 0 included.
        page_size: S, tokens of a page.
        reuse_prefixes: False never shares a page but by :meth:`fork`.

    Raises:
        ValueError: no page besides page 0, or a page size below 1.
    """

    def __init__(self, num_pages: int, page_size: int, *, reuse_prefixes: bool = True):
        if num_pages < 2:
            raise _value_error(
                "num_pages", num_pages, "must be >= 2: page 0 is reserved", "Add pages"
            )
        if page_size < 1:
            raise _value_error("page_size", page_size, "must be >= 1", "Use 16")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse_prefixes = reuse_prefixes
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # taken from the end: lowest page first
        self._unused: OrderedDict[int, None] = OrderedDict()  # registered, owned by nobody
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._tables: dict[Hashable, array[int]] = {}
        self._digests: dict[
            Hashable, list[bytes]
        ] = {}  # of its root and its full pages hashed so far

    @property
    def num_available(self) -> int:
        """Pages that can be handed out: free ones, and registered ones that nobody owns."""
        return len(self._free) + len(self._unused)

    @property
    def num_owned(self) -> int:
        """Pages that at least one sequence owns."""
        return self.num_pages - 1 - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def table(self, sequence: Hashable) -> array[int]:
        """The pages of a sequence in order, as int32 (not a copy; NumPy reads it as it is).

        Raises:
            ValueError: the sequence has none: it was not allocated, or freed already.
        """
        return self._owned(sequence)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """How many of the first tokens are stored already; always fewer than there are.

        At least one token is left to compute, since its logits are wanted.
        """
        return len(list(self._matches(tokens, salt))) * self.page_size

    def allocate(self, sequence: Hashable, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Begins a sequence with the pages that hold its first tokens already.

        Args:
            sequence: any hashable name, new to the manager.
            tokens: ids of all tokens known so far.
            salt: sequences of different salts share nothing (adapters, tenants).

        Returns:
            How many tokens those pages hold: a multiple of the page size, below ``len(tokens)``.

        Raises:
            ValueError: the sequence exists.
        """
        self._check_new(sequence)
        matches = list(self._matches(tokens, salt))
        table = array("i", (page for _, page in matches))
        for page in table:
            self._unused.pop(page, None)
            self._refs[page] += 1
        self._tables[sequence] = table
        self._digests[sequence] = [_root(salt), *(digest for digest, _ in matches)]
        return len(table) * self.page_size

    def reserve(self, sequence: Hashable, start: int, end: int) -> list[tuple[int, int]]:
        """Makes positions ``start <= t < end`` writable: new pages, and copies of shared ones.

        Args:
            sequence: an allocated sequence.
            start: first position that will be written; what is before it is kept.
            end: one past the last position.

        Returns:
            ``(source, target)`` page numbers to copy before the write
            (:meth:`PagedKVCache.copy_pages`); a copy has no other owner.

        Raises:
            OutOfPagesError: there are not enough pages.
            ValueError: an unknown sequence, or a gap between its pages and ``start``.
        """
        table = self._owned(sequence)
        first, last = start // self.page_size, self.pages_for(end)
        if not 0 <= start <= end or first > len(table):
            raise _value_error(
                "start, end",
                (start, end),
                f"must follow the {len(table) * self.page_size} positions of {sequence!r}",
                "Reserve positions in order",
            )
        if first + 1 == last <= len(table) and self._is_private(sequence, first):
            return []  # the next token of a text, nearly always
        written = range(first, min(last, len(table)))
        shared = [i for i in written if self._refs[table[i]] > 1]
        needed = len(shared) + max(last - len(table), 0)
        if needed > self.num_available:
            raise OutOfPagesError(
                f"{sequence!r} needs {needed} more pages and {self.num_available} of "
                f"{self.num_pages - 1} are available; free a sequence first"
            )
        for i in written:
            if self._refs[table[i]] == 1:  # its contents change: nobody may find them any more
                self._unregister(table[i])
        copies = []
        for i in shared:
            target = self._take()
            self._refs[table[i]] -= 1
            copies.append((table[i], target))
            table[i] = target
        table.extend(self._take() for _ in range(last - len(table)))
        del self._digests[sequence][first + 1 :]
        return copies

    def register(self, sequence: Hashable, tokens: Sequence[int]) -> None:
        """Lets others find the full pages that hold ``tokens``, the first ones of the sequence.

        Args:
            sequence: an allocated sequence.
            tokens: ids of tokens whose keys and values are stored, or will be before anything that
                is computed later reads them.

        Raises:
            ValueError: an unknown sequence, or more tokens than its pages hold.
        """
        table, digests = self._owned(sequence), self._digests[sequence]
        if len(tokens) > len(table) * self.page_size:
            raise _value_error(
                "len(tokens)",
                len(tokens),
                f"must be at most {len(table) * self.page_size}, what the pages of "
                f"{sequence!r} hold",
                "Reserve their positions first",
            )
        if not self.reuse_prefixes:
            return
        size = self.page_size
        for i in range(len(digests) - 1, len(tokens) // size):
            digest = _digest(digests[-1], tokens[i * size : (i + 1) * size])
            digests.append(digest)
            if digest not in self._page_of and table[i] not in self._digest_of:
                self._page_of[digest] = table[i]
                self._digest_of[table[i]] = digest

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int) -> None:
        """Begins a sequence that shares all pages of another's first tokens, the last one too.

        Whoever writes to a shared page first gets a copy of it from :meth:`reserve`.

        Raises:
            ValueError: an unknown parent, a known child, or more tokens than the parent has pages.
        """
        table = self._owned(parent)
        self._check_new(child)
        count = self.pages_for(num_tokens)
        if count > len(table):
            raise _value_error(
                "num_tokens",
                num_tokens,
                f"must be at most {len(table) * self.page_size}, what the pages of {parent!r} hold",
                "Fork what is stored",
            )
        self._tables[child] = table[:count]
        self._digests[child] = self._digests[parent][: 1 + num_tokens // self.page_size]
        for page in self._tables[child]:
            self._refs[page] += 1

    def free(self, sequence: Hashable) -> None:
        """Ends a sequence; pages that nobody else owns can be handed out again.

        Raises:
            ValueError: an unknown sequence: it was not allocated, or freed already.
        """
        table = self._owned(sequence)
        del self._tables[sequence], self._digests[sequence]
        for page in reversed(table):  # a page is found through those before it, so they stay longer
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._digest_of:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def check(self) -> None:
        """Raises AssertionError unless every page is accounted for exactly once."""
        counted = [0] * self.num_pages
        for table in self._tables.values():
            for page in table:
                counted[page] += 1
        assert counted == self._refs, "reference counts differ from the tables"
        owned = {page for page, refs in enumerate(self._refs) if refs}
        free, unused = set(self._free), set(self._unused)
        assert len(free) == len(self._free), "a page is free twice"
        in_all = len(owned) + len(free) + len(unused)
        assert in_all == len(owned | free | unused), "a page is in two places"
        assert owned | free | unused == set(range(1, self.num_pages)), "a page is lost"
        assert unused <= self._digest_of.keys(), "an unused page has no name to be found by"
        assert not free & self._digest_of.keys(), "a free page can be found"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert self._tables.keys() == self._digests.keys()

    def _owned(self, sequence: Hashable) -> array[int]:
        if sequence not in self._tables:
            raise _value_error(
                "sequence", repr(sequence), "has no pages", "Allocate it, and free it only once"
            )
        return self._tables[sequence]

    def _is_private(self, sequence: Hashable, i: int) -> bool:
        """Whether nobody else has the i-th page of a sequence, or can find it."""
        page = self._tables[sequence][i]
        is_hashed = len(self._digests[sequence]) > i + 1
        return self._refs[page] == 1 and page not in self._digest_of and not is_hashed

    def _check_new(self, sequence: Hashable) -> None:
        if sequence in self._tables:
            raise _value_error(
                "sequence", repr(sequence), "has pages already", "Free it, or take another name"
            )

    def _matches(self, tokens: Sequence[int], salt: bytes) -> Iterator[tuple[bytes, int]]:
        if not self.reuse_prefixes:
            return
        digest, size = _root(salt), self.page_size
        for i in range((len(tokens) - 1) // size):
            digest = _digest(digest, tokens[i * size : (i + 1) * size])
            page = self._page_of.get(digest)
            if page is None:
                return
            yield digest, page

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            self._unregister(page)
        self._refs[page] = 1
        return page

    def _unregister(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]


def _root(salt: bytes) -> bytes:
    """What the chain of a sequence's digests begins with."""
    return hashlib.blake2b(salt, digest_size=16).digest()


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a page by its tokens and by all before them, in 16 bytes: no two ever collide."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def _value_error(name: str, got: object, rule: str, remedy: str) -> ValueError:
    """As :func:`jax_flash.checks.value_error`, which needs JAX."""
    return ValueError(f"{name}={got}: {rule}. {remedy}.")
