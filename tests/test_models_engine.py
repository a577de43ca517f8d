"""The engine says what full passes of the model say, whatever shares the batch and the pages."""

import collections
import dataclasses
import re
from array import array

import jax
import numpy as np
import pytest
from flax import nnx

from cuda_ffi import library
from jax_flash import api, backends
from models import step
from models.engine import Engine, EngineConfig, QueueFullError, SamplingParams
from models.scheduler import Call, Row, Sequence
from tests.serving import (
    CONFIG,
    CONTEXT,
    TOKENIZER,
    greedy_tokens,
    log_probabilities,
    make_model,
    prompt_of,
)

# On a GPU these fp32 models run on plain XLA, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:jax_flash. attention:UserWarning")

SMALL = EngineConfig(
    max_batch_size=4, page_size=4, max_prefill_tokens=16, min_prefill_tokens=8, max_waiting=64
)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0)
LENGTHS = (1, 3, 4, 5, 8, 17, 33, 40)


def make_engine(model=None, tokenizer=TOKENIZER, **options):
    return Engine(model or make_model(), dataclasses.replace(SMALL, **options), tokenizer)


def run(engine, limit=1000):
    """Steps until nothing is left; the tokens of each (request, choice), checked on the way."""
    tokens = collections.defaultdict(list)
    for _ in range(limit):
        if not engine.has_work:
            break
        for output in engine.step():
            tokens[output.request, output.choice].append(output.token)
        engine.blocks.check()
    assert not engine.has_work
    assert engine.blocks.num_owned == 0
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "reuse_prefixes": False, "max_batch_size": 2, "max_prefill_tokens": 8},
        {"page_size": 16, "max_batch_size": 2, "max_prefill_tokens": 64, "min_prefill_tokens": 64},
        {"page_size": 5, "max_batch_size": 3, "max_prefill_tokens": 4, "min_prefill_tokens": 4},
        {"decode_draws": 3},
    ],
    ids=str,
)
def test_tokens_are_those_of_full_passes(options):
    engine = make_engine(**options)
    prompts = [prompt_of(length) for length in LENGTHS]
    completions = engine.generate(prompts, GREEDY)
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        assert completion.tokens == greedy_tokens(prompt, 8)
        assert completion.text == TOKENIZER.decode(completion.tokens)
        assert completion.finish_reason == "length"
    assert engine.blocks.num_owned == 0


def test_learned_positions_and_all_heads_work_too():
    config = dataclasses.replace(CONFIG, position="learned", num_kv_heads=None, num_layers=1)
    model = make_model(config)
    prompts = [prompt_of(length) for length in (1, 7, 30)]
    engine = make_engine(model, max_batch_size=2, max_prefill_tokens=8)
    for prompt, (completion,) in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert completion.tokens == greedy_tokens(prompt, 8, model)


@pytest.mark.filterwarnings("error")  # on a GPU: the kernels run, or say that they do not
def test_in_bfloat16_and_with_kernels_the_log_probabilities_are_those_of_full_passes():
    config = dataclasses.replace(
        CONFIG, width=128, num_heads=2, num_kv_heads=1, num_layers=1, dtype="bfloat16"
    )
    model = make_model(config, scale=3.0)
    exact = make_model(dataclasses.replace(config, dtype="float32"), scale=3.0)
    prompts = [prompt_of(length) for length in (1, 20, 35)]
    engine = make_engine(model, max_batch_size=2, max_prefill_tokens=8)
    for prompt, (completion,) in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        tokens = prompt + completion.tokens
        places = np.arange(len(prompt) - 1, len(tokens) - 1)
        full, truth = (log_probabilities(tokens, one)[places] for one in (model, exact))
        noise = np.abs(full - truth).max()
        assert 0 < noise < 0.3
        drawn = full[np.arange(8), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, drawn, atol=2 * noise)
        assert (full.max(axis=-1) - drawn < 2 * noise).all()


def test_linear_layers_are_cast_once_which_changes_no_bit(monkeypatch):
    model = make_model(dataclasses.replace(CONFIG, dtype="bfloat16"), scale=3.0)
    prompts = [prompt_of(length) for length in LENGTHS[-2:]]
    engine = make_engine(model)
    layer = jax.tree.leaves(engine._params.blocks[0].mlp.up)
    assert [str(x.dtype) for x in layer] == ["bfloat16"] * 2
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(model))} == {"float32"}
    cast_once = engine.generate(prompts, GREEDY)
    monkeypatch.setattr(step, "_with_cast_layers", lambda model: model)
    assert make_engine(model).generate(prompts, GREEDY) == cast_once


