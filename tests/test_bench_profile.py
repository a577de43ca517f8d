"""What Nsight Compute prints becomes counters; what is not there is said."""

import argparse
import re
import subprocess
import sys

import jax
import pytest

from bench import profile, results
from pallas_kernels import ladder
from tests.gpu_bench import pretend

# As `ncu --csv --page raw --print-units base` prints it: lines of its own and of the program, then
# names, units and launches. The values are made up.
HEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
HEAD += ["Block Size", "Grid Size", "Device", "CC"]
UNITS = {
    "time": "ns",
    "tensor pipe": "%",
    "DRAM": "byte/second",
    "L2": "byte/s",
    "bank conflicts": "",
    "shared memory": "",
    "occupancy": "%",
    "registers": "register/thread",
    "spills": "sector",
    "clock": "hz",
}
VALUES = {
    "time": "1,234,567",
    "tensor pipe": "61.25",
    "DRAM": "2500000000000",
    "L2": "4,100,000,000,000.5",
    "bank conflicts": "0",
    "shared memory": "123,456",
    "occupancy": "n/a",
    "registers": "168",
    "spills": "1,000,000",
    "clock": "1755000000",
}


def output(*kernels, units=UNITS, values=VALUES):
    def line(*cells):
        return ",".join(f'"{cell}"' for cell in cells)

    names = [profile.COUNTERS[name].metric for name in UNITS]
    lines = [
        "==PROF== Connected to process 17 (/usr/bin/python3)",
        "a line of the program, with a comma",
        "==PROF== Disconnected from process 17",
        line(*HEAD, *sorted(names)),
    ]
    by_metric = {profile.COUNTERS[name].metric: name for name in UNITS}
    order = [by_metric[metric] for metric in sorted(names)]
    lines.append(line(*[""] * len(HEAD), *(units[name] for name in order)))
    for i, kernel in enumerate(kernels):
        about = [i, 17, "python3", "host", kernel, 1, 7, "(128, 1, 1)", "(64, 64, 1)", 0, "9.0"]
        lines.append(line(*about, *(values[name] for name in order)))
    return "\n".join(lines) + "\n"


def test_the_table_is_parsed_in_our_units():
    (launch,) = profile.parse(output("ladder_ring_mosaic_gpu_kernel"))
    assert launch["kernel"] == "ladder_ring"
    expected = {
        "time": 1234.567, "tensor pipe": 61.25, "DRAM": 2500.0, "L2": 4100.0, "bank conflicts": 0,
        "shared memory": 123456, "registers": 168, "spills": 32.0, "clock": 1.755,
    }  # fmt: skip
    assert {key: x for key, x in launch.items() if key != "kernel"} == pytest.approx(expected)


def test_older_words_for_units_mean_the_same():
    older = UNITS | {"time": "nsecond", "L2": "byte/second", "clock": "cycle/second"}
    assert profile.parse(output("a", units=older)) == profile.parse(output("a"))
    not_base = UNITS | {"time": "usecond", "clock": "cycle/nsecond"}
    values = VALUES | {"time": "1234.567", "clock": "1.755"}
    (launch,) = profile.parse(output("a", units=not_base, values=values))
    assert launch["time"] == pytest.approx(1234.567)
    assert launch["clock"] == pytest.approx(1.755)


