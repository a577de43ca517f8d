"""``python -m bench all``: every suite, whatever happens to the one before it."""

import argparse
import subprocess
import types

import pytest

from bench import __main__ as command_line
from bench import cases, everything, run


@pytest.fixture
def commands(monkeypatch):
    """What is run; commands that have a word of ``failing`` in them fail."""
    ran, failing = [], set()

    def fake(command, **options):
        ran.append(command[3:])
        assert command[1:3] == ["-m", "bench"]
        return types.SimpleNamespace(returncode=int(bool(failing.intersection(command))))

    monkeypatch.setattr(subprocess, "run", fake)
    return types.SimpleNamespace(ran=ran, failing=failing)


def bench_all(*arguments):
    parser = argparse.ArgumentParser()
    everything.add_arguments(parser)
    return everything.run(parser.parse_args(arguments))


def test_every_suite_is_measured_and_then_shown(commands):
    assert command_line.COMMANDS["all"] is everything
    assert bench_all() == 0
    suites = [command[1] for command in commands.ran if command[0] == "run"]
    assert sorted(suites) == sorted([*cases.SUITES, *run.MODULES])
    assert [command[0] for command in commands.ran[-3:]] == ["profile", "figures", "report"]
    for name, *options in commands.ran:  # they are what the commands understand
        parser = argparse.ArgumentParser()
        command_line.COMMANDS[name].add_arguments(parser)
        parser.parse_args(options)


def test_a_failure_stops_nobody_and_is_told(commands, capsys):
    commands.failing.add("backward")
    assert bench_all("forward", "backward", "--commit", "abc") == 1
    assert [command[:2] for command in commands.ran] == [
        ["run", "forward"], ["run", "backward"], ["figures"], ["report", "--readme"],
    ]  # fmt: skip
    assert commands.ran[1][-2:] == ["--commit", "abc"]
    assert "failed, in part or as a whole: backward" in capsys.readouterr().err


def test_nothing_is_drawn_if_nothing_was_measured(commands, capsys):
    commands.failing.add("run")
    assert bench_all("forward", "memory") == 2
    assert len(commands.ran) == 2
    assert bench_all("foreword") == 2
    assert "unknown suites ['foreword']" in capsys.readouterr().err