def test_a_text_may_fill_the_context_and_be_one_token_longer():
    prompt = prompt_of(CONTEXT - 3)
    ((completion,),) = make_engine().generate(
        [prompt], dataclasses.replace(GREEDY, max_new_tokens=4)
    )
    assert completion.tokens == greedy_tokens(prompt, 4)


@pytest.mark.parametrize(("reuse_prefixes", "decode_draws"), [(True, 1), (False, 1), (True, 6)])
def test_texts_thrown_out_for_want_of_pages_come_back_and_say_the_same(
    reuse_prefixes, decode_draws
):
    engine = make_engine(num_pages=14, reuse_prefixes=reuse_prefixes, decode_draws=decode_draws)
    params = dataclasses.replace(GREEDY, max_new_tokens=20)
    prompts = [prompt_of(9, seed) for seed in range(6)]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    tokens = run(engine)
    assert engine.snapshot()["preempted_total"] > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert tokens[request, 0] == greedy_tokens(prompt, 20)


@pytest.mark.parametrize("reuse_prefixes", [True, False])
def test_prefix_hits_change_the_work_and_not_the_tokens(reuse_prefixes):
    engine = make_engine(reuse_prefixes=reuse_prefixes)
    shared = prompt_of(17)
    prompts = [shared, [*shared, 3], [*shared[:9], *prompt_of(8, 5)], shared[:16], shared]
    for prompt in prompts:  # one after another: each finds what the others left
        ((completion,),) = engine.generate([prompt], GREEDY)
        assert completion.tokens == greedy_tokens(prompt, 8)
    found = engine.snapshot()["prefix_hit_tokens_total"]
    assert found == ((16 + 8 + 12 + 16) if reuse_prefixes else 0)


def test_what_a_text_went_on_with_is_found_by_the_next_turn():
    engine, prompt = make_engine(), prompt_of(6)
    ((first,),) = engine.generate([prompt], GREEDY)
    turn = [*prompt, *first.tokens, 2]
    ((second,),) = engine.generate([turn], GREEDY)
    assert second.tokens == greedy_tokens(turn, 8)
    assert engine.snapshot()["prefix_hit_tokens_total"] == 12  # three full pages of 6 + 8 tokens


@pytest.mark.parametrize("length", [1, 4, 5, 13])
def test_a_fork_shares_the_prompt_and_draws_as_requests_of_their_own_would(length):
    prompt, params = prompt_of(length), SamplingParams(max_new_tokens=6, temperature=3.0, seed=7)
    engine = make_engine(reuse_prefixes=False)
    ((*forks,),) = engine.generate([prompt], dataclasses.replace(params, n=4))
    alone = [
        engine.generate([prompt], dataclasses.replace(params, seed=7 + choice))[0][0]
        for choice in range(4)
    ]
    assert [fork.tokens for fork in forks] == [one.tokens for one in alone]
    assert len({tuple(fork.tokens) for fork in forks}) > 1
    engine.blocks.check()


def test_a_fork_computes_the_prompt_once_and_holds_it_once():
    engine, prompt = make_engine(), prompt_of(33)
    engine.submit(prompt, dataclasses.replace(GREEDY, n=4))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.blocks.num_owned)
    assert most <= 8 + 4 * 3  # 8 full pages of 4 tokens once, then each its own
    assert engine.snapshot()["prefix_hit_tokens_total"] == 3 * 32


def test_forks_survive_a_parent_that_is_cancelled_or_thrown_out():
    engine = make_engine(num_pages=14)
    params = dataclasses.replace(GREEDY, n=4, max_new_tokens=20)
    prompts = [prompt_of(9, seed) for seed in range(2)]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    tokens = run(engine)
    assert engine.snapshot()["preempted_total"] > 0
    for request, prompt in zip(requests, prompts, strict=True):
        for choice in range(4):
            assert tokens[request, choice] == greedy_tokens(prompt, 20)


@pytest.mark.parametrize("decode_draws", [1, 3])
def test_many_requests_that_come_and_go_at_random_leave_no_page_behind(decode_draws):
    rng = np.random.default_rng(0)
    engine = make_engine(num_pages=14, decode_draws=decode_draws)
    shared, expected, tokens, cancelled = prompt_of(8), {}, collections.defaultdict(list), set()
    arrivals = collections.Counter(rng.integers(0, 40, 16).tolist())
    for time in range(2000):
        for _ in range(arrivals[time]):
            prompt = shared[: rng.integers(0, 9)] + prompt_of(int(rng.integers(1, 20)), time)
            params = dataclasses.replace(GREEDY, max_new_tokens=int(rng.integers(1, 20)))
            expected[engine.submit(prompt, params)] = prompt, params.max_new_tokens
        if expected and rng.random() < 0.15:
            request = int(rng.choice(list(expected)))
            engine.cancel(request)
            cancelled.add(request)
        for output in engine.step():
            assert output.request not in cancelled
            tokens[output.request].append(output.token)
        engine.blocks.check()
        if time > 40 and not engine.has_work:
            break
    assert engine.blocks.num_owned == 0
    assert len(engine.scheduler._free_slots) == 4
    assert len(cancelled) > 3
    done = [request for request in expected if request not in cancelled]
    assert len(done) > 5
    for request in done:
        prompt, count = expected[request]
        assert tokens[request] == greedy_tokens(prompt, count)


