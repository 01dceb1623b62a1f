"""Code in the pages of the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(page: Path, language: str) -> list[str]:
    """The code in ``language`` on a page, fence by fence."""
    fence = rf"^```{language}\n(.*?)^```$"
    return re.findall(fence, page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def script(page: str, name: str) -> str:
    """The block on a page that begins with ``# name``."""
    return next(b for b in blocks(ROOT / page, "python") if b.startswith(f"# {name}\n"))
