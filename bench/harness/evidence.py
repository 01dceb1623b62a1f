"""The papers' claims: what each table or figure says, and whether it is shown here.

A bench declares the tables and figures that it measures beside its name (``Bench.evidence``), and
its result holds the statements about each.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
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
    """One of the papers' claims, and the statements of results about it."""

    where: str  # the paper, and its table or figure
    text: str  # what it says
    section: str  # of the pages
    claims: list[Claim]
    measured: str  # the day of the oldest result, "" without any

    @property
    def here(self) -> list[Claim]:
        """The statements that this hardware can show."""
        return [claim for claim in self.claims if not claim.needs]

    @property
    def verdict(self) -> str:
        """Shown if all statements hold, partly if some do."""
        if not self.here:
            return ELSEWHERE if self.claims else UNKNOWN
        held = sum(claim.holds for claim in self.here)
        return {0: NOT_SHOWN, len(self.here): SHOWN}.get(held, PARTLY)

    @property
    def row(self) -> Row:
        """A line of the summary, with the figures of its first effect, or else first statement."""
        candidates = [*self.here, *self.claims, Claim("", "", "", False)]
        first = next((c for c in candidates if c.share is not None), candidates[0])
        held = sum(claim.holds for claim in self.here)
        counted = f", {held} of {len(self.here)}" if self.verdict == PARTLY else ""
        said = f"[{self.where}](benchmarks/{self.section}): {self.text}"
        return said, first.paper, first.ours, f"{self.verdict}{counted}"


def collect() -> list[Evidence]:
    """All claims, paper by paper, with what the results say about them."""
    measuring: dict[tuple[str, str], list[Bench]] = defaultdict(list)
    for bench in benches():
        for source in bench.evidence:
            measuring[bench.name.split("/")[0], source].append(bench)
    order = list(PAPERS)
    keys = sorted(measuring, key=lambda key: (order.index(key[0]), key[1]))
    return [_about(*key, measuring[key]) for key in keys]


def _about(method: str, source: str, behind: list[Bench]) -> Evidence:
    """What one of the benches says, and the results of all; by default a claim has one source."""
    text = next(filter(None, (bench.evidence[source] for bench in behind)))
    section = f"{method}.md#{behind[0].name.split('/')[1]}"
    found = [
        claim
        for bench in behind
        for claim in claims(bench)
        if (claim.source or (source if len(bench.evidence) == 1 else "")) == source
    ]
    days = [made["date"][:10] for bench in behind if (made := result(bench))]
    return Evidence(f"{PAPERS[method]}, {source}", text, section, found, min(days, default=""))


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
