"""Training: it learns, it resumes to the bit, it survives Ctrl-C, and it says what is wrong."""

import dataclasses
import functools
import json
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import checkpoint, report, train, trainer
from models.settings import PRESETS, SHAPE_FIELDS, TrainConfig, make_parser
from models.train import Run

# The text has ROMEO: in it, so that the sample starts from that.
TEXT = "ROMEO: to be, or not to be, that is the question.\n" * 40

# steps_per_dispatch divides neither eval_interval nor steps: calls of many lengths.
TINY = TrainConfig(
    context_length=16,
    num_layers=1,
    num_heads=2,
    width=32,
    dropout_rate=0.1,
    steps=20,
    batch_size=8,
    learning_rate=1e-2,
    min_learning_rate=1e-3,
    eval_interval=10,
    eval_batches=2,
    steps_per_dispatch=4,
)


@functools.cache
def shared_trainer(config, model_config):
    return trainer.Trainer(config, model_config)


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """Runs that only differ in where they stop share one compiled program."""
    monkeypatch.setattr(
        train,
        "Trainer",
        lambda config, model_config: shared_trainer(
            dataclasses.replace(config, out="", data=None, stop_at=None), model_config
        ),
    )


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return dataclasses.replace(TINY, out=str(tmp_path / "run"), data=str(tmp_path / "text.txt"))


def as_arguments(config):
    """The command line that gives this config."""
    arguments = []
    for field in dataclasses.fields(TrainConfig):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments.append(f"--{flag}={','.join(value) if isinstance(value, tuple) else value}")
    return arguments


def press_ctrl_c_at(monkeypatch, step):
    """Sends this process SIGINT once training has reached `step`."""
    update = report.Progress.update

    def update_and_press(self, at, *rest):
        update(self, at, *rest)
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(report.Progress, "update", update_and_press)


def assert_same_bits(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, state, other)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 20 steps in one go."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "text.txt").write_text(TEXT)
    out, text = str(folder / "run"), str(folder / "text.txt")
    run = Run(dataclasses.replace(TINY, out=out, data=text))
    assert run.train()
    return run


def test_the_loss_goes_down(straight):
    losses = [row["val_loss"] for row in straight.log.rows() if "val_loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5
    assert straight.best_loss == min(losses)


@pytest.mark.parametrize("stop_at", [10, 7])
def test_a_resumed_run_ends_with_the_bits_of_one_in_one_go(config, straight, stop_at):
    stopped = Run(dataclasses.replace(config, stop_at=stop_at))
    assert stopped.train()
    assert stopped.step == stop_at
    resumed = Run(config, resume=True)
    assert resumed.step == stop_at
    assert resumed.train()
    assert_same_bits(resumed.state, straight.state)
    assert resumed.best_loss == straight.best_loss
    loaded = [checkpoint.load_model(run.out).model for run in (resumed, straight)]
    assert_same_bits(*(jax.tree.map(lambda x: x, model) for model in loaded))


def test_ctrl_c_saves_and_the_run_goes_on_from_there(config, straight, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        press_ctrl_c_at(patch, step=8)
        assert train.main(as_arguments(config)) == 130
    printed = capsys.readouterr().out
    assert f"python -m models.train --out {config.out} --resume" in printed
    assert checkpoint.load_record(Path(config.out) / "latest").step == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train.main(["--out", config.out, "--resume"]) == 0
    shapes = straight.trainer.state_shapes
    assert_same_bits(checkpoint.load_state(Path(config.out) / "latest", shapes), straight.state)


def test_the_second_ctrl_c_is_not_held_back():
    with train.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_command_leaves_a_log_a_picture_checkpoints_and_a_sample(config, capsys):
    assert train.main(as_arguments(config)) == 0
    printed = capsys.readouterr().out
    for expected in ("validation loss: ", "tokens/s", "latest (to resume)", "best (to generate)"):
        assert expected in printed
    assert f"python -m models.generate 'ROMEO:' --checkpoint {config.out}" in printed
    assert len(printed.split("\nROMEO:")[1]) >= train.SAMPLE_LENGTH
    folder = Path(config.out)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert rows[0]["run"]["settings"]["seed"] == config.seed
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 10, 20]
    assert [row["step"] for row in rows if "train_loss" in row] == [4, 8, 10, 14, 18, 20]
    assert all(row["learning_rate"] > 0 for row in rows if "train_loss" in row)
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)
    assert 0 < elapsed[0] < elapsed[-1] <= time.monotonic() - models.IMPORTED_S
    record = checkpoint.load_record(folder / "latest")
    assert record.train["steps"] == 20
    assert record.model["vocab_size"] == len(set(TEXT))


