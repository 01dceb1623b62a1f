"""The tutorial as a notebook: ``python tests/notebook.py`` writes it from docs/tutorial.md."""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
SITE = re.compile(r"\[([^\]]+)\]\([^)]+\)")  # links lead to other pages, which a notebook lacks


def notebook() -> str:
    """Return the page as a notebook: its listing writes train.py, its commands run."""
    page = SITE.sub(r"\1", PAGE.read_text("utf-8"))
    cells, magics = [], {"python": "%%writefile train.py\n", "bash": "%%bash --no-raise-error\n"}
    text, *fences = re.split(r"^(```\w+\n.*?^```\n)", page, flags=re.M | re.S)
    for fence, after in zip(fences[::2], fences[1::2], strict=True):
        language, code = re.fullmatch(r"```(\w+)\n(.*)\n```\n", fence, re.S).groups()  # type: ignore[union-attr]
        if "node0" in code:  # a machine of the reader's
            text += fence + after
            continue
        cells += [cell("markdown", text.strip()), cell("code", magics[language] + code)]
        text = after
    cells.append(cell("markdown", text.strip()))
    whole = {
        "cells": [each for each in cells if each["source"]],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(whole, indent=1) + "\n"


def cell(kind: str, text: str) -> dict[str, Any]:
    """Return a cell that has not been run."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text, **more}


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), "utf-8")
