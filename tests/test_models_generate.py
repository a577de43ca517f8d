"""Generation: the sliding window, prompts at the edges, and the command."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from models import checkpoint, generate, step
from models.data import CharTokenizer
from models.generate import generate_text, generate_tokens
from models.minigpt import MiniGPT, MiniGPTConfig

CHARACTERS = "\n abcdefx:"
CONTEXT = 8
CONFIG = MiniGPTConfig(
    vocab_size=len(CHARACTERS), context_length=CONTEXT, num_layers=1, num_heads=2, width=16
)
TOKENIZER = CharTokenizer(CHARACTERS)


@functools.cache
def make(config=CONFIG):
    """A model with opinions: parameters ten times the usual ones."""
    graph, params = nnx.split(MiniGPT(config, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, jax.tree.map(lambda x: 10.0 * x, params))


def run(prompt, max_new_tokens, model=None, **options):
    options.setdefault("temperature", 0)
    return "".join(generate_text(model or make(), TOKENIZER, prompt, max_new_tokens, **options))


@pytest.fixture
def run_folder(tmp_path):
    record = checkpoint.Record(
        step=3,
        val_loss=1.5,
        best_loss=1.5,
        model=dataclasses.asdict(CONFIG),
        train={},
        tokenizer=TOKENIZER.to_json(),
        text_sha256="",
    )
    params = nnx.to_pure_dict(nnx.state(make()))
    checkpoint.save(tmp_path / "runs/tiny/best", record, params)
    return tmp_path / "runs/tiny"


@pytest.mark.parametrize("prompt", ["", "abc", "x" * CONTEXT, "x" * (CONTEXT + 1), "ab" * 20])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_cached_and_uncached_text_agree_across_the_context_boundary(position, prompt):
    model = make(dataclasses.replace(CONFIG, position=position))
    for settings in ({"temperature": 0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}):
        cached = run(prompt, 3 * CONTEXT, model, **settings)
        assert cached == run(prompt, 3 * CONTEXT, model, use_cache=False, **settings)
        assert len(cached) == 3 * CONTEXT


def test_a_context_of_one_token_works():
    model = make(dataclasses.replace(CONFIG, context_length=1))
    assert run("ab", 5, model) == run("ab", 5, model, use_cache=False) == run("b", 5, model)


def test_a_long_prompt_keeps_its_last_context_tokens():
    assert run("fedcba" + "abcdefx:", 1) == run("abcdefx:", 1)
    assert run("fedcba" + "abcdefx:", 20) == run("abcdefx:", 20)


def test_a_full_window_goes_on_from_its_last_half():
    prompt = "abcdefx:"
    first = run(prompt, 1)
    assert run(prompt, 20) == first + run((prompt + first)[-CONTEXT // 2 :], 19)


def test_an_empty_prompt_starts_from_a_newline():
    assert run("", 12) == run("\n", 12)


def test_zero_new_tokens_are_none():
    assert run("abc", 0) == ""


def test_the_seed_decides_the_text():
    texts = {run("abc", 30, temperature=1.0, seed=seed) for seed in (0, 0, 1, 2)}
    assert len(texts) == 3


def test_text_arrives_while_it_is_made():
    pieces = generate_text(make(), TOKENIZER, "abc", 10**9)
    assert len([next(pieces) for _ in range(3)]) == 3


def test_new_settings_do_not_compile_again():
    run("abc", 2, temperature=0.5, top_k=3)
    before = step.run._cache_size()
    run("abcd", 2, temperature=0.7, top_k=4, seed=5)
    assert step.run._cache_size() == before


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, "at least one id"),
        ([0, 10], {}, r"token id 10 is outside \[0, vocab_size = 10\)"),
        ([-1], {}, "token id -1 is outside"),
        ([0], {"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ([0], {"seed": -1}, "seed must be"),
        ([0], {"temperature": -1.0}, "temperature must be"),
        ([0], {"top_k": -1}, "top_k must be"),
        ([0], {"top_p": float("nan")}, "top_p must be"),
    ],
)
def test_bad_arguments_are_refused_at_the_call_not_at_the_first_token(tokens, options, message):
    options = {"max_new_tokens": 3, **options}
    with pytest.raises(ValueError, match=message):
        generate_tokens(make(), tokens, **options)


def test_a_broken_model_says_so_rather_than_talk_nonsense():
    graph, params = nnx.split(make())
    broken = nnx.merge(graph, jax.tree.map(lambda x: x * np.float32("nan"), params))
    with pytest.raises(FloatingPointError, match="not finite"):
        run("abc", 3, broken)


def test_the_command_prints_prompt_and_text(run_folder, capsys):
    assert generate.main(["abc", "--checkpoint", str(run_folder), "--max-new-tokens", "20"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("abc")
    assert len(printed.out) == 3 + 20 + 1
    assert "step 3, validation loss 1.500" in printed.err
    uncached = ["abc", "--checkpoint", str(run_folder / "best"), "--max-new-tokens", "20"]
    assert generate.main([*uncached, "--no-cache"]) == 0
    assert capsys.readouterr().out == printed.out


def test_the_command_finds_the_newest_run(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder.parents[1])
    assert generate.main(["--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a bé"], "'é' (U+00E9) at position 3"),
        (["a😀"], "'😀' (U+1F600) at position 1"),
        (["\0"], r"'\x00' (U+0000) at position 0"),
        (["a", "--temperature", "-1"], "temperature must be"),
        (["a", "--top-k", "-1"], "top_k must be"),
        (["a", "--top-p", "nan"], "top_p must be"),
        (["a", "--max-new-tokens", "-1"], "max_new_tokens must be"),
        (["a", "--checkpoint", "nowhere"], "no folder nowhere; train a model with"),
    ],
)
def test_the_command_answers_a_bad_argument_in_one_line(run_folder, capsys, arguments, message):
    assert generate.main(["--checkpoint", str(run_folder), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_folder_without_a_checkpoint_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert generate.main(["a"]) == 2
    assert "no run in runs/; train a model with" in capsys.readouterr().err
    assert generate.main(["a", "--checkpoint", str(tmp_path)]) == 2
    assert f"no checkpoint in {tmp_path}" in capsys.readouterr().err


def test_a_checkpoint_of_another_format_is_refused(run_folder, capsys):
    file = run_folder / "best/3/record/metadata"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    assert generate.main(["a", "--checkpoint", str(run_folder)]) == 2
    assert "has format 99, not 1" in capsys.readouterr().err
