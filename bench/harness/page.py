"""The tables of the documentation, written from the committed results.

A block of a page between ``<!-- table: NAME -->`` and ``<!-- end -->`` holds the measurements of
a benchmark, one that begins with ``<!-- claims: NAME -->`` the verdicts on its claims. Columns are
chosen by their number, rows by a regular expression on their cells:
``<!-- table: NAME columns=1,3,4 rows=250mbit -->``. Where a benchmark that needs a GPU has no
result, the block says so. A block ``<!-- evidence: all -->`` sums up the papers' claims; with a
method's name it holds the statements of its paper.
"""

import json
import re
from collections.abc import Sequence

from bench.harness import claim, evidence, files
from bench.harness.catalogue import benches
from bench.harness.claim import Claim
from bench.harness.table import Row, markdown

UNMEASURED = "Not yet measured."
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|claims|evidence): (?P<name>\S+)"
    r"(?: columns=(?P<columns>[\d,]+))?(?: rows=(?P<rows>\S+))? -->)"
    r".*?<!-- end -->",
    re.DOTALL,
)


def rewrite() -> bool:
    """Write all tables anew; whether a page has changed.

    Raises ValueError for a table of a benchmark that has no result.
    """
    old = [path.read_text("utf-8") for path in files.PAGES]
    new = [BLOCK.sub(_block, text) for text in old]
    for path, text in zip(files.PAGES, new, strict=True):
        path.write_text(text, encoding="utf-8")
    return new != old


def _block(found: re.Match[str]) -> str:
    if found["kind"] == "evidence":
        return f"{found['begin']}\n\n{_evidence(found['name'])}\n<!-- end -->"
    path = files.RESULTS / f"{found['name']}.json"
    if not path.exists():
        if any(bench.gpu for bench in benches() if bench.name == found["name"]):
            return f"{found['begin']}\n\n{UNMEASURED}\n\n<!-- end -->"
        raise ValueError(f"a table of {found['name']}, which has no result; run it first")
    result = json.loads(path.read_text("utf-8"))
    if found["kind"] == "claims":
        headings, rows = claim.HEADINGS, [Claim(**each).row for each in result["claims"]]
    else:
        headings, rows = result["headings"], result["rows"]
    rows = [row for row in rows if re.search(found["rows"] or "", " | ".join(row))]
    columns = [int(c) - 1 for c in (found["columns"] or "").split(",") if c]
    table = markdown(_chosen(headings, columns), [_chosen(row, columns) for row in rows])
    return f"{found['begin']}\n\n{table}\n<!-- end -->"


def _evidence(name: str) -> str:
    found = evidence.collect()
    if name == "all":
        table = markdown(evidence.HEADINGS, [each.row for each in found])
        return f"{evidence.counted(found)}\n\n{table}"
    mine = [each for each in found if each.method == name]
    return markdown(evidence.DETAILS, [row for each in mine for row in each.details])


def _chosen(row: Row, columns: Sequence[int]) -> Row:
    return [row[column] for column in columns] if columns else row
