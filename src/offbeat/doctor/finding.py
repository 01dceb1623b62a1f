"""What a check found, and the report of all checks."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Literal, final

from rich.markup import escape
from rich.table import Table

Verdict = Literal["ok", "note", "warning", "error"]
_STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "error": "bold red"}


@final
@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        verdict: "ok"; "note" for what is missing and optional; "warning" for what makes training
            slow; "error" for what makes it fail.
        found: what was found.
        fix: what to do about it, and which methods suffer.
        ranks: the ranks that found it, or about which it is; empty for all.
    """

    check: str
    verdict: Verdict
    found: str
    fix: str = ""
    ranks: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks, and the measured links between ranks."""

    findings: Sequence[Finding]
    links: Sequence[Any] = ()  # dataclasses

    @property
    def has_errors(self) -> bool:
        """Whether training would fail."""
        return any(finding.verdict == "error" for finding in self.findings)

    def to_json(self) -> str:
        """Return all fields as JSON text."""
        parts = {"findings": self.findings, "links": self.links}
        return json.dumps({k: [*map(asdict, v)] for k, v in parts.items()}, indent=2)

    def table(self) -> Table:
        """Return a table with a row for each finding."""
        table = Table("check", "verdict", "found, and what to do", title="offbeat doctor")
        for (check, verdict, fix), group in groupby(
            self.findings, lambda each: (each.check, each.verdict, each.fix)
        ):
            lines = [_of(each.ranks) + each.found for each in group] + [f"-> {fix}"] * bool(fix)
            table.add_row(check, f"[{_STYLES[verdict]}]{verdict}[/]", escape("\n".join(lines)))
        return table


def merge(found: Sequence[Iterable[Finding]]) -> list[Finding]:
    """Merge the findings of all ranks: equal ones become one, with the ranks that made it.

    >>> same, other = Finding("torch", "ok", "2.13.0"), Finding("torch", "ok", "2.14.0")
    >>> [(each.found, each.ranks) for each in merge([[same], [other], [same]])]
    [('2.13.0', (0, 2)), ('2.14.0', (1,))]
    """
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(found):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    order = list(dict.fromkeys(finding.check for finding in ranks))
    merged = [
        replace(finding, ranks=tuple(of) if len(of) < len(found) else ())
        for finding, of in ranks.items()
    ]
    return sorted(merged, key=lambda finding: order.index(finding.check))


def _of(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}: "
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
