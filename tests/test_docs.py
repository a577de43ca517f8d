"""The code in README.md and docs/ runs, from top to bottom of each page."""

import re

import jax
import pytest

from tests.conftest import ROOT

PAGES = ["README.md", "docs/decoding.md", "docs/recipes.md", "docs/serving.md", "docs/tuning.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, page, "exec"), names)
