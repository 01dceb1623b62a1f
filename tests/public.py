"""The public names with their arguments; ``python tests/public.py`` writes tests/public.txt."""

import ast
import importlib
import inspect
from pathlib import Path

import offbeat

SOURCE = Path(offbeat.__file__).parent
LISTING = Path(__file__).with_suffix(".txt")


def names() -> set[str]:
    """What people may import: the packages' lists, and what single modules define themselves."""
    found = set()
    packages = "methods", "functional", "topology", "data", "testing", "lab", "compare", "plan"
    packages += ("hogwild",)
    for package in ("offbeat", *(f"offbeat.{name}" for name in packages)):
        found |= {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    for module in (
        "transport.small_gathers",
        "transport.collectives",
        "transport.handle",
        "transport.messages",
        "integrations.ddp",
        "replica.consensus",
        "topology.schedule",
    ):
        path = f"offbeat.{module}"
        for name, value in vars(importlib.import_module(path)).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == path:
                found.add(f"{path}.{name}")
    for host in ("accelerate", "lightning", "ray", "transformers"):  # whose imports take long
        path = SOURCE / "integrations" / f"{host}.py"
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found.add(f"offbeat.integrations.{host}.{node.name}")
    return found | {
        f"offbeat.Replica.{name}"
        for name, _ in inspect.getmembers(offbeat.Replica, inspect.isfunction)
        if not name.startswith("_")
    }


def listing() -> str:
    """Every name in a line, with its arguments if it can be called; those with = have defaults."""
    return "".join(f"{name}{arguments(name)}\n" for name in sorted(names()))


def arguments(name: str) -> str:
    if "integrations" in name:  # whose imports take long
        return ""
    owner, _, last = name.rpartition(".")
    try:
        value = getattr(importlib.import_module(owner), last)
    except ModuleNotFoundError:  # a method of Replica
        value = getattr(offbeat.Replica, last)
    if not inspect.isfunction(value) and not inspect.isclass(value):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # of a class that takes what its base does
        return ""
    shown, named_only = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not named_only:
            shown, named_only = [*shown, "*"], True
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(f"{stars}{each.name}{'=' if each.default is not each.empty else ''}")
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    LISTING.write_text(listing(), "utf-8")
