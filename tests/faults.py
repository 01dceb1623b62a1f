"""The faults that tests prove, as tables in docs/faults.md.

A test names the row that it proves by ``@pytest.mark.fault(case, outcome)``; several tests may
prove one row, and one test several. ``make faults`` runs all of them and writes the page.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"

# How cases begin to end that the page only counts: the text that they end with says what to do.
SAID = ("PeerLost", "ValueError", "RuntimeWarning", "ModuleNotFoundError", "exit code")

# The headings of the tables, with the tests whose rows belong there unless a mark names a group.
GROUPS = {
    "Lost ranks and connections": ("liveness/", "transport/", "replica/test_processes.py"),
    "Losses that a run survives": ("elastic/",),
    "Ranks that join": ("elastic/test_join.py",),
    "Starting": ("attach/test_start.py", "transport/test_rendezvous.py"),
    "Calls that differ between ranks": ("replica/", "attach/"),
    "Models and algorithms": ("attach/test_bad_input.py", "attach/test_first_step.py"),
    "Gradients": ("replica/test_backward.py", "methods/", "exchange/"),
    "Checkpoints": ("replica/saving/",),
    "Leaving": ("replica/test_detach.py", "transport/test_fork.py"),
    "Settings and arguments": ("", "topology/"),
    "Hogwild training": ("hogwild/",),
    "Recordings and tools": ("telemetry/", "lab/", "compare/", "doctor/"),
}

# Groups whose rows are statements of other pages.
ELSEWHERE = {
    "Ranks that join": "elastic.md",
    "Starting": "reliability.md",
    "Leaving": "reliability.md",
    "Checkpoints": "saving.md",
    "Settings and arguments": "methods/index.md",
    "Hogwild training": "methods/hogwild.md",
    "Recordings and tools": "lab.md",
}

# What runs side by side: ranks that are threads, then real processes; alone what measures times.
# In a worker of xdist a test that hangs ends that worker, by pytest-timeout, and not the run. Not
# with --dist loadfile: it would repeat that test in one worker after the other.
PHASES = {
    "fault and not processes and not quiet and not gpu": ["-n", "3", "--dist", "worksteal"],
    "fault and processes and not quiet and not gpu": ["-n", "3", "--dist", "worksteal"],
    "fault and quiet": ["-n", "1"],
}


@dataclass(frozen=True)
class Row:
    """A fault and what happens, below a heading; for real processes or for threads."""

    group: str
    case: str
    outcome: str
    processes: bool


class Collected:
    """Plugin of pytest that collects the rows of all marks, without running a test."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks of all tests."""
        rows = {row: None for item in session.items for row in _rows_of(item)}
        # Of a case that is proved both ways, say so for processes.
        self.rows = [row for row in rows if row.processes or _in_processes(row) not in rows]


def _rows_of(item: pytest.Item) -> Iterator[Row]:
    path = item.path.relative_to(ROOT / "tests").as_posix()
    processes = item.get_closest_marker("processes") is not None
    for mark in item.iter_markers("fault"):
        case, outcome = mark.args
        group = mark.kwargs.get("group") or _group_of(path)
        if group not in GROUPS:
            raise pytest.UsageError(f"{item.nodeid}: got group={group!r}, expected {[*GROUPS]}")
        yield Row(group, case, outcome, processes)


def _group_of(path: str) -> str:
    starts = [(s, group) for group, some in GROUPS.items() for s in some if path.startswith(s)]
    return max(starts, key=lambda each: len(each[0]))[1]


def _in_processes(row: Row) -> Row:
    return Row(row.group, row.case, row.outcome, processes=True)


def collect() -> list[Row]:
    """Return the rows of all tests, in the order of groups."""
    collected = Collected()
    chosen = ["-m", "fault and not gpu"]  # those of a GPU prove no other row
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in files if "mark.fault(" in path.read_text("utf-8")]
    arguments = ["--collect-only", "-p", "no:terminal", *chosen, *marked]
    if pytest.main(arguments, plugins=[collected]) != pytest.ExitCode.OK:
        raise SystemExit("faults: the tests cannot be collected; run: pytest --collect-only tests")
    order = list(GROUPS)
    return sorted(collected.rows, key=lambda row: order.index(row.group))


