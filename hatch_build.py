"""The README as a package index shows it: no link of it leads to a file that the index lacks."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = r"\[([^\]]+)\]\((?!https?://)([^)]*)\)"


class Readme(MetadataHookInterface):
    """Links lead to the repository; without its address they are text, and images are left out."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        text = Path(self.root, "README.md").read_text("utf-8")
        source = metadata["urls"].get("Source", "")
        image, link = "", r"\1"
        if source:
            image, link = rf"![\1]({source}/raw/main/\2)\n\n", rf"[\1]({source}/blob/main/\2)"
        text = re.sub(LINK, link, re.sub(rf"!{LINK}\n*", image, text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
