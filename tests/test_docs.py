"""The code in README.md and docs/ runs, from top to bottom of each page; links lead somewhere."""

import re

import jax
import pytest

from tests.conftest import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}
BLOCKS = {
    page: blocks
    for page, text in PAGES.items()
    if (blocks := re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}


def test_pages_that_have_examples_are_found():
    named = {"README.md", "docs/decoding.md", "docs/recipes.md", "docs/serving.md"}
    assert named <= BLOCKS.keys()


@pytest.mark.parametrize("page", BLOCKS)
def test_the_examples_run(page):
    names: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in BLOCKS[page]:
            exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_to_pages_of_the_site(page):
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", PAGES[page])
    targets = [(ROOT / page).parent / link.partition("#")[0] for link in links]
    assert [target for target in targets if not target.exists()] == []
    in_toctree = (ROOT / "docs/index.md").read_text().splitlines()
    if page.startswith("docs/") and page != "docs/index.md":
        assert page.removeprefix("docs/").removesuffix(".md") in in_toctree
