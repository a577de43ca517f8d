"""``jax-flash explain --table``: who computes which feature, and README.md, which says the same."""

import re

import pytest

from jax_flash import backends, cli, features
from jax_flash.spec import Device
from tests.conftest import ROOT
from tests.fake_kernels import FakeKernels, FakeKernelsWithBackward, register

HOPPER = Device("gpu", "9.0")


def table(device=HOPPER):
    """{feature: {implementation: cell}}."""
    head, rule, *rows = features.markdown(device).splitlines()
    assert set(rule) <= set("| -")
    names = re.findall('`"(.*?)"`', head)
    assert names == list(backends.NAMES)
    cells = [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in rows]
    return {label: dict(zip(names, rest, strict=True)) for label, *rest in cells}


def column(name, device=HOPPER):
    return {label: cells[name] for label, cells in table(device).items()}


def test_the_readme_shows_the_table_that_the_command_prints(capsys):
    assert cli.main(["explain", "--table"]) == 0
    printed = capsys.readouterr().out
    begin, end = "<!-- jax-flash explain --table -->\n", "<!-- end of the table -->"
    shown = (ROOT / "README.md").read_text().partition(begin)[2].partition(end)[0]
    remedy = f"put what `jax-flash explain --table` prints between {begin.strip()} and {end}"
    assert shown == printed, remedy


@pytest.mark.parametrize("device", [HOPPER, Device("gpu", "8.0"), Device("cpu")])
def test_the_oracle_computes_everything_everywhere(device):
    for name in ("chunked", "xla"):
        assert set(column(name, device).values()) == {features.YES}


def test_other_devices_have_other_kernels():
    assert features.markdown(Device("cpu")).startswith("| on cpu |")
    assert features.markdown(HOPPER).startswith("| on gpu 9.0 |")
    for name in ("mosaic", "cuda", "cudnn"):
        assert set(column(name, Device("cpu")).values()) == {features.NO}
    ampere = table(Device("gpu", "8.0"))
    assert {cells["mosaic"] for cells in ampere.values()} == {features.NO}
    assert ampere["causal"]["cudnn"] == features.YES
    assert ampere["D = 256"]["cudnn"] == features.NO
    assert table()["D = 256"]["cudnn"] == features.YES


def test_kernels_count_as_compiled(monkeypatch):
    backend = backends.load("cuda")
    monkeypatch.setattr(backend.library, "missing", lambda platform: "not built")
    cells = column("cuda", Device("gpu", "12.0"))
    for label, cell in cells.items():
        reads_a_cache = "decode_attention" in label or "paged_attention" in label
        assert cell == (features.FORWARD_ONLY if reads_a_cache else features.NO)
    assert "not built" in backends.reason_against(
        "cuda", features.rows()["`decode_attention`"], Device("gpu", "12.0")
    )


@pytest.mark.parametrize("kind", [FakeKernels, FakeKernelsWithBackward])
def test_cells_are_what_the_implementation_answers(kind, monkeypatch):
    fake = register(monkeypatch, kind)
    monkeypatch.setattr(backends, "NAMES", ("fake", *backends.NAMES))
    fake.supports = lambda spec, device: None if spec.soft_cap is None else "no soft cap"

    def declines_gradient(spec):
        has_gradient = spec.arrays.bias is not None and "bias" not in spec.constants
        return "no gradient of a bias" if has_gradient else None

    fake.declines_gradient = declines_gradient
    cells = column("fake")
    gradient = features.YES if kind is FakeKernelsWithBackward else features.FORWARD_ONLY
    assert cells["soft cap"] == cells["all of these terms in one call"] == features.NO
    assert cells["bias `[B, 1, 1, Tk]`"] == gradient
    assert cells["bias `[B, 1, 1, Tk]` and its gradient"] == features.FORWARD_ONLY
    assert cells["`paged_attention`, fp8 cache"] == gradient


def test_rows_are_about_what_they_say():
    specs = features.rows()
    assert len({str(spec.arrays) + repr(spec) for spec in specs.values()}) == len(specs)
    kinds = {spec.kind for spec in specs.values()}
    assert kinds == {"dense", "ragged", "decode", "paged"}
    assert specs["`paged_attention`, fp8 cache"].kv_dtype == "float8_e4m3fn"
    for label, spec in specs.items():
        if shape := re.search(r"(mask|bias) `\[(.*?)\]`", label):
            array = spec.mask.array if shape[1] == "mask" else spec.arrays.bias
            sizes = {"1": 1, "B": spec.batch, "Hq": spec.num_q_heads, "Tq": 256, "Tk": 256}
            assert array.shape == tuple(sizes[size] for size in shape[2].split(", "))
            wants_gradient = "gradient" in label
            assert spec.constants == (
                ("bias",) if shape[1] == "bias" and not wants_gradient else ()
            )


def test_what_is_not_installed_is_said_to_be_so(monkeypatch):
    monkeypatch.setitem(backends._TABLE, "mosaic", "no_such_kernel_package.backend")
    backends.load.cache_clear()
    assert set(column("mosaic").values()) == {features.NOT_INSTALLED}
    backends.load.cache_clear()


@pytest.mark.parametrize("device", ["tpu", "gpu", "gpu 9", "hopper"])
def test_devices_are_checked(device, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explain", "--table", "--device", device])
    assert "is neither 'cpu' nor 'gpu' with a compute capability" in capsys.readouterr().err


def test_a_device_is_for_the_table_only(capsys):
    assert cli.main(["explain", "--device", "gpu 8.0"]) == 2
    assert "Add --table, or leave --device out" in capsys.readouterr().err
    assert cli.main(["explain", "--table", "--device", "gpu 8.0"]) == 0
    assert capsys.readouterr().out.startswith("| on gpu 8.0 |")