def test_a_resumed_log_has_every_step_once(config):
    Run(dataclasses.replace(config, stop_at=10)).train()
    log = report.Log(Path(config.out) / "log.jsonl", resume_at=10)
    log.write(14, train_loss=1.0)  # a run that was killed before it saved
    run = Run(config, resume=True)
    run.train()
    steps = [row["step"] for row in run.log.rows() if "train_loss" in row]
    assert steps == [4, 8, 10, 14, 18, 20]


def test_programs_are_compiled_ahead_and_once(config):
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = Run(dataclasses.replace(config, width=16))  # unlike in the other tests
        for program in run.compiled:
            program.result()
        assert len(compiled) == 5  # training, validation, the state and its copy, the schedule
        assert run.train()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 5


def test_training_leaves_a_copy_alone(straight):
    state = straight.trainer.new_state()
    copy = straight.trainer.copy(state)
    addresses = [
        {leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}
        for tree in (state, copy)
    ]
    assert not set.intersection(*addresses)
    assert_same_bits(copy, state)


def test_a_checkpoint_that_cannot_be_saved_ends_the_run(config, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        Run(config).train()


def test_the_log_counts_from_when_it_is_told_that_the_run_began(config):
    run = Run(dataclasses.replace(config, stop_at=4), began=time.monotonic() - 1000.0)
    assert run.train()
    assert all(1000.0 <= row["elapsed_s"] < 2000.0 for row in run.log.rows())


def test_a_new_run_moves_the_old_one_aside(config):
    folder = Path(config.out)
    said = []
    for _ in range(3):
        Run(config, say=said.append).log.write(0, mine=len(said))
    assert [line.split(" holds an earlier run")[0] for line in said] == [config.out] * 2
    mine = [
        report.Log(folder.with_name(name) / "log.jsonl", resume_at=0).rows()[0]["mine"]
        for name in ("run.1", "run.2", "run")
    ]
    assert mine == [0, 1, 2]


def test_a_folder_that_is_not_a_run_is_left_alone(config, tmp_path):
    with pytest.raises(ValueError, match="holds something that is not a run"):
        Run(dataclasses.replace(config, out=str(tmp_path)))
    assert Path(config.data).exists()
    Path(config.out).mkdir()
    assert Run(config).step == 0


def test_a_loss_that_is_not_finite_stops_the_run(config, capsys):
    arguments = as_arguments(dataclasses.replace(config, learning_rate=1e30, clip_norm=1e30))
    assert train.main(arguments) == 1
    assert "the training loss is nan" in capsys.readouterr().err
    assert checkpoint.load_record(Path(config.out) / "best").step == 0


def test_bfloat16_trains_fp32_parameters():
    in_bfloat16 = trainer.Trainer(TINY, TINY.model(vocab_size=9, dtype="bfloat16"))
    batches = jax.ShapeDtypeStruct((4, 8, 17), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state, loss = jax.eval_shape(in_bfloat16.train, in_bfloat16.state_shapes, batches, count)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"float32"}
    assert loss.dtype == jnp.float32
    assert "bf16" in str(jax.make_jaxpr(in_bfloat16.train)(state, batches, count))


def test_only_matrices_decay():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones((2,)), "scale": jnp.ones((2,))}
    optimizer = trainer.make_optimizer(dataclasses.replace(TINY, weight_decay=0.5))
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert (updates["kernel"] < 0).all()
    assert (updates["bias"] == 0).all()
    assert (updates["scale"] == 0).all()


def test_the_learning_rate_warms_up_then_falls_to_its_end():
    config = dataclasses.replace(TINY, steps=1000, warmup_steps=50)
    rates = jax.vmap(trainer.make_schedule(config))(jnp.arange(1001, dtype=jnp.float32))
    assert 0 < rates[0] < rates[25] < rates[50]
    np.testing.assert_allclose(rates[50], config.learning_rate, rtol=1e-6)
    np.testing.assert_allclose(rates[1000], config.min_learning_rate, rtol=1e-5)
    assert (np.diff(rates[50:]) <= 0).all()
    short = trainer.make_schedule(dataclasses.replace(TINY, steps=20, warmup_steps=50))
    np.testing.assert_allclose(short(2.0), TINY.learning_rate, rtol=1e-6)


def test_every_setting_is_an_option_of_the_command():
    config = TrainConfig(
        stop_at=5, num_kv_heads=2, tie_weights=False, implementation=("chunked", "xla"), data="x"
    )
    typed = vars(make_parser().parse_args(as_arguments(config)))
    assert (
        TrainConfig(**{k: v for k, v in typed.items() if k not in ("preset", "resume")}) == config
    )
    assert vars(make_parser().parse_args(["--context", "9"]))["context_length"] == 9
    assert vars(make_parser().parse_args([])).keys() == {"preset", "resume"}


