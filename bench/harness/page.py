"""The tables of the documentation, written from the committed results.

A block of a page between ``<!-- table: NAME -->`` and ``<!-- end -->`` holds the measurements of
a benchmark, one that begins with ``<!-- claims: NAME -->`` the verdicts on its claims. Columns are
chosen by their number, rows by a regular expression on their cells:
``<!-- table: NAME columns=1,3,4 rows=250mbit -->``. Where a benchmark that needs a GPU has no
result, the block says so. A block ``<!-- benches: all -->`` lists all benchmarks page by page, with
links to the sections that have their modules' names as ids. A block ``<!-- evidence: all -->`` sums
up the papers' claims.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.harness import claim, evidence, files
from bench.harness.catalogue import Bench, benches
from bench.harness.claim import Claim
from bench.harness.report import Row, markdown

UNMEASURED = "Not yet measured."
LISTED = ("page", "benchmarks, and their statements that hold")
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|claims|benches|evidence): (?P<name>\S+)"
    r"(?: columns=(?P<columns>[\d,]+))?(?: rows=(?P<rows>\S+))? -->)"
    r".*?<!-- end -->",
    re.DOTALL,
)


def rewrite() -> list[Path]:
    """Write all tables anew; the pages that have changed.

    Raises ValueError for a table of a benchmark that has no result.
    """
    old = {path: path.read_text("utf-8") for path in files.PAGES}
    new = {path: BLOCK.sub(_block, text) for path, text in old.items()}
    changed = [path for path in files.PAGES if new[path] != old[path]]
    for path in changed:
        path.write_text(new[path], encoding="utf-8")
    return changed


def _block(found: re.Match[str]) -> str:
    columns = [int(c) - 1 for c in (found["columns"] or "").split(",") if c]
    if found["kind"] == "benches":
        content = _benches()
    elif found["kind"] == "evidence":
        content = _evidence(columns)
    else:
        content = _measured(found, columns)
    return f"{found['begin']}\n\n{content}\n<!-- end -->"


def _measured(block: re.Match[str], columns: Sequence[int]) -> str:
    name, is_table = block["name"], block["kind"] == "table"
    bench = next((each for each in benches() if each.name == name), Bench(name=name, minutes=0))
    result = evidence.result(bench)
    if result is None and bench.gpu:
        return f"{UNMEASURED}\n"
    if result is None:
        raise ValueError(f"a table of {name}, which has no result; run it first")
    headings = result["headings"] if is_table else claim.HEADINGS
    rows = result["rows"] if is_table else [Claim(**each).row for each in result["claims"]]
    chosen = [row for row in rows if re.search(block["rows"] or "", " | ".join(row))]
    return markdown(_chosen(headings, columns), [_chosen(row, columns) for row in chosen])


def _benches() -> str:
    pages: dict[str, list[str]] = defaultdict(list)
    for bench in benches():
        pages[bench.name.split("/")[0]].append(_listed(bench))
    rows = [(f"[{folder}]({folder}.md)", ", ".join(found)) for folder, found in pages.items()]
    return markdown(LISTED, rows)


def _listed(bench: Bench) -> str:
    folder, module = bench.name.split("/")
    here = [each for each in evidence.claims(bench) if not each.needs]
    counted = f"{sum(each.holds for each in here)}/{len(here)}" if here else UNMEASURED
    return f"[{module}]({folder}.md#{module}) {counted.rstrip('.').lower()}"


def _evidence(columns: Sequence[int]) -> str:
    found = evidence.collect()
    rows = [_chosen(each.row, columns) for each in found]
    return f"{evidence.counted(found)}\n\n{markdown(_chosen(evidence.HEADINGS, columns), rows)}"


def _chosen(row: Row, columns: Sequence[int]) -> Row:
    return [row[column] for column in columns] if columns else row
