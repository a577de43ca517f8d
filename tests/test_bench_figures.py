"""Every figure is drawn from result files of the shape that the bench writes.

The numbers here are made up, and go to a temporary folder only.
"""

import argparse
import dataclasses
import re

import numpy as np
import pytest

from bench import (
    cases,
    decode,
    figures,
    ladder,
    memory,
    packed,
    profile,
    results,
    serving,
    shakespeare,
    train,
)
from bench.results import OURS, Meta, Row, Run

pytest.importorskip("matplotlib")
from bench import plots, style

META = Meta("NVIDIA H200", "580", "0.11.2", "13.0", "abc1234", "2026-11-29T21:00Z", 815.0, 4690.0)
PEERS = ("fa3", "tokamax", "cudnn", "xla")


def speed(modes):
    """ours, and peers a little slower; XLA fails where sequences are long."""
    for case in cases.GRID + cases.OTHERS:
        for mode in modes:
            best = 900 * case.seq_len / (case.seq_len + 600) * case.head_dim / (case.head_dim + 40)
            for i, impl in enumerate((OURS, *PEERS)):
                tflops = best * (0.2 if impl == "xla" else 1 - 0.07 * i)
                if impl == "xla" and case.seq_len > 8000:
                    yield Row(case.name, impl, mode, None, note="RefusedError: too large")
                    continue
                yield Row(case.name, impl, mode, case.flops(mode) / tflops / 1e6, tflops)


def ladder_rows():
    for case in ladder.CASES:
        for number in range(1, 8):
            tflops = (
                (25, 18, 180, 240, 300, 420, 690)[number - 1] * case.seq_len / (case.seq_len + 500)
            )
            impl = ladder.impl(number)
            yield Row(case.name, impl, "fwd", case.flops("fwd") / tflops / 1e6, tflops)
            yield Row(case.name, impl, "memory", None, amount=2.0**28, unit="bytes")


def memory_rows():
    for mode, factor in zip(memory.MODES, (1, 2.5), strict=True):
        for case in memory.CASES:
            for impl, power in ((OURS, 1), ("naive", 2), ("xla", 2)):
                size = factor * 2**14 * case.seq_len * (case.seq_len / 64) ** (power - 1)
                if size > 1.3e11:
                    yield Row(case.name, impl, mode, None, note=memory.OUT_OF_MEMORY)
                else:
                    yield Row(case.name, impl, mode, None, amount=size, unit="bytes")
                yield Row(case.name, impl, f"{mode} planned", None, amount=size, unit="bytes")


def train_rows():
    for shape, tokens in zip(train.SHAPES, (4e6, 4e5), strict=True):
        for impl, factor in ((OURS, 1.0), ("cudnn", 0.8), ("xla", 0.5)):
            amount = tokens * factor
            yield Row(shape.name, impl, "step", 1e10 / amount, amount=amount, unit="tokens/s")
            yield Row(shape.name, impl, "memory", None, amount=2**33 / factor, unit="bytes")


def packed_rows():
    for mode in packed.MODES:
        for impl, factor in zip(packed.WAYS, (1.0, 0.95, 0.9, 0.4, 0.02), strict=True):
            amount = factor * (3e7 if mode == "fwd" else 1e7)
            time_us = packed.CASE.seq_len / amount * 1e6
            yield Row(packed.CASE.name, impl, mode, time_us, amount=amount, unit="tokens/s")


def shakespeare_rows():
    """All fall fast and overfit, each one earlier."""
    kinds = (1.47, 6.5e-3), (1.44, 6e-3), (1.53, 5.5e-3)
    for case, (lowest, pace) in zip(shakespeare.RUNS, kinds, strict=True):
        for step in range(0, 5001, 250):
            loss = 4.2 if step == 0 else lowest + 0.7 * np.exp(-step / 500) + (step / 9000) ** 2
            at, time_us = f"{case}, step {step}", 1e6 * (18.0 + pace * step)
            for mode, amount in (("validation", loss), ("training", loss - step / 9000)):
                if step or mode == "validation":
                    yield Row(at, OURS, mode, time_us, amount=float(amount), unit="nats")
        yield Row(case, OURS, "step", 1e6 * pace, amount=16384 / pace, unit="tokens/s")
        yield Row(case, OURS, "command", 1e6 * (25.0 + pace * 5000))