def test_nothing_compiles_after_the_warm_up():
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    config = dataclasses.replace(CONFIG, num_layers=1)  # unlike in the other tests
    graph, params = nnx.split(make_model(config))
    params = jax.device_put(params, jax.devices()[0])  # committed, as from a checkpoint
    engine = make_engine(nnx.merge(graph, params), num_pages=20)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine.warm_up(with_filters=False)
        unfiltered = set(engine.compiled)
        assert len(compiled) == len(unfiltered) + 1  # each once, and the copy of pages
        engine.warm_up()
        shapes, compiled_before = set(engine.compiled), len(compiled)
        assert unfiltered == {(shape, False) for shape, _ in shapes}
        assert compiled_before == len(shapes) + 1 == 2 * len(unfiltered) + 1
        for length in LENGTHS:
            engine.submit(prompt_of(length), dataclasses.replace(GREEDY, n=1 + length % 3))
            engine.submit(prompt_of(length), SamplingParams(5, 0.7, top_k=3, top_p=0.9))
        run(engine)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == compiled_before
    assert engine.compiled == shapes


def test_no_step_copies_a_pool_and_none_makes_the_host_wait_for_a_branch():
    engine = make_engine(max_batch_size=2, max_prefill_tokens=8)
    shape = ",".join(map(str, engine._state.pools[0][0].shape))
    for has_filters in (False, True):
        for rows, tokens, draws in ((2, 1, 1), (2, 1, 3), (1, 8, 1)):
            arguments = engine._arguments(Call([], (rows, tokens), num_draws=draws))
            options = {"num_tokens": tokens, "has_filters": has_filters, "num_draws": draws}
            program = step.run.lower(*arguments, **options).compile().as_text()
            assert f"f32[{shape}]" in program
            assert f"f32[{shape}]{{3,2,1,0}} copy(" not in program
            assert " conditional(" not in program
            assert program.count("-alias)") == 2 * CONFIG.num_layers + 1  # pools, newest tokens
            assert bool(re.search(r"(?i)sort\b", program)) == has_filters


@pytest.mark.skipif(
    library.missing(jax.default_backend()) is not None, reason="the kernels are not built"
)
def test_all_layers_of_a_step_share_one_plan_which_changes_no_token(monkeypatch):
    monkeypatch.setattr(backends, "_NEEDS_GPU", ("mosaic", "cudnn"))
    config = dataclasses.replace(
        CONFIG, width=128, num_heads=2, num_kv_heads=1, num_layers=3, dtype="bfloat16"
    )
    prompts = [prompt_of(length) for length in LENGTHS[-2:]]

    def tokens_and_plans(model):
        engine = make_engine(model)
        tokens = [one.tokens for (one,) in engine.generate(prompts, GREEDY)]
        arguments = engine._arguments(Call([], (4, 1)))
        options = {"num_tokens": 1, "has_filters": False, "num_draws": 1}
        program = step.run.lower(*arguments, **options).compile().as_text()
        calls = re.findall(rf"custom-call\((.*)\), custom_call_target=\"{library.DECODE}", program)
        return tokens, [re.findall(r"%[\w.-]+", call)[9] for call in calls]

    tokens, plans = tokens_and_plans(make_model(config, scale=3.0))
    assert len(plans) == 3
    assert len(set(plans)) == 1
    monkeypatch.setattr(api, "decode_plan", lambda *_, **__: None)
    # Another model to the compiler, the same one to the tokens.
    unplanned = dataclasses.replace(config, context_length=CONTEXT + 1)
    tokens_without, _ = tokens_and_plans(make_model(unplanned, scale=3.0))
    assert tokens == tokens_without


