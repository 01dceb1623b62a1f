"""Converts the equations of arithmatex to MathML, which browsers draw without scripts or fonts.

A hook of mkdocs, named in mkdocs.yml.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Convert all equations of a page."""
    content = INLINE.sub(lambda found: _mathml(found[1], "inline"), content)
    return BLOCK.sub(lambda found: f"<p>{_mathml(found[1], 'block')}</p>", content)


def _mathml(latex: str, display: str) -> str:
    return convert(html.unescape(latex).strip(), display=display)
