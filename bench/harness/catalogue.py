"""Which benchmarks exist, read from their declarations without importing them."""

import ast
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from bench.harness.bench import Bench
from bench.harness.files import ROOT

# In the order of the page.
METHODS = (
    "choose", "outer", "sgp", "adasum", "daso", "async_adam", "lags", "ddp", "elastic", "scale",
    "plan", "internet", "gpu",
)  # fmt: skip


def benches() -> list[Bench]:
    """All benchmarks, method by method."""
    paths = [path for method in METHODS for path in sorted((ROOT / "bench" / method).glob("*.py"))]
    return [bench for path in paths if (bench := declared(path)) is not None]


def declared(path: Path) -> Bench | None:
    """The ``BENCH`` of a module; None if it has none."""
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="BENCH")], value=ast.Call(keywords=keywords)):
                return Bench(**{str(k.arg): ast.literal_eval(k.value) for k in keywords})
    return None


def select(names: Sequence[str]) -> list[Bench]:
    """The benchmarks with these names, or in folders with these names, in order of the list.

    Raises ValueError for a name that is neither.
    """
    known = benches()
    chosen: set[str] = set()
    for name in (given.strip("/").replace(".", "/") for given in names):
        found = {bench.name for bench in known if name in (bench.name, bench.name.split("/")[0])}
        if not found:
            near = get_close_matches(name, [*METHODS, *(bench.name for bench in known)])
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"got {name!r}: {meant}`python -m bench list` shows the names")
        chosen |= found
    return [bench for bench in known if bench.name in chosen]
