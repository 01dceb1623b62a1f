"""The papers' claims: what each table or figure says, and whether it is shown here.

A bench declares the tables and figures that it measures beside its name (``Bench.evidence``), and
its result holds the statements about each.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.harness import files
from bench.harness.catalogue import Bench, benches
from bench.harness.claim import Claim
from bench.harness.report import Row

PAPERS = {
    "adasum": "Adasum",
    "sgp": "SGP",
    "daso": "DASO",
    "lags": "LAGS-SGD",
    "async_adam": "Asynchronous Adam",
}
SHOWN, PARTLY, NOT_SHOWN = "shown", "partly", "not shown"
ELSEWHERE, UNKNOWN = "needs other hardware", "not yet measured"
VERDICTS = (SHOWN, PARTLY, NOT_SHOWN, ELSEWHERE, UNKNOWN)
HEADINGS = ("claim", "the paper", "ours", "verdict")


@dataclass(frozen=True)
class Evidence:
    """One of the papers' claims, and the benches behind it."""

    method: str  # the folder of its benches
    source: str
    benches: list[Bench]

    @property
    def text(self) -> str:
        """What the table or figure says; one of its benches tells."""
        return next(filter(None, (bench.evidence[self.source] for bench in self.benches)))

    @cached_property
    def claims(self) -> list[Claim]:
        """The statements of the benches' results that are about the table or figure."""
        return [
            claim
            for bench in self.benches
            for claim in claims(bench)
            if (claim.source or (self.source if len(bench.evidence) == 1 else "")) == self.source
        ]

    @cached_property
    def here(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.needs]

    @property
    def held(self) -> int:
        return sum(claim.holds for claim in self.here)

    @property
    def verdict(self) -> str:
        """Shown if all statements hold, partly if some do."""
        if not self.here:
            return ELSEWHERE if self.claims else UNKNOWN
        return {0: NOT_SHOWN, len(self.here): SHOWN}.get(self.held, PARTLY)

    @property
    def where(self) -> str:
        return f"{PAPERS[self.method]}, {self.source}"

    @property
    def measured(self) -> str:
        """The day of the oldest of its results."""
        days = [found["date"][:10] for bench in self.benches if (found := result(bench))]
        return min(days, default="")

    @property
    def row(self) -> Row:
        """A line of the summary, with the figures of its first effect, or else first statement."""
        candidates = [*self.here, *self.claims, Claim("", "", "", False)]
        first = next((c for c in candidates if c.share is not None), candidates[0])
        counted = f", {self.held} of {len(self.here)}" if self.verdict == PARTLY else ""
        folder, module = self.benches[0].name.split("/")
        said = f"[{self.where}](benchmarks/{folder}.md#{module}): {self.text}"
        return said, first.paper, first.ours, f"{self.verdict}{counted}"


def collect() -> list[Evidence]:
    """All claims, paper by paper, with what the results say about them."""
    measuring: dict[tuple[str, str], list[Bench]] = defaultdict(list)
    for bench in benches():
        for source in bench.evidence:
            measuring[bench.name.split("/")[0], source].append(bench)
    order = list(PAPERS)
    found = sorted(measuring, key=lambda key: (order.index(key[0]), key[1]))
    return [Evidence(*key, measuring[key]) for key in found]


def claims(bench: Bench) -> list[Claim]:
    """All statements of the bench's result."""
    return [Claim(**each) for each in (result(bench) or {"claims": []})["claims"]]


def result(bench: Bench) -> dict[str, Any] | None:
    path = files.RESULTS / f"{bench.name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def due(since: str = "", again: bool = False) -> list[Bench]:
    """The benches behind claims without a result, with one from before a date, or all."""

    def is_due(bench: Bench) -> bool:
        found = result(bench)
        return again or found is None or found["date"] < since

    return [bench for bench in benches() if bench.evidence and is_due(bench)]


def counted(found: list[Evidence]) -> str:
    """How many claims have each verdict, and when the results were measured."""
    of = [evidence.verdict for evidence in found]
    counts = [f"{of.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in of]
    days = sorted(filter(None, (evidence.measured for evidence in found)))
    when = f" Measured from {days[0]} to {days[-1]}." if days else ""
    return f"Of {len(found)} claims: {', '.join(counts)}.{when}"
