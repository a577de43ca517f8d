"""Training a MiniGPT on characters: `python -m models.train --preset shakespeare-char`.

A run lives in a folder: checkpoints in `latest/` and `best/`, `log.jsonl`, `loss.png`, the tokens.
Ctrl-C saves and leaves; `--resume` goes on from there as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import models
from models import checkpoint, data, report
from models.generate import generate_text
from models.minigpt import num_parameters
from models.settings import PRESETS, TrainConfig, make_parser, override_resumed
from models.trainer import Trainer

SAMPLE_PROMPT = "ROMEO:"
SAMPLE_LENGTH = 300
INTERRUPTED = 128 + signal.SIGINT

Say = Callable[[str], None]


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into `requested`; the second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._previous = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        self.requested = True
        self.__exit__()


class _Saver:
    """Saves while training goes on, one checkpoint after another; at the end all are there."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._saves: list[Future[None]] = []

    def __enter__(self) -> _Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._raise_errors()

    def submit(self, save: Callable[..., None], *arguments: Any) -> None:
        """Calls `save(*arguments)` soon; raises what an earlier call raised."""
        self._raise_errors()
        self._saves.append(self._pool.submit(save, *arguments))

    def _raise_errors(self) -> None:
        while self._saves and self._saves[0].done():
            self._saves.pop(0).result()


class Run:
    """A training run, ready to go: whatever is wrong with its settings is wrong at construction."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        resume: bool = False,
        say: Say = print,
        began: float | None = None,
    ) -> None:
        """Finds the text, builds the model, and starts a run folder or goes on with one.

        Args:
            config: the settings; to resume, those of the checkpoint, possibly overridden.
            resume: go on from the folder's latest checkpoint.
            say: prints one line.
            began: when the run began, as `time.monotonic` counts; None: now. The log's `elapsed_s`
                counts from then.

        Raises:
            ValueError, TypeError, NotImplementedError, OSError: the settings cannot work.
        """
        self.began = time.monotonic() if began is None else began
        self.config = config
        self.out = Path(config.out)
        record = checkpoint.load_record(self.out / "latest") if resume else None

        self.text = data.load_text(config.data, say)
        if record is not None and record.text_sha256 != self.text.sha256:
            raise ValueError(
                f"{self.text.source} is not the text that {self.out} was trained on; pass that one "
                "with --data PATH, or start a new run with --out"
            )
        corpus = data.Corpus.from_text(self.text.content)
        corpus.check(config.context_length)
        default = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        dtype = default if config.dtype == "auto" else config.dtype
        self.model_config = config.model(corpus.tokenizer.vocab_size, dtype)
        self.trainer = Trainer(config, self.model_config)

        self.best_loss: float | None = None
        self.val_loss: float | None = None
        if record is None:
            _move_aside(self.out, say)
        # Meanwhile the state is made, the text is prepared, and so on.
        self.compiled = self.trainer.compile_ahead()
        if record is None:
            self.state = self.trainer.new_state()
            self.step = 0
        else:
            state = checkpoint.load_state(self.out / "latest", self.trainer.state_shapes)
            self.state = jax.device_put(state, self.trainer.state_sharding)
            self.step = record.step
            self.best_loss, self.val_loss = record.best_loss, record.val_loss
        self.end = config.steps if config.stop_at is None else config.stop_at
        self.corpus = corpus.memory_mapped(self.out)
        self.val_batches = data.validation_batches(
            self.corpus.validation,
            num_batches=config.eval_batches,
            batch_size=config.batch_size,
            context_length=config.context_length,
        )
        self.log = report.Log(self.out / "log.jsonl", resume_at=self.step if resume else None)

    def train(self) -> bool:
        """Trains to the end (`steps` or `stop_at`); False if Ctrl-C came first.

        Raises:
            FloatingPointError: the loss is not finite. The checkpoints are from before that.
        """
        self._write(run=self._circumstances())
        tokens_per_step = self.config.batch_size * self.config.context_length
        self.progress = report.Progress(self.end, tokens_per_step)
        self.timed_tokens = 0
        self.timed_seconds: float | None = None  # the first call loads the program: it is not timed
        with StopRequest() as stop, _Saver() as self.saver:
            for program in self.compiled:
                program.result()
            if self.step == 0:
                self._validate()
            while self.step < self.end and not stop.requested:
                self._train_steps()
                if self.step == self.end or self.step % self.config.eval_interval == 0:
                    self._validate()
                    self._save("latest")
            if stop.requested:
                self._save("latest")
        return not stop.requested

    def draw(self) -> str:
        """Draws the loss curve; returns its path, or why there is none."""
        model = self.model_config
        title = f"MiniGPT, {model.num_layers} layers, {model.width} wide, on {self.text.name}"
        if report.draw_losses(self.log.rows(), self.out / "loss.png", title):
            return str(self.out / "loss.png")
        return "none: Matplotlib is not installed"

    @property
    def tokens_per_second(self) -> float | None:
        """Training speed, compilation and validation left out; None before it can be known."""
        return self.timed_tokens / self.timed_seconds if self.timed_seconds else None

    def best_model(self) -> checkpoint.Loaded:
        """The model of the lowest validation loss so far."""
        return checkpoint.load_model(self.out, self.model_config.dtype)

    def _train_steps(self) -> None:
        """One call into the compiled program: up to `steps_per_dispatch` steps."""
        config = self.config
        to_validation = config.eval_interval - self.step % config.eval_interval
        count = min(config.steps_per_dispatch, to_validation, self.end - self.step)
        shape = (config.steps_per_dispatch, config.batch_size, config.context_length + 1)
        batches = np.zeros(shape, np.int32)
        for index in range(count):
            batches[index] = data.training_batch(
                self.corpus.training,
                seed=config.seed,
                step=self.step + index,
                batch_size=config.batch_size,
                context_length=config.context_length,
            )
        began = time.monotonic()
        self.state, loss = self.trainer.train(self.state, batches, np.int32(count))
        loss = float(loss)
        if self.timed_seconds is None:
            self.timed_seconds = 0.0
        else:
            self.timed_seconds += time.monotonic() - began
            self.timed_tokens += count * config.batch_size * config.context_length
        self.step += count
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the training loss is {loss} at step {self.step}; the checkpoints in {self.out} "
                "are from before that. A lower --learning-rate or --clip-norm may help"
            )
        self._write(
            train_loss=loss,
            learning_rate=float(self.trainer.learning_rate(np.float32(self.step - 1))),
            tokens_per_second=self.tokens_per_second and round(self.tokens_per_second),
        )
        self.progress.update(self.step, loss, self.tokens_per_second)

    def _validate(self) -> None:
        """Measures the validation loss; the best parameters so far are kept."""
        self.val_loss = float(self.trainer.evaluate(self.state["params"], self.val_batches))
        self._write(val_loss=self.val_loss)
        self.progress.say(f"step {self.step}: validation loss {self.val_loss:.4f}")
        if self.best_loss is None or self.val_loss < self.best_loss:
            self.best_loss = self.val_loss
            self._save("best")

    def _save(self, name: str) -> None:
        record = checkpoint.Record(
            step=self.step,
            val_loss=self.val_loss,
            best_loss=self.best_loss,
            model=dataclasses.asdict(self.model_config),
            train=dataclasses.asdict(self.config),
            tokenizer=self.corpus.tokenizer.to_json(),
            text_sha256=self.text.sha256,
        )
        state = self.trainer.copy(self.state)
        optimizer = state["optimizer"] if name == "latest" else None
        self.saver.submit(checkpoint.save, self.out / name, record, state["params"], optimizer)

    def _write(self, **fields: Any) -> None:
        elapsed = round(time.monotonic() - self.began, 2)
        self.log.write(self.step, elapsed_s=elapsed, **fields)

    def _circumstances(self) -> dict[str, Any]:
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "text": self.text.source,
            "parameters": num_parameters(self.state["params"]),
            "settings": dataclasses.asdict(self.config),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, 1 if the loss became NaN, 2 for a bad argument, 130 for Ctrl-C.
    """
    typed = vars(make_parser().parse_args(arguments))
    preset, resume = PRESETS[typed.pop("preset")], typed.pop("resume")
    try:
        if resume:
            record = checkpoint.load_record(Path(typed.get("out", preset.out)) / "latest")
            config = override_resumed(TrainConfig.from_dict(record.train), typed)
        else:
            config = dataclasses.replace(preset, **typed)
        run = Run(config, resume=resume, began=models.IMPORTED_S)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        _introduce(run)
        finished = run.train()
        _conclude(run, finished)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the second one, or one during the sample
        print()
        return INTERRUPTED
    return 0 if finished else INTERRUPTED


