"""Docstrings for the site: roles become links, equations become drawings.

A griffe extension that mkdocs.yml names. Docstrings use the notation that ``help()`` readers know,
``:class:`` and ``.. math::``; the site wants Markdown. Nothing is loaded from a network: equations
are drawn here, with the fonts of matplotlib.
"""

import html
import io
import re
from typing import Any

import griffe

try:
    from matplotlib import rc_context
    from matplotlib.mathtext import math_to_image
except ImportError:  # then equations are shown as they are written
    math_to_image = None

# The class says all that these could say; `with` says the rest.
UNSHOWN = ("__init__", "__post_init__", "__enter__", "__exit__")
ROLE = re.compile(r":(class|func|meth|mod|attr):`~?([\w.]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
BLOCK = re.compile(r"^\.\. math::(.*(?:\n(?:[ \t]+\S.*))*)", re.MULTILINE)
# What the papers' notation uses and matplotlib does not know.
SPELLING = (
    (r"\bmod", r"\;\mathrm{mod}\;"),
    (r"\Big", ""),
    (r"\bigl", ""),
    (r"\bigr", ""),
    (r"\tfrac", r"\frac"),
    (r"\text{", r"\mathrm{"),
    (r"\le ", r"\leq "),
    (r"\ge ", r"\geq "),
    ("&", ""),
)
# What matplotlib draws and a page does not need: its style would hold for the whole page.
SCENERY = re.compile(
    r'<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</defs>|<g id="patch_1">.*?</g>',
    re.DOTALL,
)


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.name in UNSHOWN:
            obj.docstring = None  # the site leaves out what has none
        if obj.docstring is not None:
            text = BLOCK.sub(_block, obj.docstring.value)
            text = INLINE.sub(lambda found: _drawing(found[1]), text)
            text = ROLE.sub(lambda found: _link(obj, *found.groups()), text)
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)


def _link(obj: griffe.Object, role: str, name: str) -> str:
    """A reference that stays plain text where the target has no place on the site."""
    path = name
    if not name.startswith("offbeat."):
        scope = obj if isinstance(obj, griffe.Module | griffe.Class) else obj.parent
        try:
            path = scope.resolve(name)  # type: ignore[union-attr]  # only modules have no parent
        except griffe.NameResolutionError:
            path = f"{obj.module.path}.{name}"
    shown = name.rsplit(".", 1)[-1] + ("()" if role in ("func", "meth") else "")
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'


def _block(found: re.Match[str]) -> str:
    lines = [line.strip() for line in found[1].strip().split("\\\\")]
    drawings = "<br>".join(_drawing(" ".join(line.split())) for line in lines if line)
    return f'<p class="equation">{drawings}</p>'


def _drawing(latex: str) -> str:
    """One line of mathematics as an inline picture in the colour of the text."""
    if math_to_image is None:
        return f"<code>{html.escape(latex)}</code>"
    text = latex
    for theirs, ours in SPELLING:
        text = text.replace(theirs, ours)
    picture = io.StringIO()
    with rc_context({"mathtext.fontset": "cm", "svg.hashsalt": text, "font.size": 12}):
        depth = math_to_image(f"${text}$", picture, format="svg", dpi=72, color="#010203")
    drawing = picture.getvalue()
    svg = drawing[drawing.index("<svg") :].replace("#010203", "currentColor")
    svg = SCENERY.sub("", svg)
    label = html.escape(latex, quote=True)
    style = f"vertical-align: {-depth:.2f}pt"
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}" style="{style}"', 1)
    return re.sub(r">\s+<", "><", svg).replace("\n", " ")
