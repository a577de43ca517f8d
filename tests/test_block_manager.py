"""BlockManager: random lives of sequences against a model of what the pages hold, and the rules."""

import pytest

from jax_flash import BlockManager, OutOfPagesError

pytest.importorskip("hypothesis")
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

EXAMPLES, STEPS = 100, 100  # 10,000 operations
TOKENS = strategies.lists(strategies.integers(0, 1), max_size=14)  # few ids: many equal prefixes
PICK = strategies.integers(0, 10**6)


class Lives(RuleBasedStateMachine):
    """Sequences begin, grow, fork and end, while a list plays the pool that they write to.

    The key and value of a token are functions of it and of all before it, so a slot holds the tuple
    of those tokens: a page that is shared, kept or copied wrongly shows in what is read back.
    """

    @initialize(
        num_pages=strategies.integers(2, 12),
        page_size=strategies.integers(1, 4),
        reuse=strategies.booleans(),
    )
    def begin(self, num_pages, page_size, reuse):
        self.manager = BlockManager(num_pages, page_size, reuse_prefixes=reuse)
        self.slots = [None] * (num_pages * page_size)
        self.known = {}  # sequence: its tokens, all stored
        self.count = 0

    def new_name(self):
        self.count += 1
        return f"sequence {self.count}"

    def choose(self, pick):
        return sorted(self.known)[pick % len(self.known)]

    def slot(self, name, position):
        size = self.manager.page_size
        return self.manager.table(name)[position // size] * size + position % size

    def write(self, name, tokens, start):
        """Stores tokens from `start` on; whether there was room."""
        size, before = self.manager.page_size, self.manager.num_available
        try:
            copies = self.manager.reserve(name, start, len(tokens))
        except OutOfPagesError:
            assert self.manager.num_available == before
            return False
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[
                source * size : (source + 1) * size
            ]
        for position in range(start, len(tokens)):
            self.slots[self.slot(name, position)] = tuple(tokens[: position + 1])
        self.manager.register(name, tokens)
        return True

    @rule(tokens=TOKENS)
    def allocate(self, tokens):
        name, expected = self.new_name(), self.manager.match(tokens)
        start = self.manager.allocate(name, tokens)
        assert start == expected
        assert start % self.manager.page_size == 0
        assert start < max(len(tokens), 1)
        if self.write(name, tokens, start):
            self.known[name] = tokens
        else:
            self.manager.free(name)

    @precondition(lambda self: self.known)
    @rule(pick=PICK, more=TOKENS)
    def grow(self, pick, more):
        name = self.choose(pick)
        if self.write(name, self.known[name] + more, len(self.known[name])):
            self.known[name] = self.known[name] + more

    @precondition(lambda self: self.known)
    @rule(pick=PICK, more=TOKENS, again=strategies.booleans())
    def fork(self, pick, more, again):
        parent, name = self.choose(pick), self.new_name()
        tokens = self.known[parent]
        self.manager.fork(parent, name, len(tokens))
        start = max(len(tokens) - again, 0)  # an engine computes the last token again
        if self.write(name, tokens + more, start):
            self.known[name] = tokens + more
        else:
            self.manager.free(name)

    @precondition(lambda self: self.known)
    @rule(pick=PICK)
    def free(self, pick):
        name = self.choose(pick)
        self.manager.free(name)
        del self.known[name]
        with pytest.raises(ValueError, match="has no pages"):
            self.manager.free(name)

    @invariant()
    def every_page_has_one_place(self):
        self.manager.check()

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for name, tokens in self.known.items():
            for position in range(len(tokens)):
                assert self.slots[self.slot(name, position)] == tuple(tokens[: position + 1])
        if not self.known:
            assert self.manager.num_owned == 0


def test_random_lives_lose_no_page_and_mix_no_contents():
    run = settings(max_examples=EXAMPLES, stateful_step_count=STEPS)
    run_state_machine_as_test(Lives, settings=run)


def test_equal_prefixes_share_full_pages_and_never_all_of_a_prompt():
    manager = BlockManager(10, 4)
    prompt = list(range(8))
    assert manager.allocate("a", prompt) == 0
    manager.reserve("a", 0, 8)
    manager.register("a", prompt)
    assert manager.allocate("b", [*prompt, 9]) == 8
    assert manager.table("b") == manager.table("a")
    assert manager.allocate("c", prompt) == 4  # the last token's logits are wanted
    assert manager.allocate("d", [7, *prompt]) == 0  # a page is all the tokens before it, too
    assert manager.num_owned == 2


def test_salts_share_nothing():
    manager = BlockManager(10, 2)
    manager.allocate("a", [1, 2, 3], b"one")
    manager.reserve("a", 0, 3)
    manager.register("a", [1, 2, 3])
    assert manager.match([1, 2, 3], b"one") == 2
    assert manager.match([1, 2, 3], b"two") == manager.match([1, 2, 3]) == 0


def test_freed_pages_are_found_until_they_are_needed_the_longest_unused_and_last_of_a_text_first():
    manager = BlockManager(5, 1)
    for name, tokens in (("old", [1, 2]), ("new", [3, 4])):
        manager.allocate(name, tokens)
        manager.reserve(name, 0, 2)
        manager.register(name, tokens)
    manager.free("old")
    manager.free("new")
    assert manager.num_available == 4
    assert manager.match([1, 2, 9]) == manager.match([3, 4, 9]) == 2
    manager.allocate("other", [7])
    manager.reserve("other", 0, 1)
    assert manager.match([1, 2, 9]) == 1  # its second page went
    assert manager.match([3, 4, 9]) == 2


def test_without_reuse_nothing_is_found():
    manager = BlockManager(5, 1, reuse_prefixes=False)
    manager.allocate("a", [1, 2])
    manager.reserve("a", 0, 2)
    manager.register("a", [1, 2])
    assert manager.match([1, 2, 3]) == 0


def test_a_fork_copies_only_the_page_that_is_written():
    manager = BlockManager(10, 4)
    manager.allocate("parent", range(6))
    manager.reserve("parent", 0, 6)
    manager.fork("parent", "child", 6)
    assert manager.num_owned == 2
    ((source, target),) = manager.reserve("child", 6, 7)
    assert (manager.table("parent")[1], manager.table("child")[1]) == (source, target)
    assert manager.table("parent")[0] == manager.table("child")[0]
    assert manager.reserve("parent", 6, 7) == []  # nobody else owns that page now


def test_page_0_is_never_handed_out():
    manager = BlockManager(4, 1)
    manager.allocate("a", [])
    manager.reserve("a", 0, 3)
    assert sorted(manager.table("a")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.allocate("a", []), "sequence='a': has pages already"),
        (lambda m: m.fork("a", "a", 1), "sequence='a': has pages already"),
        (lambda m: m.fork("b", "c", 1), "sequence='b': has no pages"),
        (lambda m: m.fork("a", "c", 5), "num_tokens=5: must be at most 4"),
        (lambda m: m.table("b"), "sequence='b': has no pages. Allocate it"),
        (lambda m: m.register("a", range(5)), "must be at most 4, what the pages of 'a' hold"),
        (lambda m: m.reserve("a", 8, 9), r"start, end=\(8, 9\): must follow the 4 positions"),
        (lambda m: m.reserve("a", 3, 2), r"start, end=\(3, 2\)"),
        (lambda m: BlockManager(1, 4), "num_pages=1: must be >= 2: page 0 is reserved"),
        (lambda m: BlockManager(2, 0), "page_size=0: must be >= 1"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, message):
    manager = BlockManager(4, 4)
    manager.allocate("a", [1])
    manager.reserve("a", 0, 1)
    with pytest.raises(ValueError, match=message):
        call(manager)
    manager.check()


def test_running_out_says_how_much_is_missing():
    manager = BlockManager(4, 4)
    manager.allocate("a", [1])
    with pytest.raises(OutOfPagesError, match="'a' needs 4 more pages and 3 of 3 are available"):
        manager.reserve("a", 0, 13)