def _introduce(run: Run) -> None:
    model = run.model_config
    print(
        f"MiniGPT: {num_parameters(run.state['params']):,} parameters, {model.num_layers} layers, "
        f"{model.num_heads} heads, {model.width} wide, context {model.context_length}, "
        f"{model.dtype} on {jax.devices()[0].device_kind}"
    )
    print(
        f"text:    {run.text.name}, {len(run.text.content):,} characters, {model.vocab_size} "
        f"different ones ({run.text.source})"
    )
    print(f"run:     {run.out}, steps {run.step} to {run.end} (Ctrl-C saves and leaves)")


def _conclude(run: Run, finished: bool) -> None:
    picture = run.draw()
    best = "not measured yet" if run.best_loss is None else f"{run.best_loss:.4f} (best)"
    if run.val_loss is not None and run.val_loss != run.best_loss:
        best += f", {run.val_loss:.4f} (last)"
    print()
    print(f"validation loss: {best}")
    if run.tokens_per_second:
        print(f"speed:           {run.tokens_per_second:,.0f} tokens/s")
    print(f"checkpoints:     {run.out / 'latest'} (to resume), {run.out / 'best'} (to generate)")
    print(f"log, picture:    {run.log.path}, {picture}")
    if not finished or run.end < run.config.steps:
        print(f"go on:           python -m models.train --out {run.out} --resume")
    if not finished:
        return
    loaded = run.best_model()
    prompt = SAMPLE_PROMPT if SAMPLE_PROMPT in run.text.content else ""
    print(f"more samples:    python -m models.generate {prompt!r} --checkpoint {run.out}")
    pieces = generate_text(loaded.model, loaded.tokenizer, prompt, SAMPLE_LENGTH, temperature=0.8)
    print("\n" + prompt + "".join(pieces))


def _move_aside(folder: Path, say: Say) -> None:
    """Renames a folder that holds an earlier run, so that a new one can never destroy it."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "log.jsonl").exists():
        raise ValueError(f"{folder} holds something that is not a run; choose another --out")
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    say(f"{folder} holds an earlier run: it is now {aside} (--resume would have gone on with it)")


if __name__ == "__main__":
    sys.exit(main())