def test_what_is_no_table_is_an_error():
    with pytest.raises(ValueError, match="no table in"):
        profile.parse("==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(ValueError, match="is in 'fortnight'"):
        profile.parse(output("a", units=UNITS | {"time": "fortnight"}))


def test_rows_are_those_of_the_first_launch_of_each_kernel():
    launches = profile.parse(output("ladder_ring", "decode_kernel"))
    launches += profile.parse(output("ladder_ring", values=VALUES | {"registers": "7"}))
    rows = {(row.impl, row.mode): row for row in profile.rows_of(launches)}
    assert len(rows) == 2 * len(profile.COUNTERS)
    assert rows["ladder_ring", "registers"].amount == 168
    assert rows["ladder_ring", "time"].time_us == 1234.57
    assert rows["ladder_ring", "time"].case == profile.CASE.name
    assert rows["decode_kernel", "time"].case.startswith("decode")
    occupancy = rows["ladder_ring", "occupancy"]
    assert occupancy.amount is None
    assert "sm__warps_active" in occupancy.note
    run = results.Run(None, tuple(rows.values()))
    assert re.search(r"ladder_ring +\| 1234.6 µs +\| 61.25 % ", profile.table(run))


def test_every_step_and_product_kernel_is_expected_and_asked_for():
    names = profile.expected_kernels()
    assert {"ladder_naive_softmax", "ladder_swizzle", "jax_flash_backward"} <= names
    assert len(names) == len(ladder.STAGES) - 1 + 3 + 2
    asked = profile.command("ncu", ["a", "b"])
    pattern = asked[asked.index("--kernel-name") + 1].removeprefix("regex:")
    assert all(re.search(pattern, name) for name in names)
    assert asked[asked.index("--clock-control") + 1] == "none"
    assert asked[asked.index("--metrics") + 1] == "a,b"
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), "bfloat16")
    for number, stage in ladder.STAGES.items():
        call = jax.jit(lambda x, n=number: ladder.attend(n, x, x, x))
        text = call.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert stage.kernel_name in text


def ran(*arguments):
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    return profile.run(parser.parse_args(arguments))


def test_without_nsight_compute_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(profile, "find_tool", lambda *_: None)
    assert ran() == 2
    assert "needs Nsight Compute" in capsys.readouterr().err
    assert ran("--ncu", "/nowhere/ncu") == 2
    assert "/nowhere/ncu is neither" in capsys.readouterr().err


def fake_ncu(tmp_path, text, status=0, unknown=None):
    """A program that prints what Nsight Compute would, and one metric of which it may not know."""
    (tmp_path / "text").write_text(text)
    path = tmp_path / "ncu"
    lines = [f"#!{sys.executable}", "import sys"]
    if unknown is not None:
        message = f"==ERROR== Failed to find metric {unknown}"
        lines += [
            f"if {unknown!r} in ' '.join(sys.argv):",
            f"    print({message!r})",
            "    exit(9)",
        ]
    lines += [f"print(open({str(tmp_path / 'text')!r}).read())", f"exit({status})"]
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return str(path)


def test_a_profile_is_written(tmp_path, monkeypatch, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    out = tmp_path / "profile.json"
    ncu = fake_ncu(tmp_path, output(*profile.expected_kernels()))
    assert ran("--ncu", ncu, "--out", str(out)) == 0
    found = results.read(out)
    assert {row.impl for row in found.rows} == profile.expected_kernels()
    assert found.meta.matmul_tflops == 800.0
    ncu = fake_ncu(tmp_path, output("ladder_ring"))
    assert ran("--ncu", ncu, "--out", str(out)) == 1
    assert "not profiled: jax_flash_backward" in capsys.readouterr().err
    ncu = fake_ncu(tmp_path, "==ERROR== ERR_NVGPUCTRPERM: no permission", status=1)
    assert ran("--ncu", ncu, "--out", str(out)) == 2
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().err


def test_a_metric_that_is_not_known_is_left_out(tmp_path, monkeypatch, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("a stand-in for a GPU needs a CPU")
    pretend(monkeypatch)
    out = tmp_path / "profile.json"
    values = VALUES | {"L2": "n/a"}
    text = output(*profile.expected_kernels(), values=values)
    ncu = fake_ncu(tmp_path, text, unknown=profile.COUNTERS["L2"].metric)
    assert ran("--ncu", ncu, "--out", str(out)) == 0
    assert "without lts__t_bytes" in capsys.readouterr().err
    notes = {row.mode: row.note for row in results.read(out).rows}
    assert "lts__t_bytes" in notes["L2"]
    assert notes["DRAM"] is None


def test_the_command_line():
    result = subprocess.run(
        [sys.executable, "-m", "bench", "profile", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--ncu" in result.stdout
