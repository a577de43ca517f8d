"""The scheduler without a model: who runs, in what order, and in how much memory."""

import numpy as np
import pytest

from jax_flash import BlockManager
from models.engine import EngineConfig
from models.scheduler import SamplingParams, Scheduler, Sequence

PAGE = 16


def make(num_pages, slots=4, prefill=64, watermark=0):
    config = EngineConfig(slots, PAGE, max_prefill_tokens=prefill, min_prefill_tokens=16)
    blocks = BlockManager(num_pages, PAGE)
    budget = slots + prefill
    return Scheduler(blocks, config.batch_sizes, config.prefill_shapes, budget, watermark)


def sequence(number, length, count):
    tokens = np.random.default_rng(number).integers(0, 50_000, length).tolist()
    return Sequence(number, 0, tokens, length, SamplingParams(count))


def read(scheduler, plan):
    """Plays the engine: every token that was drawn becomes known."""
    for call in plan.calls:
        for row in call.rows:
            if row.draw is not None:
                one = row.sequence
                one.tokens.append(row.draw)
                if one.num_drawn == one.params.max_new_tokens:
                    scheduler.remove(one)


def names(plan):
    return [(call.shape, [row.sequence.request for row in call.rows]) for call in plan.calls]


def test_decodes_come_first_and_prompts_go_on_in_chunks():
    scheduler = make(num_pages=100)
    scheduler.add(sequence(0, 20, 9))
    scheduler.add(sequence(1, 150, 9))
    scheduler.add(sequence(2, 10, 9))
    plans = []
    for _ in range(4):
        plans.append(scheduler.plan(may_preempt=True))
        read(scheduler, plans[-1])
    assert [names(plan) for plan in plans] == [
        [((2, 32), [0, 1])],  # 52 tokens of the two oldest, where one row would hold 20
        [((1, 1), [0]), ((1, 64), [1])],
        [((1, 1), [0]), ((1, 64), [1])],  # 54 tokens are left, and two rows would take 32 + 10
        [((2, 1), [0, 1]), ((1, 16), [2])],
    ]


def test_a_call_says_whether_one_of_its_rows_filters():
    scheduler = make(num_pages=100)
    for number, settings in enumerate(({"top_k": 0, "top_p": 1.0}, {"top_p": 0.9}, {"top_k": 3})):
        one = sequence(number, 16, 8)
        one.params = SamplingParams(8, **settings)
        scheduler.add(one)
        (*_, prompt) = (plan := scheduler.plan(may_preempt=True)).calls
        assert prompt.has_filters == (number > 0)
        read(scheduler, plan)
        (decode,) = (plan := scheduler.plan(may_preempt=True)).calls
        assert decode.has_filters == (number > 0)
        read(scheduler, plan)


def test_the_youngest_is_thrown_out_and_comes_back_first():
    scheduler = make(num_pages=5)
    for number in range(3):
        scheduler.add(sequence(number, 16, 32))
    first = scheduler.plan(may_preempt=True)
    assert names(first) == [((4, 16), [0, 1, 2])]
    read(scheduler, first)
    assert scheduler.plan(may_preempt=False) is None  # three more pages, and one is left
    second = scheduler.plan(may_preempt=True)
    assert names(second) == [((2, 1), [0, 1])]
    assert [one.request for one in scheduler.waiting] == [2]
    assert (scheduler.num_preempted, scheduler.waiting[0].computed) == (1, 0)
    read(scheduler, second)
    while scheduler.running or scheduler.waiting:
        read(scheduler, scheduler.plan(may_preempt=True))
        scheduler.blocks.check()
    assert scheduler.blocks.num_owned == 0


def test_a_newcomer_leaves_pages_to_those_that_run():
    for watermark, running in ((0, 2), (2, 1)):
        scheduler = make(num_pages=6, watermark=watermark)
        for number in range(2):
            scheduler.add(sequence(number, 32, 16))
        read(scheduler, scheduler.plan(may_preempt=True))
        assert len(scheduler.running) == running
    alone = make(num_pages=3, watermark=2)  # who runs alone needs to leave none
    alone.add(sequence(0, 32, 1))
    assert names(alone.plan(may_preempt=True)) == [((1, 32), [0])]


def test_the_memory_of_8_rows_of_the_longest_text_serves_more_than_28_at_once():
    """Log-normal prompts of 32 to 1024 tokens and outputs of 32 to 512, 1536 at the longest."""
    rng, count, longest = np.random.default_rng(0), 160, 1024 + 512

    def lengths(low, high):
        middle = np.sqrt(low * high)
        return np.clip(rng.lognormal(np.log(middle), 0.7, count), low, high).astype(int).tolist()

    scheduler = make(1 + 8 * longest // PAGE, slots=64, prefill=1024, watermark=7)
    requests = list(zip(lengths(32, 1024), lengths(32, 512), strict=True))
    for number, (prompt, output) in enumerate(requests):
        scheduler.add(sequence(number, prompt, output))
    running, waste = [], []
    while scheduler.waiting:  # as long as memory is what limits
        plan = scheduler.plan(may_preempt=True)
        tables = [(len(scheduler.blocks.table(one)), one.computed) for one in scheduler.running]
        running.append(len(tables))
        slots = PAGE * sum(pages for pages, _ in tables)
        waste.append(1 - sum(stored for _, stored in tables) / slots)
        read(scheduler, plan)
    contiguous = 1 - np.mean([sum(request) for request in requests]) / longest
    print(f"running {np.mean(running):.1f}, waste {np.mean(waste):.3f}, rows {contiguous:.3f}")
    assert np.mean(running) > 3.5 * 8
    assert np.mean(waste) < 0.04
    assert contiguous > 0.7  # of a row that is as long as the longest text, at the text's end


def test_a_budget_that_would_stop_prompts_is_refused():
    blocks = BlockManager(10, PAGE)
    with pytest.raises(ValueError, match="token_budget must be at least 20"):
        Scheduler(blocks, [1, 2, 4], [(1, 16), (1, 32)], 19, 0)