def decode_rows():
    impls = ("jax_flash.cuda page16", "jax_flash.cuda page64", "cudnn", "flashinfer page16")
    for case in decode.CASES:
        for i, impl in enumerate(impls):
            for mode, overhead in (("decode warm", 2), ("program warm", 3)):
                time_us = overhead + case.cache_bytes / 4000e3 * (1 + 0.1 * i)
                gbps = None if i == 3 else case.cache_bytes / time_us / 1e3
                yield Row(case.name, impl, mode, time_us, gbps=gbps)


def serving_rows():
    (step,), (mix,) = serving.STEPS, serving.MIXES
    for mode, time_us in (("step", 300.0), ("dispatch", 200.0), ("kernels", 270.0)):
        yield Row(step.name, serving.ENGINE, mode, time_us, note="90 % of a step")
    for impl, factor in zip(serving.IMPLEMENTATIONS, (1.0, 8.0, 2.0), strict=True):
        is_ours = impl == serving.ENGINE
        yield Row(mix.name, impl, "serve", 8e6 / factor, amount=4e3 * factor, unit="tokens/s")
        amount = 82.9 if is_ours else 16.0
        yield Row(mix.name, impl, "running", None, amount=amount, unit="texts")
        yield Row(mix.name, impl, "waste", None, amount=3.3 if is_ours else 81.2, unit="%")
    for mode in ("first token p50", "between tokens p50", "between tokens p99"):
        yield Row(mix.name, serving.ENGINE, mode, 2500.0)


def profile_rows():
    for i, kernel in enumerate(sorted(profile.expected_kernels())):
        launch = dict.fromkeys(profile.COUNTERS, 7.0 * (i + 1))
        launch |= {"DRAM": 300.0 * i, "L2": 800.0 * i, "bank conflicts": 0.0, "clock": 1.7}
        yield from profile.rows_of([{"kernel": kernel, **launch}])


def all_rows():
    return {
        "forward": speed(["fwd"]),
        "backward": speed(["bwd", "fwd+bwd"]),
        "ladder": ladder_rows(),
        "memory": memory_rows(),
        "packed": packed_rows(),
        "train": train_rows(),
        "decode": decode_rows(),
        "serving": serving_rows(),
        "shakespeare": shakespeare_rows(),
        "profile": profile_rows(),
    }


@pytest.fixture
def folder(tmp_path):
    """Made-up result files of everything."""
    for name, rows in all_rows().items():
        results.write(tmp_path / f"results/{name}.json", Run(META, tuple(rows)))
    return tmp_path


def ran(folder, *arguments):
    parser = argparse.ArgumentParser()
    figures.add_arguments(parser)
    places = ["--results", str(folder / "results"), "--out", str(folder / "figures")]
    return figures.run(parser.parse_args([*places, *arguments]))


