"""Result files: one shape, refused if it is another, and the table made of them."""

import json

import pytest

from bench import results
from bench.provenance import ROOT
from bench.results import OURS, Meta, Row, Run

META = Meta("NVIDIA H200", "580", "0.11.2", "13.0", "abc1234", "2026-11-29T21:00Z", 815.0, 4690.0)
ROWS = (
    Row("a", OURS, "fwd", 10.0, 500.0, None, 2e-3),
    Row("a", "fa3", "fwd", 20.0, 250.0, None, 2e-3),
    Row("a", "cudnn", "fwd", 40.0, 125.0, None, 2e-3),
    Row("b", OURS, "fwd", 10.0, 700.0, None, 2e-3),
    Row("b", "fa3", "fwd", 5.0, 1400.0, None, 2e-3),
    Row("b", "cudnn", "fwd", None, note="RefusedError: no"),
    Row("a", OURS, "dispatch", 40.9),
    Row("a", "fa3", "dispatch", 45.5),
)
RUN = Run(META, ROWS)


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new/forward.json"
    run = Run(Meta(**{**vars(META), "absent": {"fa4": "not installed"}}), ROWS)
    results.write(path, run)
    assert results.read(path) == run
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "bench/results").glob("*.json")), ids=lambda p: p.stem
)
def test_committed_files_have_the_one_shape(path):
    assert results.read(path).rows


def changed(where, key, value):
    content = {"meta": dict(vars(META)), "rows": [dict(vars(row)) for row in ROWS]}
    target = content if where is None else content[where] if where == "meta" else content["rows"][0]
    if value is KeyError:
        del target[key]
    else:
        target[key] = value
    return content


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        (None, "extra", 1, "keys meta and rows only"),
        (None, "rows", KeyError, "keys meta and rows only"),
        (None, "rows", {}, "rows must be a list"),
        (None, "rows", [1], r"rows\[0\] must be an object"),
        (None, "rows", [vars(ROWS[0])] * 2, "twice"),
        ("meta", "device", KeyError, "meta has no key 'device'"),
        ("meta", "jax", 11, "jax must be str"),
        ("meta", "absent", {"fa3": 1}, "absent must be"),
        ("rows", "case", None, r"rows\[0\]: case must be str"),
        ("rows", "time_us", "10", "time_us must be"),
        ("rows", "time_us", True, "time_us must be"),
        ("rows", "time_us", KeyError, "no key 'time_us'"),
        ("rows", "time_us", None, "no note that says why"),
        ("rows", "time_us", -1.0, "not negative"),
        ("rows", "tflops", float("inf"), "must be finite"),
        ("rows", "error", float("nan"), "must be finite"),
        ("rows", "colour", "red", "unknown keys"),
        ("rows", "amount", 5.0, "amount and unit, or neither"),
        ("rows", "unit", "bytes", "amount and unit, or neither"),
        ("rows", "amount", "5", "amount must be"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path, where, key, value, message):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(changed(where, key, value)))
    with pytest.raises(ValueError, match=message) as error:
        results.read(path)
    assert str(path) in str(error.value)


def test_what_is_not_json_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"meta": ')
    with pytest.raises(ValueError, match="not JSON"):
        results.read(path)


def test_a_run_that_could_not_be_read_is_not_written(tmp_path):
    path = tmp_path / "x.json"
    results.write(path, RUN)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="twice"):
        results.write(path, Run(META, (ROWS[0], ROWS[0])))
    assert path.read_bytes() == before


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_compares_ours_with_each_peer():
    lines = results.table(RUN, "fwd", groups={"b only": {"b"}}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cells(line) for line in lines if not line.startswith("|-")] == [
        ["case", OURS, "fa3", "cudnn", "best peer"],
        ["a", "500", "250 (2.00×)", "125 (4.00×)", "2.00×"],
        ["b", "700", "1400 (0.50×)", "–", "0.50×"],
        ["geometric mean, all cases", "", "1.000×", "4.000×", "1.000×"],
        ["worst, all cases", "", "0.500×", "4.000×", "0.500×"],
    ]


def test_rows_without_flops_show_their_time():
    table = results.table(RUN, "dispatch").splitlines()
    assert cells(table[2]) == ["a", "40.9 µs", "45.5 µs (1.11×)", "1.11×"]
    assert len(table) == 3  # one case has no mean


def test_a_row_may_have_an_amount_instead_of_a_time(tmp_path):
    rows = (
        Row("S512", OURS, "fwd", None, amount=3 * 2.0**20, unit="bytes"),
        Row("S512", "xla", "fwd", None, amount=2.0**31, unit="bytes"),
        Row("S1024", OURS, "fwd", None, amount=2.0**30, unit="bytes"),
        Row("S1024", "xla", "fwd", None, note="out of memory"),
        Row("train", OURS, "step", 2000.0, amount=123456.0, unit="tokens/s"),
        Row("train", "xla", "step", 3000.0, amount=82304.0, unit="tokens/s"),
    )
    path = tmp_path / "memory.json"
    results.write(path, Run(META, rows))
    found = results.read(path)
    assert found.rows == rows
    memory = results.table(found, "fwd").splitlines()
    assert cells(memory[2]) == ["S512", "0.003 GiB", "2.000 GiB", "–"]
    assert cells(memory[3]) == ["S1024", "1.000 GiB", "–", "–"]
    assert len(memory) == 4
    step = results.table(found, "step").splitlines()
    assert cells(step[2]) == ["train", "1.235e+05 tokens/s", "8.23e+04 tokens/s (1.50×)", "1.50×"]


def test_a_wrong_result_has_no_speed_and_is_compared_with_nothing():
    wrong = {"note": results.INACCURATE}
    rows = (
        *ROWS,
        Row("c", OURS, "fwd", 10.0, 700.0, error=2e-3),
        Row("c", "fa3", "fwd", 5.0, 1400.0, error=0.3, **wrong),
        Row("c", "cudnn", "fwd", 30.0, 233.0, error=2e-3),
        Row("d", OURS, "fwd", 1.0, 7000.0, error=0.3, **wrong),
        Row("d", "fa3", "fwd", 5.0, 1400.0, error=2e-3),
    )
    lines = [cells(line) for line in results.table(Run(META, rows), "fwd").splitlines()]
    assert lines[4:] == [
        ["c", "700", "(!)", "233 (3.00×)", "3.00×"],
        ["d", "(!)", "1400", "–", "–"],
        ["geometric mean, all cases", "", "1.000×", "3.464×", "1.442×"],
        ["worst, all cases", "", "0.500×", "3.000×", "0.500×"],
    ]
    assert Run(META, rows).times("fwd")["c"].keys() == {OURS, "cudnn"}


def test_a_table_without_ours_has_no_ratios():
    rows = tuple(row for row in ROWS if row.impl != OURS)
    table = results.table(Run(META, rows), "fwd").splitlines()
    assert cells(table[2]) == ["a", "250", "125", "–"]


def test_the_geometric_mean():
    assert results.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
