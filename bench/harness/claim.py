"""A statement of a paper, or a goal, and whether the measurements agree."""

from dataclasses import dataclass

HEADINGS = ("claim", "paper or goal", "ours", "holds")


@dataclass(frozen=True)
class Claim:
    """The paper's figure, ours, and whether the claim holds."""

    text: str
    paper: str
    ours: str
    holds: bool
    source: str = ""  # a table or figure of the paper; "": the only one of its bench
    needs: str = ""  # hardware without which it cannot be shown

    @property
    def row(self) -> tuple[str, str, str, str]:
        """A line of the table of verdicts."""
        verdict = "yes" if self.holds else "NO"
        return self.text, self.paper, self.ours, f"needs {self.needs}" if self.needs else verdict
