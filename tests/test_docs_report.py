"""Numbers in the report and in README.md are those of the result files, and nobody typed them."""

import dataclasses
import json
import re
import shutil

import pytest

from bench import cases, figures, report, results
from bench.results import INACCURATE, OURS, Meta, Row, Run
from tests.conftest import ROOT

pytest.importorskip("jinja2")
from tests.test_bench_figures import all_rows

META = Meta("NVIDIA H200", "580", "0.11.2", "13.0", "abc1234", "2026-11-30T00:00Z", 800.0, 4500.0)
CASE, OTHER = "B1 S64 H1/1 D64 full bf16", "B1 S128 H1/1 D64 causal bf16"
RUN = Run(
    META,
    (
        Row(CASE, "fa3", "fwd", 30.0, tflops=300.0, error=2e-3),
        Row(CASE, OURS, "fwd", 20.0, tflops=400.0, error=2.3e-3),
        Row(OTHER, OURS, "fwd", 10.0, tflops=200.0),
        Row(OTHER, "fa3", "fwd", 5.0, tflops=100.0),
        Row(OTHER, "cudnn", "fwd", 40.0, tflops=50.0, note=INACCURATE),
        Row(CASE, "cudnn", "fwd", None, note="refused"),
        Row(CASE, OURS, "memory", None, amount=2.0**30, unit="bytes"),
    ),
)


@pytest.fixture
def fill(tmp_path):
    results.write(tmp_path / "forward.json", RUN)

    def fill(expression, name="forward"):
        text = f'{{% call(file) measured("{name}") %}}{expression}{{% endcall %}}'
        return report.fill(text, tmp_path)

    return fill


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (f'file("fwd").tflops("{CASE}") | fixed', "400"),
        (f'file("fwd").time_us("{CASE}", "fa3") | fixed(1)', "30.0"),
        (f'file("fwd").share("{CASE}") | fixed', "50"),
        (f'file("memory").amount("{CASE}") | fixed', "1073741824"),
        ('file("fwd").mean("fa3") | fixed(4)', "0.8660"),
        ('file("fwd").worst("fa3") | fixed(2)', "0.50"),
        ('file("fwd").best("fa3") | fixed(2)', "1.50"),
        (f'file("fwd").mean("fa3", cases=["{CASE}"]) | fixed(2)', "1.50"),
        ('file("fwd").mean("best peer") | fixed(4)', "0.8660"),
        ("file.meta.commit", "abc1234"),
    ],
)
def test_a_number_comes_from_its_row(fill, expression, text):
    assert fill(f"{{{{ {expression} }}}}") == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ('file("fwd").tflops("B9")', "no row of 'jax_flash.mosaic' for 'B9'"),
        (f'file("fwd").tflops("{CASE}", "fa9")', "no row of 'fa9'"),
        (f'file("fwd").tflops("{CASE}", "cudnn")', "no tflops: refused"),
        (f'file("fwd").time_us("{OTHER}", "cudnn")', INACCURATE),
        (f'file("fwd").gbps("{CASE}")', "has no gbps"),
        ('file("bwd")', "no mode 'bwd', only"),
        ('file("fwd").mean("fa9")', "no case of both"),
        ('file("fwd").mean("cudnn")', "no case of both"),
        ('file("fwd").table("tflops", cases=["B9"])', "has nothing of"),
    ],
)
def test_what_is_not_there_is_an_error(fill, expression, message):
    with pytest.raises(report.ReportError, match=re.escape(message)):
        fill(f"{{{{ {expression} }}}}")


def test_a_file_that_is_not_there_is_said_and_one_that_nothing_makes_is_an_error(fill):
    assert "python -m bench run backward" in fill("never shown {{ file.nothing }}", "backward")
    assert "python -m bench profile" in fill("", "profile")
    with pytest.raises(report.ReportError, match="no command makes"):
        fill("", "foreword")


def test_a_name_that_means_nothing_is_an_error(fill):
    import jinja2

    with pytest.raises(jinja2.UndefinedError):
        fill("{{ nothing }}")


def test_a_table_shows_every_case_and_compares(fill):
    lines = fill('{{ file("fwd").table("tflops") }}').splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", OURS, "fa3", "cudnn"]
    assert cells[2] == ["B1 S64 H1/1 D64 full", "400", "300", "–"]
    assert cells[3] == ["B1 S128 H1/1 D64 causal", "200", "100", "(!)"]
    pair = fill(
        f'{{{{ file("fwd").table("tflops", summary=True, impls=["fa3", "{OURS}"]) }}}}'
    ).splitlines()
    assert [re.findall(r"\S+ ×", line) for line in pair[4:]] == [["0.866 ×"], ["0.500 ×"]]
    turned = fill('{{ file("fwd").table("error", by="impl", impls=["fa3"]) }}').splitlines()
    assert [cell.strip() for cell in turned[2].split("|")] == ["", "fa3", "2.0e-03", "–", ""]
    assert fill('{{ file("fwd").inaccurate }}') == str(((OTHER, "cudnn"),))


