"""The record of the last run on a GPU: its shape, that nothing failed, how old it is."""

import datetime
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bench import record

SOURCES = {"pallas_kernels/forward.py": "aa", "pallas_kernels/ops.py": "bb"}
GOOD = {
    "device": "NVIDIA H200",
    "driver": "580",
    "jax": "0.11.2",
    "cuda": "13.0",
    "commit": "abc1234",
    "date": "2026-11-29T21:00Z",
    "arguments": "-m gpu",
    "passed": 3,
    "failed": 1,
    "skipped": 0,
    "seconds": 1.5,
    "failures": ["tests.test_x::test_y"],
    "sources": SOURCES,
}


def test_the_record_says_what_ran_on_a_gpu(capsys):
    if not record.PATH.exists():
        pytest.skip("no record yet: python -m bench record writes it on a machine with a GPU")
    found = record.read()
    assert not found.failures, f"these failed on {found.device}: {found.failures}"
    assert found.passed > 0
    changed = found.changed(record.hashes())
    age = found.age_days(datetime.datetime.now(datetime.UTC))
    with capsys.disabled():
        print(
            f"\ntests on {found.device}, jax {found.jax}, CUDA {found.cuda}, {age:.0f} days ago "
            f"at {found.commit}: {found.passed} passed, {found.skipped} skipped "
            f"(pytest {found.arguments}); kernel sources changed since: "
            f"{', '.join(changed) or 'none'}",
            file=sys.stderr,  # pytest-xdist shows this one of its workers
        )


def written(folder, **changes):
    content = {key: value for key, value in (GOOD | changes).items() if value is not None}
    path = folder / "record.json"
    path.write_text(json.dumps(content))
    return path


def test_a_record_is_read_as_it_was_written(tmp_path):
    found = record.read(written(tmp_path))
    assert (found.device, found.passed, found.failures) == ("NVIDIA H200", 3, GOOD["failures"])
    then = datetime.datetime(2026, 12, 1, 9, tzinfo=datetime.UTC)
    assert found.age_days(then) == 1.5


def test_changed_new_and_missing_sources_are_named(tmp_path):
    found = record.read(written(tmp_path))
    assert found.changed(SOURCES) == []
    now = {"pallas_kernels/forward.py": "a0", "pallas_kernels/backward.py": "cc"}
    assert found.changed(now) == [
        "pallas_kernels/backward.py", "pallas_kernels/forward.py", "pallas_kernels/ops.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": None}, "no key 'device'"),
        ({"passed": "3"}, "passed must be int"),
        ({"failed": True}, "failed must be int"),
        ({"failed": 0}, "failed is 0"),
        ({"sources": {"a.py": 1}}, "sources must be"),
        ({"failures": [1]}, "failures must be"),
        ({"date": "2026-11-29T21:00"}, "time zone"),
        ({"colour": "red"}, "unknown keys"),
    ],
)
def test_a_record_of_another_shape_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        record.read(written(tmp_path, **changes))


def test_a_hash_depends_on_contents_and_name_only(tmp_path):
    for name in (
        "pallas_kernels/a.py",
        "cuda_ffi/csrc/b.cuh",
        "cuda_ffi/build/c.cu",
        "models/d.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    first = record.hashes(tmp_path)
    assert list(first) == ["cuda_ffi/csrc/b.cuh", "pallas_kernels/a.py"]
    (tmp_path / "pallas_kernels/a.py").touch()
    assert record.hashes(tmp_path) == first
    (tmp_path / "pallas_kernels/a.py").write_text("x = 2\n")
    assert record.hashes(tmp_path).keys() == first.keys()
    assert record.hashes(tmp_path) != first


def test_pytests_report_is_counted(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        """<testsuites><testsuite time="2.5">
        <testcase classname="tests.test_a" name="test_1"/>
        <testcase classname="tests.test_a" name="test_2"><skipped/></testcase>
        <testcase classname="tests.test_a" name="test_3"><failure/></testcase>
        <testcase classname="tests.test_a" name="test_3"><error/></testcase>
        </testsuite></testsuites>"""
    )
    assert record.counts(report) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "seconds": 2.5,
        "failures": ["tests.test_a::test_3"],
    }


def test_without_a_gpu_nothing_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(record, "_device", lambda: None)
    parser = record.argparse.ArgumentParser()
    record.add_arguments(parser)
    out = tmp_path / "record.json"
    assert record.run(parser.parse_args(["--out", str(out), "--", "-m", "gpu"])) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not out.exists()


def test_tests_that_run_are_recorded(tmp_path, monkeypatch, capfd):
    """A run of real tests, in a folder of their own."""
    (tmp_path / "test_two.py").write_text(
        "import os\n"
        "def test_good():\n    assert os.environ['JAX_FLASH_TEST_GPU'] == '1'\n"
        "def test_bad():\n    assert False\n"
    )
    address = {"device": "NVIDIA H200", "driver": "580", "jax": "0.11.2", "cuda": "13.0"}
    monkeypatch.setattr(record, "_device", lambda: address)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    parser = record.argparse.ArgumentParser()
    record.add_arguments(parser)
    out = tmp_path / "record.json"
    arguments = ["--out", str(out), "--commit", "abc1234", "--", "-p", "no:cacheprovider"]
    assert record.run(parser.parse_args(arguments)) == 1
    assert "written" in capfd.readouterr().out
    found = record.read(out)
    assert (found.passed, found.failed, found.commit) == (1, 1, "abc1234")
    assert found.failures == ["test_two::test_bad"]
    assert found.arguments == "-p no:cacheprovider"


def running(text):
    """The processes that are not zombies and have the text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode()
        except OSError:  # it has ended
            continue
        if text in command:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_leaves_no_worker_behind(tmp_path, number):
    """Not one that holds out against SIGTERM, as a compiler's thread would."""
    mark = str(tmp_path / "worker")
    (tmp_path / "test_slow.py").write_text(
        textwrap.dedent(
            f"""\
            import subprocess, sys, time

            def test_slow():
                code = (
                    "import pathlib, signal, sys, time;"
                    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                    "pathlib.Path(sys.argv[1]).touch();"
                    "time.sleep(100)"
                )
                subprocess.Popen([sys.executable, "-c", code, {mark!r}])
                time.sleep(100)
            """
        )
    )
    code = (
        "import argparse, pathlib, sys; from bench import record;"
        "record.ROOT = pathlib.Path(sys.argv[1]); record._device = dict;"
        "parser = argparse.ArgumentParser(); record.add_arguments(parser);"
        "sys.exit(record.run(parser.parse_args(sys.argv[2:])))"
    )
    out = tmp_path / "record.json"
    arguments = ["--out", str(out), "--commit", "abc1234", "--", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *arguments],
        cwd=record.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(lambda: os.path.exists(mark))
    assert running(mark)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    wait_for(lambda: not running(mark))
    assert not out.exists()


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