def shown(rows: Sequence[Row]) -> str:
    """Return what the page shows: how many rows there are, and those that are not only counted."""
    told = [row for row in rows if not row.outcome.startswith(SAID)]
    real = sum(row.processes for row in rows)
    groups = {group: [row for row in told if row.group == group] for group in GROUPS}
    links = [f"[{group}]({page}) {len(groups.pop(group))}" for group, page in ELSEWHERE.items()]
    counted = (
        f"{len(rows)} cases, {real} of them with real processes. {len(rows) - len(told)} end with "
        "PeerLost or a ValueError on all ranks that take part, a RuntimeWarning or an exit code; "
        "its text names the rank or the fix. Other pages tell what happens in others: "
        f"{', '.join(links)}."
    )
    return "\n\n".join([counted, *(_table(group, found) for group, found in groups.items())])


def _table(group: str, rows: list[Row]) -> str:
    """A line for each outcome, with all faults that have it."""
    faults: dict[str, list[str]] = {}
    for row in rows:
        faults.setdefault(row.outcome, []).append(row.case + "†" * row.processes)
    lines = [f"## {group}", "", "fault | what happens", "---|---"]
    return "\n".join(lines + [f"{_joined(cases)} | {what}" for what, cases in faults.items()])


def _joined(cases: list[str]) -> str:
    """Sentences that begin with the same three words or more tell them once."""
    texts: list[str] = []
    begin: list[str] = []
    for case in map(str.split, cases):
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(begin, case, strict=False))])
        if same >= 3:
            texts[-1] += " / " + " ".join(case[same:])
            begin = case[:same]
        else:
            texts.append(" ".join(case))
            begin = case
    return "<br>".join(texts)


def write(rows: Sequence[Row]) -> None:
    """Write the tables into the page."""
    before, begin, after = PAGE.read_text("utf-8").partition("<!-- faults -->\n")
    _, end, rest = after.partition("<!-- end -->")
    PAGE.write_text(f"{before}{begin}\n{shown(rows)}\n\n{end}{rest}", encoding="utf-8")


@dataclass
class Results:
    """Plugin of pytest that counts how tests end."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test. One that hangs is ended with its worker, or ends its own wait."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # none if the worker ended
            hung = crash is None or re.match(r"(subprocess\.)?Timeout", crash.message)
            (self.hung if hung else self.failed).append(report.nodeid)
        elif report.skipped:
            self.skipped += 1
        elif report.when == "call":
            self.passed += 1

    def __str__(self) -> str:
        """Return the counts in words."""
        counts = {"passed": self.passed, "failed": len(self.failed)}
        counts |= {"hung or crashed": len(self.hung), "skipped": self.skipped}
        return ", ".join(f"{count} {what}" for what, count in counts.items())


def run(seed: int, console: Console) -> Results:
    """Run all tests of faults; pytest shows the progress."""
    results = Results()
    for chosen, how in PHASES.items():
        console.rule(f"seed {seed}: {chosen}")
        shown = ["--no-header", "--tb=short", f"--seed={seed}"]
        code = pytest.main(["-m", chosen, *how, *shown, str(ROOT / "tests")], plugins=[results])
        if code == pytest.ExitCode.INTERRUPTED:
            raise SystemExit(130)
        if code > pytest.ExitCode.TESTS_FAILED and code != pytest.ExitCode.NO_TESTS_COLLECTED:
            results.failed.append(f"pytest ended with {code!r} for {chosen!r}")
    return results


def main() -> None:
    """Collect, run for every seed, print a summary, and write the page if nothing failed."""
    parser = argparse.ArgumentParser(description="Run the tests that prove docs/faults.md.")
    parser.add_argument("seeds", nargs="*", type=int, default=[0], help="one run for each")
    parser.add_argument("--only-table", action="store_true", help="write the page, run nothing")
    arguments = parser.parse_args()
    rows, console = collect(), Console()
    if not arguments.only_table:
        runs = {seed: run(seed, console) for seed in arguments.seeds}
        console.rule(f"{len(rows)} cases")
        for seed, results in runs.items():
            console.print(f"seed {seed}: {results}")
            for name in results.failed + results.hung:
                console.print(f"  {name}", markup=False)
        if any(results.failed or results.hung for results in runs.values()):
            sys.exit(1)
    write(rows)
    console.print("wrote the tables of docs/faults.md")


if __name__ == "__main__":
    main()
