"""Markdown to PDF: Pandoc turns it into Typst, which sets it. Both come as wheels."""

import re
from pathlib import Path

import pypandoc
import typst

_HERE = Path(__file__).parent
_RELATIVE_LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)[^)]+\)")  # to other pages: no use here
_TEMPLATE = _HERE / "pdf.typ"


def write(markdown: str, path: Path) -> None:
    """Sets a page.

    Args:
        markdown: its first line is the title; links and images as seen from docs/.
        path: of the PDF.
    """
    title, _, body = markdown.partition("\n")
    body = _RELATIVE_LINK.sub(r"\1", body)
    text = pypandoc.convert_text(
        body,
        "typst",
        format="markdown-smart+tex_math_dollars+pipe_tables",
        extra_args=["--shift-heading-level-by=-1", "--wrap=preserve"],
    )
    text = text.replace('image("../', 'image("/')  # paths are those of the root
    settings = _TEMPLATE.read_text().replace("TITLE", title.removeprefix("# "))
    path.parent.mkdir(parents=True, exist_ok=True)
    typst.compile(
        (settings + text).encode(), output=str(path), root=str(_HERE.parent),
    )  # fmt: skip