def test_a_packed_call_holds_what_each_row_asks_for_and_padding_asks_for_nothing():
    params = SamplingParams(5, 0.5, top_k=2**40, top_p=0.25, seed=2**32 - 1, n=2)
    one = Sequence(0, 1, [4, 5, 6], 3, params, slot=2)
    other = Sequence(1, 0, [7], 1, SamplingParams(5), slot=0)
    rows = [Row(one, [5, 6], 1, draw=3, num_draws=2), Row(other, [-1], 9, draw=None)]
    packed = step.pack(Call(rows, (4, 2)), [array("i", [8, 9]), array("i", [3])], 3, 4)
    assert packed[:, :5].tolist() == [[5, 6, 8, 9, 0], [-1, 0, 3, 0, 0], [0] * 5, [0] * 5]
    field = {name: packed[:, i - len(step.FIELDS)] for i, name in enumerate(step.FIELDS)}
    assert field["start"].tolist() == [1, 9, 0, 0]
    assert field["count"].tolist() == [2, 1, 0, 0]
    assert field["slot"].tolist() == [2, 0, 4, 4]
    assert field["seed"].view(np.uint32).tolist() == [0, 0, 0, 0]  # 2**32 - 1 + choice 1
    assert field["draw"].tolist() == [3, 0, 0, 0]
    assert field["num_draws"].tolist() == [2, 0, 0, 0]  # the second draws nothing yet
    assert field["temperature"].view(np.float32).tolist() == [0.5, 1, 0, 0]
    assert field["top_k"].tolist() == [2**31 - 1, 0, 0, 0]
    assert field["top_p"].view(np.float32).tolist() == [0.25, 1, 1, 1]


def test_a_step_is_launched_before_the_one_before_it_is_read(monkeypatch):
    engine, log = make_engine(), []
    launch, read = engine._launch, engine._read
    monkeypatch.setattr(engine, "_launch", lambda call: log.append("launch") or launch(call))
    monkeypatch.setattr(engine, "_read", lambda: log.append("read") or read())
    engine.generate([prompt_of(3)], dataclasses.replace(GREEDY, max_new_tokens=3))
    # Prompt, two more tokens, and a step that only reads: the last token needs no other.
    assert log == ["launch", "read", "launch", "read", "launch", "read", "read"]


def test_no_step_takes_more_tokens_than_the_budget_and_decodes_never_wait(monkeypatch):
    engine, calls = make_engine(), []
    launch = engine._launch
    monkeypatch.setattr(engine, "_launch", lambda call: calls.append(call) or launch(call))
    first = engine.submit(prompt_of(4), dataclasses.replace(GREEDY, max_new_tokens=12))
    for seed in range(5):
        engine.submit(prompt_of(40, seed), GREEDY)
    steps = 0
    while engine.has_work:
        outputs = engine.step()
        steps += 1
        assert sum(rows * tokens for rows, tokens in (call.shape for call in calls)) <= 4 + 16
        calls.clear()
        if 2 <= steps <= 13:
            assert first in {output.request for output in outputs}


def test_seeds_decide_and_neighbours_do_not():
    prompt = prompt_of(5)
    params = SamplingParams(max_new_tokens=10, temperature=2.0, top_k=8, top_p=0.95, seed=3)
    ((alone,),) = make_engine().generate([prompt], params)
    engine = make_engine()
    engine.submit(prompt_of(20), dataclasses.replace(params, temperature=0.5, top_k=None))
    request = engine.submit(prompt, params)
    engine.submit(prompt_of(7), GREEDY)
    assert run(engine)[request, 0] == alone.tokens
    ((other,),) = engine.generate([prompt], dataclasses.replace(params, seed=2**32 - 1))
    assert other.tokens != alone.tokens
    ((rest,),) = engine.generate(
        [prompt + alone.tokens[:4]], dataclasses.replace(params, max_new_tokens=6, first_draw=4)
    )
    assert rest.tokens == alone.tokens[4:]


def test_log_probabilities_are_the_models_own_before_temperature_and_filters():
    prompt = prompt_of(6)
    params = SamplingParams(max_new_tokens=5, temperature=2.0, top_k=4, seed=1)
    ((completion,),) = make_engine().generate([prompt], params)
    table = log_probabilities(prompt + completion.tokens)
    expected = [table[5 + i, token] for i, token in enumerate(completion.tokens)]
    np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-3, atol=1e-4)


def test_stop_strings_and_stop_tokens_end_a_text():
    prompt = prompt_of(5)
    tokens = greedy_tokens(prompt, 12)
    text = TOKENIZER.decode(tokens)
    stop = text[4:6]
    engine = make_engine()
    params = dataclasses.replace(GREEDY, max_new_tokens=12, stop=("zz", stop))
    ((completion,),) = engine.generate([prompt], params)
    assert completion.text == text[: text.find(stop)]
    assert completion.finish_reason == "stop"
    params = dataclasses.replace(GREEDY, max_new_tokens=12, stop_tokens=(tokens[3],))
    ((completion,),) = engine.generate([prompt], params)
    assert completion.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert completion.finish_reason == "stop"
    assert engine.blocks.num_owned == 0


