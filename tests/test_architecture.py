"""The house keeps its shape: imports point down the floors, and files stay small."""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "offbeat"

# From the ground up. A module may import from its own floor and from those below.
FLOORS = (
    ("functional", "topology", "graphs", "schedule"),  # pure: tensors and integers
    (
        "meter",
        "backends",
        "heartbeat",
        "lane",
        "groups",
        "handle",
        "rounds",
        "collectives",
        "calls",
    ),  # the only code that communicates
    ("exchange", "adasum_wire", "gradients", "parameters", "recipes"),  # what fills the two slots
    (
        "attach",
        "backward",
        "batch_norm",
        "consensus",
        "checkpoint",
        "recovery",
        "replica",
        "telemetry",
        "traits",
        "hogwild",
    ),  # a training run
    ("testing", "integrations", "lab", "compare", "cli", "__main__"),  # what people start
)
MODULES = sorted(SOURCE.rglob("*.py"))


def floor(module: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if module in names)


def imported(path: Path) -> set[str]:
    """The first names below ``offbeat`` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "offbeat":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offbeat."):
            found.add(str(node.module).split(".")[1])
    return found


def own_name(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize(
    "path", [p for p in MODULES if own_name(p) != "__init__"], ids=lambda p: p.stem
)
def test_imports_point_down(path: Path) -> None:
    here = floor(own_name(path))
    modules = {name for names in FLOORS for name in names}
    for name in imported(path) & modules:
        assert floor(name) <= here, f"{own_name(path)} (floor {here + 1}) imports {name}"


def test_only_the_second_floor_communicates() -> None:
    verbs = {"allreduce", "allgather", "_allgather_base", "broadcast", "send", "recv", "barrier"}
    for path in MODULES:
        if own_name(path) not in (*FLOORS[1], *FLOORS[4]):
            calls = set(calls_on_process_groups(path))
            assert not calls & verbs, f"{path.name} talks past floor 2: {calls & verbs}"


def calls_on_process_groups(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if "process_group" in owner or owner in ("dist", "torch.distributed"):
                yield node.func.attr


def test_files_and_functions_stay_small() -> None:
    lengths = {path: path.read_text().count("\n") for path in MODULES}
    assert max(lengths.values()) <= 350, max(lengths, key=lambda path: lengths[path])
    sizes = [size for path in MODULES for size in function_sizes(path)]
    assert max(sizes) <= 50
    assert median(sizes) <= 10


def function_sizes(path: Path) -> list[int]:
    """Lines of every function without its docstring."""
    sizes = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            taken = 0 if doc is None else (doc.end_lineno or 0) - doc.lineno + 1
            sizes.append((node.end_lineno or 0) - node.lineno + 1 - taken)
    return sizes


def test_no_drawers_for_odds_and_ends() -> None:
    for path in MODULES:
        assert not {"utils", "util", "helpers", "manager", "common", "misc"} & set(
            path.stem.split("_")
        )