def test_the_preset_for_a_gpu_is_that_of_nanogpt():
    preset = PRESETS["shakespeare-char"]
    assert (preset.num_layers, preset.num_heads, preset.width) == (6, 6, 384)
    assert (preset.context_length, preset.batch_size, preset.steps) == (256, 64, 2000)
    assert (preset.learning_rate, preset.min_learning_rate) == (1e-3, 1e-4)
    assert (preset.warmup_steps, preset.beta2, preset.dropout_rate) == (100, 0.99, 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--context", "500"], "the validation split has 200 tokens"),
        (["--implementation", "no-such"], "no-such"),
        (["--num-heads", "3"], "num_heads (3) must divide width (32)"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--seed", "-1"], "seed must not be negative"),
        (["--learning-rate", "nan"], "learning_rate must be positive, got nan"),
        (["--beta2", "1"], "beta2 must be in [0, 1)"),
        (["--min-learning-rate", "1"], "must not exceed learning_rate"),
        (["--stop-at", "21"], "stop_at must be in [1, steps = 20]"),
        (["--resume"], "no checkpoint in"),
    ],
)
def test_the_command_answers_a_bad_argument_in_one_line(config, capsys, arguments, message):
    assert train.main([*as_arguments(config), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not Path(config.out).exists()


def test_an_option_that_does_not_exist_exits_with_two(capsys):
    with pytest.raises(SystemExit) as error:
        train.main(["--stepz", "3"])
    assert error.value.code == 2
    assert "--stepz" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_shape_and_its_text(config, straight, tmp_path, capsys):
    resume = ["--out", str(straight.out), "--resume"]
    assert train.main([*resume, "--width", "64"]) == 2
    assert "--width is 32 in the checkpoint and cannot become 64" in capsys.readouterr().err
    (tmp_path / "other.txt").write_text(TEXT + "!")
    assert train.main([*resume, "--data", str(tmp_path / "other.txt")]) == 2
    assert "is not the text that" in capsys.readouterr().err
    assert set(SHAPE_FIELDS) >= {"width", "num_layers", "context_length", "tie_weights"}


def test_progress_is_plain_lines_without_a_terminal_and_one_line_with(capsys, monkeypatch):
    progress = report.Progress(100, tokens_per_step=1000)
    for step, speed in ((10, None), (50, 500.0), (100, 500.0)):
        progress.update(step, 1.25, speed)
    assert capsys.readouterr().out.splitlines() == [
        "step  10/100  loss 1.2500",
        "step 100/100  loss 1.2500        500 tokens/s  ETA 0:00",
    ]
    progress.on_terminal = True
    progress.update(50, 1.0, 500.0)
    progress.say("done")
    printed = capsys.readouterr().out
    assert printed.startswith("\r[############............] step  50/100")
    assert "ETA 1:40" in printed
    assert printed.endswith("\rdone\n")


def test_a_log_cut_off_in_the_middle_of_a_line_is_still_read(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "train_loss": 2.0}\n{"step": 2, "tra')
    assert report.Log(tmp_path / "log.jsonl", resume_at=5).rows() == [
        {"step": 1, "train_loss": 2.0}
    ]


def test_the_help_has_a_line_for_every_field(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert all("--" + field.name.replace("_", "-") in text for field in dataclasses.fields(TINY))


several = pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")


@several
def test_devices_that_share_a_batch_learn_what_one_learns():
    batches = np.random.default_rng(0).integers(0, 9, (4, 8, 17)).astype(np.int32)
    results = []
    for count in (1, 2):
        config = dataclasses.replace(TINY, num_devices=count)  # dropout too
        one = trainer.Trainer(config, config.model(vocab_size=9, dtype="float32"))
        state, loss = one.train(one.new_state(), batches, np.int32(4))
        assert len(jax.tree.leaves(state["params"])[0].devices()) == count
        results.append((state["params"], loss, one.evaluate(state["params"], batches)))
    for alone, shared in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(alone, shared, rtol=1e-3, atol=2e-4)


@several
def test_a_run_on_two_devices_is_resumed_on_two_and_generates(config):
    config = dataclasses.replace(config, num_devices=2, steps=8, eval_interval=4)
    assert Run(dataclasses.replace(config, stop_at=4)).train()
    again = Run(config, resume=True)
    assert again.step == 4
    assert again.train()
    assert again.best_model().model.config == again.model_config


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, r"num_devices must divide batch_size \(8\), got 0"),
        (3, r"num_devices must divide batch_size \(8\), got 3"),
    ],
)
def test_devices_that_cannot_share_a_batch_are_refused(count, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, num_devices=count)


def test_more_devices_than_there_are_are_refused():
    config = dataclasses.replace(TINY, batch_size=512, num_devices=512)
    with pytest.raises(ValueError, match="num_devices is 512, and there are"):
        trainer.Trainer(config, config.model(vocab_size=9, dtype="float32"))
