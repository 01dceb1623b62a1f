"""The declarations of all benchmarks, read without importing their modules."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from bench.harness.files import ROOT

# In the order of the page.
METHODS = (
    "choose", "outer", "sgp", "adasum", "daso", "async_adam", "lags", "ddp", "elastic", "scale",
    "plan", "internet", "gpu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a benchmark tests; a module declares it as ``BENCH = Bench(...)``, all literal."""

    name: str  # folder/module
    claim: str = ""  # what is tested; "": the first line of the module's docstring
    minutes: float  # on two cores
    full_minutes: float | None = None  # with --full; None if there is no such option
    gpu: bool = False  # whether it runs on a GPU, and nowhere else
    # Tables or figures of the paper, and what they show; of a single one by default the claim.
    evidence: str | Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"bench.{self.name.replace('/', '.')}"


def benches() -> list[Bench]:
    paths = [path for method in METHODS for path in sorted((ROOT / "bench" / method).glob("*.py"))]
    return [bench for path in paths if (bench := declared(path)) is not None]


@cache  # each table of a page asks for all
def declared(path: Path) -> Bench | None:
    """The ``BENCH`` of a module with what its docstring adds; None if it has none."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="BENCH")], value=ast.Call(keywords=keywords)):
                line = (ast.get_docstring(tree) or "").partition("\n")[0].removesuffix(".")
                given = {"claim": line} | {str(k.arg): ast.literal_eval(k.value) for k in keywords}
                if isinstance(source := given.get("evidence"), str):
                    given["evidence"] = {source: line}
                return Bench(**given)
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
