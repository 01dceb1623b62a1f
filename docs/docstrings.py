"""Converts docstrings to Markdown for the site: roles to links, equations to arithmatex.

A griffe extension, named in mkdocs.yml. Docstrings use the notation of Sphinx, ``:class:`` and
``.. math::``, which ``help()`` shows as it is.
"""

import re
from typing import Any

import griffe

# Documented by their class.
UNSHOWN = ("__init__", "__post_init__", "__enter__", "__exit__")
ROLE = re.compile(r":(class|func|meth|mod|attr):`~?([\w.]+)`")
INLINE = re.compile(r":math:`([^`]+)`")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
BLOCK = re.compile(r"^\.\. math::(.*(?:\n(?:[ \t]+\S.*))*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of a module, class, function or attribute."""
        if obj.name in UNSHOWN:
            obj.docstring = None  # the site omits objects without a docstring
        if obj.docstring is not None:
            text = BLOCK.sub(_block, obj.docstring.value)
            text = INLINE.sub(lambda found: rf"\({' '.join(found[1].split())}\)", text)
            text = ROLE.sub(lambda found: _link(obj, *found.groups()), text)
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)


def _link(obj: griffe.Object, role: str, name: str) -> str:
    """Return a reference, which is plain text if the site does not document its target."""
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
    equation = " ".join(found[1].split())
    if "&" in equation:
        equation = rf"\begin{{align*}} {equation} \end{{align*}}"
    return f"\n$$\n{equation}\n$$\n"
