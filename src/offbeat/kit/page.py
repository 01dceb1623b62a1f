"""HTML reports: one self-contained file, with a light and a dark colour scheme."""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.extras import extra

if TYPE_CHECKING:
    from jinja2 import Template


class Tile(NamedTuple):
    """A headline figure: the best method by one quantity."""

    title: str
    value: str
    name: str
    colour: str
    detail: str


def load_template(room: str) -> "Template":
    """Compile the template of a room's report; raises ModuleNotFoundError without jinja2."""
    with extra("report"):
        from jinja2 import Environment, StrictUndefined
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_read(room, "report.html.j2"))


def render(room: str, path: Path, contents: dict[str, Any]) -> None:
    """Write a room's report; raises ``ValueError`` if the file cannot be written."""
    styles = {"style": _read("offbeat.kit", "report.css"), "own_style": _read(room, "report.css")}
    text = load_template(room).render(**styles, **contents)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"report: got {str(path)!r}, which cannot be written ({error.strerror}); pass a path "
            "in a folder that exists"
        ) from error


def _read(room: str, name: str) -> str:
    file = files(room) / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""
