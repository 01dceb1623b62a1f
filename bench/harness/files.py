"""Where benchmarks write: the console, results in git, raw recordings in an ignored folder."""

from pathlib import Path

from rich.console import Console

console = Console(highlight=False)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ASSETS = ROOT / "docs" / "assets"  # pictures that pages show
PAGES = (  # with tables from results
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
    *(ROOT / "docs" / f"{name}.md" for name in ("choosing", "evidence", "internet", "scale")),
)
RESULTS = ROOT / "bench" / "results"
RAW = ROOT / "bench" / "raw"


def result(name: str, suffix: str = ".json") -> Path:
    return _made(RESULTS / f"{name}{suffix}")


def raw(name: str, suffix: str = ".json") -> Path:
    return _made(RAW / f"{name}{suffix}")


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