@pytest.mark.parametrize("name", plots.FIGURES)
def test_a_figure_is_drawn_and_legible(name, folder):
    assert ran(folder, name) == 0
    files = sorted((folder / "figures").iterdir())
    assert [path.name for path in files] == [f"{name}.png", f"{name}.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    runs = {x: results.read(folder / f"results/{x}.json") for x in all_rows()}
    needed, welcome, draw = plots.FIGURES[name]
    with style.applied():
        figure = draw({x: runs[x] for x in (*needed, *welcome)})
        figure.canvas.draw()
        texts = [t for t in figure.findobj(lambda x: hasattr(x, "get_fontsize")) if t.get_text()]
        assert min(text.get_fontsize() for text in texts) >= style.SMALL
        box = figure.get_tightbbox()  # of what is visible, in inches
        width, height = figure.get_size_inches()
        assert min(box.x0, box.y0) >= -0.02
        assert box.x1 <= width + 0.02
        assert box.y1 <= height + 0.02
    footer = figure.get_supxlabel()
    for part in ("NVIDIA H200", "JAX 0.11.2", "commit abc1234", "2026-11-29"):
        assert part in footer


def test_the_same_results_make_the_same_files(folder):
    ran(folder, "forward")
    before = [path.read_bytes() for path in sorted((folder / "figures").iterdir())]
    ran(folder, "forward")
    assert before == [path.read_bytes() for path in sorted((folder / "figures").iterdir())]


def test_a_missing_result_is_an_error_that_names_its_command(folder, capsys):
    for name in ("ladder", "profile"):
        (folder / f"results/{name}.json").unlink()
    assert ran(folder) == 1
    printed = capsys.readouterr()
    assert "figure ladder_steps: " in printed.err
    assert "python -m bench run ladder makes it" in printed.err
    assert "python -m bench profile makes it" in printed.err
    drawn = {path.stem for path in (folder / "figures").iterdir()}
    assert drawn == plots.FIGURES.keys() - {"ladder_steps", "ladder_latency", "counters"}


@pytest.mark.parametrize("name", plots.FIGURES)
def test_a_result_without_the_cases_of_today_is_an_error(name, folder, capsys):
    for path in (folder / "results").iterdir():
        row = Row("another case", OURS, "another mode", 1.0)
        results.write(path, Run(META, (row,)))
    assert ran(folder, name) == 1
    assert re.search(rf"figure {name}: .* makes it", capsys.readouterr().err)
    assert not list((folder / "figures").iterdir())


def test_what_must_not_be_believed_is_not_drawn(folder):
    path = folder / "results/forward.json"
    run = results.read(path)
    rows = [
        dataclasses.replace(row, note=results.INACCURATE) if row.impl == "fa3" else row
        for row in run.rows
        if row.impl != "tokamax" or " D64 " in row.case  # and nothing at all in some panels
    ]
    with style.applied():
        figure = plots.forward({"forward": Run(META, tuple(rows))})
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["jax_flash", "Tokamax", "cuDNN", "XLA", "matrix product"]
    wrong = [dataclasses.replace(row, note=results.INACCURATE) for row in run.rows]
    with pytest.raises(plots.StaleError, match="no figure of"):
        plots.forward({"forward": Run(META, tuple(wrong))})


def test_unknown_figures_are_refused(folder, capsys):
    assert ran(folder, "forward", "nothing") == 2
    assert "unknown figures ['nothing']" in capsys.readouterr().err


def test_points_of_the_roofline_are_where_they_belong():
    case = cases.Case(4, 4096, 16, 16, 128)
    assert case.flops("fwd") / plots._bytes(case, 4) == 4096 / 2
    grouped = cases.Case(4, 4096, 32, 8, 128)
    assert plots._bytes(grouped, 4) == 2 * 4 * 4096 * 128 * (2 * 32 + 2 * 8)
    assert plots._bytes(grouped, 8) == 2 * 4 * 4096 * 128 * (4 * 32 + 4 * 8)


def test_colours_differ_in_lightness_or_marker():
    looks = list(style.LOOKS.values())
    assert len({(look.color, look.marker) for look in looks}) >= len(looks) - 2
    assert np.all([re.fullmatch("#[0-9A-F]{6}|#[0-9a-f]{6}", look.color) for look in looks])


@pytest.mark.parametrize("path", sorted(figures.FIGURES.glob("*.png")), ids=lambda path: path.stem)
def test_what_is_committed_is_of_the_committed_results(path):
    """A figure says which run it shows; if that is not the committed one, it must be drawn anew."""
    needed, welcome, draw = plots.FIGURES[path.stem]
    found = {file.stem: results.read(file) for file in figures.RESULTS.glob("*.json")}
    with style.applied():
        footer = draw({x: found[x] for x in (*needed, *welcome) if x in found}).get_supxlabel()
    for line in footer.splitlines():
        assert line.encode() in path.read_bytes()
        assert line in path.with_suffix(".svg").read_text()