def test_the_report_changes_with_its_results(tmp_path):
    """The page can be filled with what is there, and its numbers follow the files."""
    page = report.PAGE.read_text()
    first = report.fill(page)
    assert not re.search(r"\{\{|\{%", first)
    quoted = [path for path in figures.RESULTS.glob("*.json") if f'"{path.stem}"' in page]
    assert quoted
    for path in quoted:
        folder = shutil.copytree(figures.RESULTS, tmp_path / path.stem)
        run = results.read(path)
        rows = tuple(
            dataclasses.replace(
                row,
                time_us=row.time_us and 3 * row.time_us,
                tflops=row.tflops and row.tflops / 3,
                amount=row.amount and 3 * row.amount,
            )
            for row in run.rows
        )
        results.write(folder / path.name, Run(run.meta, rows))
        assert report.fill(page, folder) != first


def made_up(folder):
    """Result files of everything; the variants are the true ones."""
    plain = cases.GRID[0].name
    terms = [
        Row(f"{plain}, {term}", OURS, mode, 100.0 + i, tflops=300.0, error=2e-3)
        for i, (term, modes) in enumerate({"nothing": 2, "sinks": 2, "bias": 1}.items())
        for mode in ("fwd+bwd", "fwd")[:modes]
    ]
    for name, rows in {**all_rows(), "terms": terms}.items():
        results.write(folder / f"{name}.json", Run(META, tuple(rows)))
    shutil.copy(figures.RESULTS / "variants.json", folder)
    return folder


def test_the_report_has_a_part_for_every_suite(tmp_path):
    page = report.PAGE.read_text()
    assert "Not measured yet" not in report.fill(page, made_up(tmp_path))
    for name in report.KNOWN:
        (tmp_path / f"{name}.json").rename(tmp_path / "aside")
        assert f"`{figures.command(name)}` makes" in report.fill(page, tmp_path)
        (tmp_path / "aside").rename(tmp_path / f"{name}.json")


def test_a_run_that_was_cut_short_is_shown_as_far_as_it_goes(tmp_path):
    """Only ours, only every second case, only the first mode of each file but decode's."""
    made_up(tmp_path)
    for path in tmp_path.glob("*.json"):
        run = results.read(path)
        if path.stem in ("variants", "profile"):
            continue
        modes = run.modes[: 2 if path.stem == "decode" else 1]
        rows = [row for row in run.rows if row.mode in modes and row.impl.startswith("jax_flash")]
        keep = {case: i % 2 == 0 for i, case in enumerate(dict.fromkeys(x.case for x in rows))}
        kept = {row.case for row in rows if keep[row.case] or "B4 S4096" in row.case}
        kept -= {case.name for case in cases.OTHERS if path.stem in cases.SUITES}
        results.write(path, Run(run.meta, tuple(row for row in rows if row.case in kept)))
    assert "Not in this run:** fwd+bwd" in report.fill(report.PAGE.read_text(), tmp_path)


def test_the_readme_shows_the_results():
    shown = report.README.read_text()
    remedy = "python -m bench report --readme writes it anew"
    assert report.with_block(shown, report.readme_block()) == shown, remedy


UNITS = r"µs|us|ms|s|TFLOP/s|GFLOP/s|GB/s|TB/s|GiB|MiB|%|percent|tokens/s|characters/s|GHz|W|B"
TYPED = re.compile(rf"\d(?:[\d.,]*\d)?(?:\s|&nbsp;)*(?:{UNITS})(?![\w/])|\d\.\d+\s?×|\d\.\d+ times")


def typed_numbers(text):
    """Numbers with a unit that stand in a page's own words."""
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", "□", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$|\$.*?\$|```.*?```|`[^`]*`", "□", text, flags=re.DOTALL)
    return [match[0] for match in TYPED.finditer(text)]


@pytest.mark.parametrize("path", [report.PAGE, report.README_TEMPLATE], ids=lambda path: path.name)
def test_no_measured_number_is_typed_by_hand(path):
    assert typed_numbers(path.read_text()) == []


def test_typed_numbers_are_seen():
    text = "takes 12.5 µs, 744 TFLOP/s, 90% of it, 3 GiB; 1.27 × and 1.2 times"
    assert len(typed_numbers(text)) == 6
    assert typed_numbers('{{ file("fwd").tflops("B1 S64") }} µs, `12 µs`, D 128, $2^{-8}$') == []


def test_the_gpu_record_is_quoted():
    record = json.loads((ROOT / "tests/gpu_record.json").read_text())
    assert report.fill("{{ gpu.passed }} of {{ gpu.commit }}") == (
        f"{record['passed']} of {record['commit']}"
    )
