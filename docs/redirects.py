"""Leads from the former addresses of renamed pages to the present ones.

A hook of mkdocs, named in mkdocs.yml. A page that is renamed gets a line below.
"""

from pathlib import Path
from typing import Any

FORMER = {"hogwild": "methods/hogwild", "recipes": "methods"}


def on_post_build(config: Any, **_: Any) -> None:
    """Write a page at each former address; fail if the present one leads nowhere."""
    site = Path(config["site_dir"])
    for former, page in FORMER.items():
        (site / page / "index.html").resolve(strict=True)
        folder = site / former
        folder.mkdir(parents=True)  # a page of that name would be an error
        to = f"{'../' * (former.count('/') + 1)}{page}/"
        (folder / "index.html").write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={to}">\n'
            f'<link rel="canonical" href="{to}"><a href="{to}">{page}</a>\n'
        )
