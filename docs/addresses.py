"""Takes the addresses of the site and of its source from [project.urls] of pyproject.toml.

A hook of mkdocs, named in mkdocs.yml. Without them a site has no social cards, and no links that
edit a page.
"""

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority


@event_priority(100)  # before mike, which appends the version
def on_config(config: Any) -> None:
    """Set both addresses."""
    project = Path(config["config_file_path"]).with_name("pyproject.toml")
    urls = tomllib.loads(project.read_text("utf-8"))["project"]["urls"]
    if "Documentation" in urls:
        config["site_url"] = urls["Documentation"].rstrip("/") + "/"
    if "Source" in urls:
        config["edit_uri"] = urls["Source"] + "/edit/main/docs/"
