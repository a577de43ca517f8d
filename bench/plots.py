"""The figures: each a function of runs (by the names of their files) that draws what they hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from bench import cases, ladder, memory, packed, panels, profile, serving, shakespeare, style, train
from bench.cases import Case
from bench.panels import Runs, StaleError
from bench.results import OURS, Run
from bench.style import BLACK, BLUE, GREY, SMALL, look

# Forward and backward.


def forward(runs: Runs) -> Figure:
    """Forward TFLOP/s beside the peers and the roof."""
    return _speed(runs["forward"], "fwd", "Forward")


def backward(runs: Runs) -> Figure:
    """Backward TFLOP/s beside the peers and the roof."""
    return _speed(runs["backward"], "bwd", "Backward")


def training(runs: Runs) -> Figure:
    """Forward and backward together, as a training step has them."""
    return _speed(runs["backward"], "fwd+bwd", "Forward and backward")


def _speed(run: Run, mode: str, title: str) -> Figure:
    grid = [case for case in cases.GRID if case.num_q_heads == case.num_kv_heads]
    found = panels.numbers(run, mode, "tflops")
    for case in grid:
        panels.need(found, [OURS], case.name)
    impls = style.in_order(found)
    highest = max(y for impl in impls for y in found[impl].values())
    highest = max(highest, run.meta.matmul_tflops or 0.0)
    head_dims = sorted({case.head_dim for case in grid})
    lengths = sorted({case.seq_len for case in grid})
    figure, axes = style.subplots(2, len(head_dims), 5.0, sharex=True, sharey=True)
    for row, is_causal in enumerate((False, True)):
        for column, head_dim in enumerate(head_dims):
            ax = axes[row, column]
            ax.set_title(f"D{head_dim}, {'causal' if is_causal else 'full'}")
            for i, impl in enumerate(impls):
                names = {
                    case.seq_len: case.name
                    for case in grid
                    if (case.head_dim, case.is_causal) == (head_dim, is_causal)
                }
                points = [(n, found[impl].get(names[n])) for n in lengths]
                panels.plot(ax, points, **look(impl, i).line, zorder=4 if impl == OURS else 3)
            _roof(ax, run)
            ax.margins(x=0.12)
            panels.lengths_axis(ax, lengths)
            if row == 1:
                ax.set_xlabel("tokens")
        axes[row, 0].set_ylabel("TFLOP/s")
        axes[row, 0].set_ylim(0, 1.08 * highest)
    handles = [
        *panels.handles(impls),
        Line2D([], [], color=BLACK, ls="--", lw=1, label="matrix product"),
    ]
    style.finish(figure, f"{title}, bf16, 16k tokens and 2048 columns in all", [run.meta], handles)
    return figure


def _roof(axes: Any, run: Run) -> None:
    """What a large matrix product reached in the same run."""
    if run.meta.matmul_tflops is not None:
        axes.axhline(run.meta.matmul_tflops, color=BLACK, ls="--", lw=1, zorder=2)


def _bytes(case: Case, arrays: int) -> float:
    """Of so many arrays of the size of query and output, or of key and value in equal parts."""
    q, k, _ = (2 * math.prod(shape) for shape in case.shapes)
    return arrays / 2 * (q + k)


def roofline(runs: Runs) -> Figure:
    """Each kernel's point below the measured roofs, by operations for each byte that must move."""
    run = runs["forward"]
    peak, bandwidth = run.meta.matmul_tflops, run.meta.read_gbps
    if peak is None or bandwidth is None:
        raise StaleError("its meta has no ceilings")
    figure, axes = style.subplots(1, 1, 4.2)
    ax = axes[0, 0]
    handles, points = [], []
    for label, look_, xy in _points_of_roofline(runs):
        if not xy:
            raise StaleError(f"{label}: none of the cases of today")
        handles += ax.plot(*zip(*xy, strict=True), ls="", label=label, **look_)
        points += xy
    first, last = min(x for x, _ in points) / 3, max(x for x, _ in points) * 3
    lowest = min(*(y for _, y in points), first * bandwidth / 1e3) / 1.5
    ax.set(xscale="log", yscale="log", xlim=(first, last), ylim=(lowest, 1.7 * peak))
    ax.set(xlabel="FLOP for each byte of the arrays", ylabel="TFLOP/s")
    ax.grid(visible=False, axis="y")  # a line of the grid would cross the words on the roof
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ridge, slope = peak / bandwidth * 1e3, bandwidth / 1e3
    ax.plot([first, ridge, last], [first * slope, peak, peak], color=BLACK, lw=1.2, zorder=2)
    roof = f"matrix product: {peak:.0f} TFLOP/s"
    ax.text(ridge, 1.06 * peak, roof, ha="right", fontsize=10)  # left of it is no point
    above = 1.35 * slope  # a line parallel to the roof
    ax.text(
        *(1.2 * first, 1.2 * first * above, f"reads: {bandwidth / 1e3:.2f} TB/s"),
        rotation=math.degrees(math.atan(above)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=10,
    )
    metas = [runs[name].meta for name in runs]
    style.finish(figure, "Roofline: what each kernel reaches", metas, handles, names=[*runs])
    return figure


def _points_of_roofline(runs: Runs) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """A label, how it looks and (FLOP for each byte, TFLOP/s) of the cases of each kernel."""
    by_name = {case.name: case for case in (*cases.GRID, *cases.OTHERS)}
    for name, mode, arrays, marker, color in (
        ("forward", "fwd", 4, "o", BLUE),
        ("backward", "bwd", 8, "s", style.ORANGE),
    ):
        if name not in runs:
            continue
        found = panels.numbers(runs[name], mode, "tflops").get(OURS, {})
        known = [(by_name[case], y) for case, y in found.items() if case in by_name]
        for is_causal in (False, True):
            xy = [
                (case.flops(mode) / _bytes(case, arrays), y)
                for case, y in known
                if case.is_causal == is_causal
            ]
            label = f"{name}, {'causal' if is_causal else 'full'}"
            fill = {} if is_causal else {"mfc": "white", "mew": 1.6}
            yield label, {"marker": marker, "color": color, **fill}, xy
    if "ladder" in runs:
        case = Case(4, 4096, 16, 16, 128, True)
        found = panels.numbers(runs["ladder"], "fwd", "tflops")
        steps = [found.get(ladder.impl(n), {}).get(case.name) for n in range(1, 7)]
        x = case.flops("fwd") / _bytes(case, 4)
        xy = [(x, y) for y in steps if y is not None]
        yield "steps 1 to 6 of the ladder", {"marker": "D", "color": style.PURPLE}, xy
    if "decode" in runs:
        found = panels.numbers(runs["decode"], "decode warm", "gbps").get(
            "jax_flash.cuda page16", {}
        )
        group = 4  # query heads that share a key head: 2 * 2 operations for each, on 2 * 2 bytes
        xy = [(group, y * group / 1e3) for case, y in found.items() if case.endswith("D128 bf16")]
        yield "decode, warm", {"marker": "^", "color": style.GREEN}, xy


# The ladder.


def _ladder_impls(run: Run) -> list[str]:
    impls = [ladder.impl(number) for number in range(1, 8)]
    found = panels.numbers(run, "fwd", "time_us")
    if missing := [impl for impl in impls if impl not in found]:
        raise StaleError(f"it has no figure of {missing[0]!r}")
    return impls


def _step_label(number: int) -> str:
    name = ladder.impl(number).partition(" ")[2]
    return name or f"{number} jax_flash"


def ladder_latency(runs: Runs) -> Figure:
    """Time of every step of the ladder against the length of the sequence."""
    run = runs["ladder"]
    impls = _ladder_impls(run)
    found = panels.numbers(run, "fwd", "time_us")
    figure, axes = style.subplots(1, 2, 3.9, sharey=True)
    colors = (BLACK, GREY, style.YELLOW, style.ORANGE, style.PURPLE, style.GREEN, BLUE)
    handles: list[Any] = []
    for ax, head_dim in zip(axes[0], (64, 128), strict=True):
        chosen = [case for case in ladder.CASES if case.head_dim == head_dim and case.is_causal]
        lines = []
        for number, (impl, color) in enumerate(zip(impls, colors, strict=True), 1):
            points = [(case.seq_len, found[impl].get(case.name)) for case in chosen]
            lines += panels.plot(
                ax,
                points,
                1e-3,
                color=color,
                marker="os^vDPX"[number - 1],
                label=_step_label(number),
                lw=2.4 if impl == OURS else 1.6,
            )
        handles = handles or lines
        ax.set(title=f"D{head_dim}, causal", yscale="log", xlabel="tokens of a sequence")
        panels.lengths_axis(ax, [case.seq_len for case in chosen])
    axes[0, 0].set_ylabel("ms")
    axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    title = "The ladder: 16k tokens and 2048 columns in all, bf16"
    style.finish(figure, title, [run.meta], handles, columns=3)
    return figure


def ladder_steps(runs: Runs) -> Figure:
    """TFLOP/s of every step at 4k tokens, beside the roof."""
    run = runs["ladder"]
    impls = _ladder_impls(run)
    found = panels.numbers(run, "fwd", "tflops")
    figure, axes = style.subplots(1, 2, 3.3, sharey=True)
    for ax, head_dim in zip(axes[0], (64, 128), strict=True):
        (case,) = (
            case
            for case in ladder.CASES
            if (case.head_dim, case.seq_len, case.is_causal) == (head_dim, 4096, True)
        )
        panels.need(found, impls, case.name)
        values = [found[impl][case.name] for impl in impls]
        peak = run.meta.matmul_tflops
        texts = [f"{v:.0f}" + (f" ({100 * v / peak:.0f} %)" if peak else "") for v in values]
        bars = {
            _step_label(n): (value, BLUE if impl == OURS else style.SKY)
            for n, (impl, value) in enumerate(zip(impls, values, strict=True), 1)
        }
        panels.bars(ax, bars, texts, room=0.55)
        ax.set(title=f"D{head_dim}, causal, 4k tokens", xlabel="TFLOP/s")
    axes[0, 0].invert_yaxis()
    style.finish(figure, "The ladder, and its part of the matrix-product ceiling", [run.meta])
    return figure


_KERNEL_LABELS = {
    "ladder_naive_scores": "1 naive: scores",
    "ladder_naive_softmax": "1 naive: softmax",
    "ladder_naive_values": "1 naive: values",
    "ladder_flashattention_1": "2 FlashAttention-1",
    "ladder_flashattention_2": "3 FlashAttention-2",
    "ladder_causal_pruning": "4 causal pruning",
    "ladder_swizzle": "5 swizzle",
    "ladder_ring": "6 ring",
    "jax_flash_forward": "7 jax_flash",
}


def counters(runs: Runs) -> Figure:
    """Hardware counters of every step of the ladder."""
    run = runs["profile"]
    shown = ("tensor pipe", "DRAM", "L2", "bank conflicts", "occupancy", "clock")
    amounts = {name: panels.numbers(run, name, "amount") for name in shown}
    figure, axes = style.subplots(2, 3, 5.2, sharey=True)
    for ax, name in zip(axes.flat, shown, strict=True):
        unit, factor = profile.COUNTERS[name].unit, 1.0
        if name == "bank conflicts":
            unit, factor = "million", 1e-6
        elif unit == "GB/s":
            unit, factor = "TB/s", 1e-3
        bars = {}
        for kernel, label in _KERNEL_LABELS.items():
            case = next(iter(amounts[name].get(kernel, {})), None)
            if case is None:
                raise StaleError(f"it has no {name!r} of {kernel!r}")
            color = BLUE if kernel == "jax_flash_forward" else style.SKY
            bars[label] = amounts[name][kernel][case] * factor, color
        texts = (f"{v:.3g}" if v == 0 or v >= 0.01 else "< 0.01" for v, _ in bars.values())
        panels.bars(ax, bars, texts, room=0.3, font_size=SMALL)
        ax.set_title(f"{name}, {unit}")
    axes[0, 0].invert_yaxis()
    style.finish(figure, f"Counters of the ladder, {profile.CASE.name}", [run.meta])
    return figure


# Memory, training, decoding, serving.

_CROSS = {"marker": "x", "ls": "", "mew": 2, "ms": 9}
_BYTES_OF_TOKEN = 2 * 8 * 128 * 2  # key and value, 8 heads, D128, bf16


def memory_scaling(runs: Runs) -> Figure:
    """Peak device memory against the length; a cross is what XLA planned where it did not fit."""
    run = runs["memory"]
    figure, axes = style.subplots(1, 2, 3.9, sharey=True)
    lengths = [case.seq_len for case in memory.CASES]
    impls = style.in_order(panels.numbers(run, "fwd", "amount"))
    for ax, mode in zip(axes[0], memory.MODES, strict=True):
        found = panels.numbers(run, mode, "amount")
        planned = panels.numbers(run, f"{mode} planned", "amount")
        panels.need(found, [OURS], memory.CASES[0].name)
        missed = {
            (row.impl, row.case)
            for row in run.rows
            if row.mode == mode and row.note == memory.OUT_OF_MEMORY
        }
        for i, impl in enumerate(impls):
            points = [(case.seq_len, found[impl].get(case.name)) for case in memory.CASES]
            panels.plot(ax, points, 2**-30, **look(impl, i).line)
            gone = [case for case in memory.CASES if (impl, case.name) in missed]
            for case in gone:
                panels.need(planned, [impl], case.name)
            points = [(case.seq_len, planned[impl][case.name]) for case in gone]
            width = 6 - 2 * i  # thinner over thicker: several may plan the same
            panels.plot(ax, points, 2**-30, **_CROSS | {"color": look(impl, i).color, "mew": width})
        ax.set(title=mode.replace("_", " "), yscale="log", xlabel="tokens")
        panels.lengths_axis(ax, lengths)
    axes[0, 0].set_ylabel("peak, GiB")
    axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    cross = Line2D([], [], color=BLACK, label="planned, out of memory", **_CROSS)
    style.finish(figure, "Device memory, B1 H16 D128 causal, bf16", [run.meta],
                 [*panels.handles(impls), cross])  # fmt: skip
    return figure


def train_step(runs: Runs) -> Figure:
    """Tokens per second and peak memory of whole training steps."""
    run = runs["train"]
    speed, size = (panels.numbers(run, mode, "amount") for mode in ("step", "memory"))
    names = [shape.name for shape in train.SHAPES]
    figure, axes = style.subplots(2, len(names), 4.6, sharey="row")
    impls = [impl for impl in style.LOOKS if impl in train.IMPLEMENTATIONS]
    for column, name in enumerate(names):
        panels.need(speed, [OURS], name)
        title, _, rest = name.partition(" B")
        for row, (found, factor, unit) in enumerate(
            ((speed, 1e-6, "million tokens/s"), (size, 2**-30, "peak, GiB"))
        ):
            ax = axes[row, column]
            shown = [impl for impl in impls if name in found.get(impl, {})]
            bars = {look(i).label: (found[i][name] * factor, look(i).color) for i in shown}
            panels.bars(ax, bars, (panels.digits(v) for v, _ in bars.values()), room=0.2)
            ax.set_xlabel(unit)
            if row == 0:
                ax.set_title(f"{title}\nB{rest.removesuffix(' causal bf16')}")
    for ax in axes[:, 0]:
        ax.invert_yaxis()
    style.finish(figure, "Training steps, bf16, parameters and AdamW in fp32", [run.meta])
    return figure


def training_curve(runs: Runs) -> Figure:
    """Validation loss of training runs, against seconds since their start and against steps."""
    run = runs["shakespeare"]
    curves = shakespeare.curves(run)
    if not curves:
        raise StaleError("it has no losses")
    colors = (BLUE, "o"), (style.ORANGE, "s"), (style.GREEN, "^")
    looks = dict(zip(curves, colors[: len(curves)], strict=True))
    figure, axes = style.subplots(1, 2, 3.7, sharey=True, width_ratios=(3, 2))
    for ax, of, unit in zip(
        axes[0], ("seconds", "step"), ("seconds since the start", "steps"), strict=True
    ):
        ax.axhline(shakespeare.PUBLISHED_LOSS, color=BLACK, ls="--", lw=1, zorder=2)
        panels.losses(ax, looks, of)
        ax.set_xlabel(unit)
    axes[0, 0].set_ylabel("validation loss, nats")
    label = f" nanoGPT: {shakespeare.PUBLISHED_LOSS}"  # where programs are still compiled
    axes[0, 0].text(0, shakespeare.PUBLISHED_LOSS, label, va="bottom", fontsize=10)
    handles = [
        Line2D([], [], color=color, marker=marker, label=panels.best_of(curve))
        for curve, (color, marker) in looks.items()
    ]
    title = f"MiniGPT, preset {shakespeare.PRESET}: loss on what it does not train on"
    style.finish(figure, title, [run.meta], handles, columns=1)
    return figure


_WAYS = {
    OURS: "jax_flash, packed",
    "fa3": "FlashAttention-3, packed",
    f"{OURS} padded": "jax_flash, padded",
    "cudnn padded": "cuDNN, padded",
    "cudnn mask": "cuDNN, mask",
}


def documents(runs: Runs) -> Figure:
    """Tokens per second of documents, packed, padded and masked."""
    run = runs["packed"]
    figure, axes = style.subplots(1, 2, 2.9, sharey=True)
    for ax, mode in zip(axes[0], packed.MODES, strict=True):
        found = panels.numbers(run, mode, "amount")
        panels.need(found, [OURS], packed.CASE.name)
        bars = {
            label: (
                found.get(way, {}).get(packed.CASE.name, 0.0) / 1e6,
                look(way.partition(" ")[0]).color,
            )
            for way, label in _WAYS.items()
        }
        panels.bars(ax, bars, (panels.digits(v) for v, _ in bars.values()), room=0.25)
        ax.set(title=mode, xlabel="million tokens/s")
    axes[0, 0].invert_yaxis()
    title = "64 documents, 64k tokens in all, H16 D128 causal, bf16"
    style.finish(figure, title, [run.meta])
    return figure


def decode(runs: Runs) -> Figure:
    """Latency and bandwidth of decoding against context, for one sequence and for 64."""
    run = runs["decode"]
    times = panels.numbers(run, "program warm", "time_us")
    rates: dict[str, dict[str, float]] = {impl: {} for impl in times}
    sizes: dict[int, dict[int, str]] = {}
    for impl in times:
        for case, time_us in times[impl].items():
            match = re.fullmatch(r"B(\d+) S(\d+) H32/8 D128 bf16", case)
            if match is None or int(match[2]).bit_count() != 1:
                continue
            batch, length = int(match[1]), int(match[2])
            sizes.setdefault(batch, {})[length] = case
            rates[impl][case] = batch * length * _BYTES_OF_TOKEN / time_us / 1e6
    if not {1, 64} <= sizes.keys():
        raise StaleError("it has no contexts of one sequence and of 64")
    impls = [
        impl
        for impl in style.in_order(times)
        if impl in style.LOOKS  # no variants of ours besides those
        and any(case in times[impl] for batch in (1, 64) for case in sizes[batch].values())
    ]
    figure, axes = style.subplots(2, 2, 5.2, sharex="col", sharey="row")
    for column, batch in enumerate((1, 64)):
        lengths = sorted(sizes[batch])
        for row, found in enumerate((times, rates)):
            ax = axes[row, column]
            for i, impl in enumerate(impls):
                points = [(n, found[impl].get(sizes[batch][n])) for n in lengths]
                panels.plot(ax, points, **look(impl, i).line)
            panels.lengths_axis(ax, lengths)
        axes[0, column].set(yscale="log", title=f"B{batch}")
        axes[1, column].set_xlabel("tokens of a context")
        if run.meta.read_gbps is not None:
            axes[1, column].axhline(run.meta.read_gbps / 1e3, color=BLACK, ls="--", lw=1)
        axes[1, column].set_ylim(0)
    axes[0, 0].set_ylabel("µs, a call in a program")
    axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes[1, 0].set_ylabel("TB/s")
    handles = [*panels.handles(impls), Line2D([], [], color=BLACK, ls="--", lw=1, label="reads")]
    style.finish(figure, "Decoding one token, H32/8 D128, bf16", [run.meta], handles, columns=3)
    return figure


_SERVERS = {
    serving.ENGINE: ("jax_flash, pages", BLUE),
    "flax loop cudnn": ("contiguous, cuDNN", style.PURPLE),
    "flax loop xla": ("contiguous, XLA", GREY),
}


def served(runs: Runs) -> Figure:
    """Tokens per second, texts at once and empty slots, from pages and from contiguous rows."""
    run, (mix,) = runs["serving"], serving.MIXES
    asked = {row.impl for row in run.rows}
    servers = {impl: shown for impl, shown in _SERVERS.items() if impl in asked}
    figure, axes = style.subplots(1, 3, 2.6, sharey=True)
    for ax, (mode, factor, unit) in zip(
        axes[0],
        (
            ("serve", 1e-3, "thousand tokens/s"),
            ("running", 1.0, "texts at once"),
            ("waste", 1.0, "empty slots, %"),
        ),
        strict=True,
    ):
        found = panels.numbers(run, mode, "amount")
        panels.need(found, [serving.ENGINE], mix.name)
        values = [found.get(impl, {}).get(mix.name, 0.0) * factor for impl in servers]
        bars = {
            label: (value, color)
            for (label, color), value in zip(servers.values(), values, strict=True)
        }
        panels.bars(ax, bars, map(panels.digits, values), room=0.35)
        ax.set_xlabel(unit)
    axes[0, 0].invert_yaxis()
    title = f"{mix.title}: {mix.num_requests} requests in the memory of {mix.rows} longest rows"
    style.finish(figure, title, [run.meta])
    return figure


# {name: (result files that it needs, those that it also shows if they are there, what draws it)}
FIGURES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Runs], Figure]]] = {
    "forward": (("forward",), (), forward),
    "backward": (("backward",), (), backward),
    "training": (("backward",), (), training),
    "roofline": (("forward",), ("backward", "decode", "ladder"), roofline),
    "ladder_latency": (("ladder",), (), ladder_latency),
    "ladder_steps": (("ladder",), (), ladder_steps),
    "counters": (("profile",), (), counters),
    "memory": (("memory",), (), memory_scaling),
    "packed": (("packed",), (), documents),
    "train_step": (("train",), (), train_step),
    "training_curve": (("shakespeare",), (), training_curve),
    "decode": (("decode",), (), decode),
    "serving": (("serving",), (), served),
}