def test_outputs_stream_one_token_at_a_time_and_closing_the_stream_cancels():
    engine = make_engine()
    outputs = engine.stream(prompt_of(5), dataclasses.replace(GREEDY, max_new_tokens=40))
    first = [next(outputs).token for _ in range(3)]
    assert first == greedy_tokens(prompt_of(5), 3)
    assert engine.blocks.num_owned > 0
    outputs.close()
    assert engine.blocks.num_owned == 0
    assert engine.snapshot()["finished_cancelled_total"] == 1
    engine.cancel(0)  # once more does nothing, nor does a number that there never was
    engine.cancel(99)


def test_a_queue_that_is_full_refuses_and_recovers():
    engine = make_engine(max_waiting=3)
    for seed in range(3):
        engine.submit(prompt_of(5, seed), GREEDY)
    with pytest.raises(QueueFullError, match="3 texts wait, and max_waiting is 3"):
        engine.submit(prompt_of(5), GREEDY)
    engine.step()
    engine.submit(prompt_of(5), GREEDY)
    assert len(run(engine)) == 4
    assert len(engine.generate([prompt_of(5)] * 7, GREEDY)) == 7  # generate waits instead


def test_a_broken_model_ends_its_texts_with_an_error():
    graph, params = nnx.split(make_model())
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * np.float32("nan"), params))
    ((completion,),) = make_engine(broken).generate([prompt_of(5)], GREEDY)
    assert (completion.tokens, completion.finish_reason) == ([-1], "error")


def test_the_engine_measures_itself():
    engine = make_engine()
    engine.generate([prompt_of(9, seed) for seed in range(6)], GREEDY)
    numbers = engine.snapshot()
    assert numbers["requests_submitted_total"] == numbers["finished_length_total"] == 6
    assert numbers["generated_tokens_total"] == 48
    assert numbers["prompt_tokens_total"] == 54
    assert numbers["time_to_first_token_seconds_p50"] > 0
    assert 0 < numbers["inter_token_seconds_p50"] <= numbers["inter_token_seconds_p99"]
    assert numbers["tokens_per_busy_second"] > 0
    assert 0 < numbers["page_occupancy_mean"] <= 1
    assert 0 < numbers["page_waste_mean"] < 0.5
    assert (numbers["running"], numbers["waiting"], numbers["pages_owned"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "tokens must hold at least one id"),
        ([99], {}, r"token id 99 is outside \[0, vocab_size = 15\)"),
        ([1] * CONTEXT, {"max_new_tokens": 2}, "49 positions, and max_length is 48"),
        ([1] * 30, {"max_new_tokens": 12}, "needs 11 pages and there are 9"),
        ([1], {"n": 65, "max_new_tokens": 2}, r"n \(65\) must be at most max_waiting \(64\)"),
    ],
)
def test_requests_that_could_never_be_served_are_refused(tokens, options, message):
    engine = make_engine(num_pages=10)
    with pytest.raises(ValueError, match=message):
        engine.submit(tokens, SamplingParams(**options))
    assert not engine.has_work


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        make_engine(tokenizer=None).submit([1], SamplingParams(4, stop=("a",)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, r"max_new_tokens must be in \[1, 2\*\*32\), got 0"),
        ({"seed": -1}, ValueError, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 2**32}, ValueError, "seed must be"),
        ({"n": 1.5}, TypeError, "n must be an integer, got 1.5"),
        ({"temperature": -1.0}, ValueError, "temperature must be"),
        ({"top_p": float("nan")}, ValueError, "top_p must be"),
        ({"top_k": -2}, ValueError, "top_k must be"),
        ({"stop": ("",)}, ValueError, "stop must hold no empty string"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be at least 1"),
        ({"max_prefill_tokens": 24}, "max_prefill_tokens must be a power of two, got 24"),
        ({"max_prefill_tokens": 2}, r"max_prefill_tokens \(2\) must be at least"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\)"),
    ],
)
def test_sizes_that_make_no_engine_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **options)


def test_the_shapes_are_few():
    config = EngineConfig(max_batch_size=12, max_prefill_tokens=64, min_prefill_tokens=16)
    assert config.batch_sizes == [1, 2, 4, 8, 12]
    assert config.prefill_shapes == [(1, 16), (1, 32), (1, 64), (2, 32), (4, 16)]
