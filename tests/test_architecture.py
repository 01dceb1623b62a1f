"""The structure of the package: rooms on floors, imports that point down, small files."""

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

from offbeat.platform import privates

SOURCE = Path(__file__).parent.parent / "src" / "offbeat"

# A room imports only from rooms on lower floors.
FLOORS = {
    0: ("settings", "platform", "extras", "version"),
    1: ("functional", "topology", "liveness", "kit", "data", "deprecation"),
    2: ("kernels", "transport", "lab"),
    3: ("exchange", "telemetry"),
    4: ("methods", "attach"),
    5: ("recipes", "elastic", "plan"),
    6: ("replica",),
    7: ("testing", "hogwild", "compare", "integrations", "names", "store", "doctor"),
    8: ("__init__", "planner"),
    9: ("cli",),
    10: ("__main__",),
}
FILES = {"settings", "extras", "version", "deprecation", "names", "__main__", "__init__"}
MODULES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def room(path: Path) -> str:
    """The room of a file, or its own name if it lies beside the rooms."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def outside(*rooms: str) -> list[Path]:
    """The files of all other rooms."""
    return [path for path in MODULES if room(path) not in rooms]


def floor(name: str) -> int:
    return next(number for number, rooms in FLOORS.items() if name in rooms)


def imported(path: Path) -> Iterator[Path]:
    """The files of the package that a file imports, also inside functions."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "offbeat":
            for alias in node.names:
                yield located(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "offbeat":
                    yield located(alias.name)


def located(dotted: str) -> Path:
    """The file of a module, or of the module that holds a name."""
    path = SOURCE.joinpath(*dotted.split(".")[1:])
    for candidate in (path, path.parent):
        for file in (candidate.with_suffix(".py"), candidate / "__init__.py"):
            if file in MODULES:
                return file
    raise AssertionError(f"{dotted} is in no file")


def test_every_file_is_in_a_room() -> None:
    rooms = {name for names in FLOORS.values() for name in names}
    assert {room(path) for path in MODULES} == rooms
    beside = {path.stem for path in SOURCE.glob("*.py")}
    assert beside == FILES


def test_imports_point_to_lower_floors() -> None:
    pairs = ((path, other) for path in MODULES for other in imported(path))
    assert not [
        f"{path.relative_to(SOURCE)} imports {other.relative_to(SOURCE)}"
        for path, other in pairs
        if room(path) != room(other) and floor(room(other)) >= floor(room(path))
    ]


def test_no_circle_between_files() -> None:
    """Files that a package's own ``__init__`` collects import each other directly, not from it."""
    graph = {path: set(imported(path)) - {path} for path in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        names = [str(path.relative_to(SOURCE)) for path in error.args[1]]
        raise AssertionError(f"a circle: {' -> '.join(names)}") from None


def test_only_transport_calls_torch_distributed() -> None:
    """The lab is exempt: it hosts the store as a launcher does, and measures Gloo by itself."""
    assert not {
        (path, call)
        for path in outside("platform", "liveness", "transport", "lab")
        for call in calls_of_distributed(TREES[path])
    }


METHODS = {  # of a process group or a store, public and private
    "allreduce", "_allgather_base", "allgather", "broadcast", "reduce", "reduce_scatter",
    "alltoall", "alltoall_base", "send", "recv", "isend", "irecv", "barrier", "compare_set",
    "multi_get", "_start_coalescing", "_end_coalescing", "_get_backend", "shutdown", "abort",
}  # fmt: skip


def calls_of_distributed(tree: ast.Module) -> Iterator[str]:
    """Calls of names imported from ``torch.distributed``, and of a process group's methods."""
    names, modules = set(), {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases = [a for a in node.names if a.name.startswith("torch.distributed")]
            modules |= {alias.asname or alias.name for alias in aliases}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, last = called.rpartition(".")
            if (
                called.split(".")[0] in names
                or any(owner.startswith(m) for m in modules)
                or ("process_group" in owner and last in METHODS)
            ):
                yield called


def test_only_platform_asks_an_accelerator() -> None:
    """What is asked of CUDA by name takes other accelerators for the host."""
    asked = {"torch.accelerator", "torch.cuda", "torch.mps", "torch.xpu"}
    assert not [
        (path, ast.unparse(node))
        for path in outside("platform")
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Attribute)
        and (node.attr in ("is_cuda", "is_mps", "is_xpu") or ast.unparse(node) in asked)
    ]


def test_every_private_name_of_torch_is_listed() -> None:
    """In a file that checks for them. Private names that offbeat defines are its own."""
    listed = {part for name in privates.NAMES for part in name.split(".")} | privates.ATTRIBUTES
    others = {"_asdict", "_replace", "_exit"}  # of named tuples, and of the operating system
    others |= {"_checkpoint_connector", "_loaded_checkpoint", "_batches_that_stepped"}  # Lightning
    others |= {"_signal_connector", "_sigterm_notifier_fn"}
    others |= {"_load_from_checkpoint"}  # of the Trainer of transformers
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private - own - others <= listed


def test_only_kernels_import_compilers() -> None:
    for path in outside("kernels"):
        for node in ast.walk(TREES[path]):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {name.split(".")[0] for name in names} & {"numba", "llvmlite", "triton"}
            assert not found, f"{path.relative_to(SOURCE)} imports {found}"


def test_files_and_functions_stay_small() -> None:
    lengths = {path: path.read_text().count("\n") for path in MODULES}
    assert max(lengths.values()) <= 350, max(lengths, key=lambda path: lengths[path])
    assert median(lengths.values()) <= 120
    sizes = [size for path in MODULES for size in function_sizes(path)]
    assert max(sizes) <= 50
    assert median(sizes) <= 10


def function_sizes(path: Path) -> list[int]:
    """Lines of every function without its docstring."""
    sizes = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef):
            doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            taken = 0 if doc is None else (doc.end_lineno or 0) - doc.lineno + 1
            sizes.append((node.end_lineno or 0) - node.lineno + 1 - taken)
    return sizes


def test_rooms_stay_small() -> None:
    rooms = Counter(path.parent for path in MODULES if path.stem != "__init__")
    assert max(rooms.values()) <= 14, rooms.most_common(1)


def test_no_drawers_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "manager", "common", "misc"}
    assert not [path for path in MODULES if drawers & set(path.stem.split("_"))]


METHOD_ROOMS = {  # each named after what it does, and its paper in the first line
    "methods/top_k": "LAGS-SGD (Shi et al. 2020)",
    "methods/adasum": "Adasum (Maleki et al. 2021)",
    "methods/push_sum": "Stochastic Gradient Push and Overlap SGP (Assran et al. 2019)",
    "methods/stale_average": "DASO (Coquelin et al. 2021)",
    "methods/pair_average": "AD-PSGD (Lian et al. 2018)",
    "methods/outer": "DiLoCo (Douillard et al. 2023)",
}


def test_every_room_says_what_lives_there() -> None:
    for init in SOURCE.rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert doc, f"{init.parent.name} has no docstring"
        name = init.parent.relative_to(SOURCE).as_posix()
        assert doc.startswith(METHOD_ROOMS.get(name, "")), name
