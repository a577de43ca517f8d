"""The site: ``make docs`` builds it with Sphinx; every warning is an error."""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import pdf  # noqa: E402 (the line above says where these three are)

import jax_flash  # noqa: E402
from bench import report  # noqa: E402

project = "jax_flash"
author = "jax_flash authors"
version = release = jax_flash.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["README.md"]
html_theme = "furo"
html_title = "jax_flash"
html_baseurl = ""

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_docs.py runs the notebook

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say shapes and dtypes, which annotations do not
maximum_signature_line_length = 80
napoleon_custom_sections = [("Source", "notes_style")]
napoleon_use_rtype = False

# Pages that are made of a file outside this folder.
_FROM_ROOT = {"index": "README.md", "contributing": "CONTRIBUTING.md"}


def read_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Fills the report's placeholders, and puts README.md and CONTRIBUTING.md into their pages."""
    del app
    if name == "technical_report":
        title, _, body = report.fill(source[0]).partition("\n")
        link = '<a href="technical_report.pdf">As a PDF.</a>'
        source[0] = f"{title}\n\n{link}\n{body}"
    elif name in _FROM_ROOT:
        text = (ROOT / _FROM_ROOT[name]).read_text()
        source[0] = f"{_links_from_here(text)}\n{source[0]}"


def _links_from_here(text: str) -> str:
    """Relative links of a page in the root, seen from docs/."""

    def moved(match: re.Match[str]) -> str:
        target = match[1]
        pages = {path: f"{name}.md" for name, path in _FROM_ROOT.items()}
        if target in pages:
            return f"]({pages[target]})"
        return (
            f"]({target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'})"
        )

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", moved, text)


def write_pdf(app: Sphinx, failure: Exception | None) -> None:
    """The report as a PDF beside its page."""
    if failure is None and app.builder.format == "html":
        pdf.write(report.fill(report.PAGE.read_text()), Path(app.outdir) / "technical_report.pdf")


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's hook."""
    app.connect("source-read", read_page)
    app.connect("build-finished", write_pdf)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
