"""docs/quickstart.ipynb runs from its first cell to its last, in a kernel of its own."""

import json

import pytest

from tests.conftest import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

PATH = ROOT / "docs/quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter are not ours
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_NOTEBOOK_STEPS", "10")
    monkeypatch.setenv("JAX_FLASH_NOTEBOOK_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("JAX_FLASH_NOTEBOOK_TESTS", "tests/test_block_manager.py")
    monkeypatch.setenv("JAX_FLASH_DATA", str(ROOT / "docs/log.md"))
    notebook = nbformat.read(PATH, as_version=4)
    folder = {"metadata": {"path": str(PATH.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=folder).execute()
    printed = [
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert any("chosen" in text or "xla" in text for text in printed)  # what explain says
    assert any("passed" in text for text in printed)
    assert any("validation loss" in text for text in printed)
    assert len(list((tmp_path / "run").glob("*"))) > 2


def test_it_is_committed_without_outputs():
    cells = json.loads(PATH.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
