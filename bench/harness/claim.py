"""A statement of a paper, or a goal, and whether the measurements agree."""

from dataclasses import dataclass

from bench.harness.effect import SHARE, Effect

HEADINGS = ("claim", "paper or goal", "ours", "holds")
GOAL = "goal"  # the source of a claim that no paper makes


@dataclass(frozen=True)
class Claim:
    """The paper's figure, ours, and whether the claim holds."""

    text: str
    paper: str
    ours: str
    holds: bool
    source: str = ""  # a table or figure of the paper; "": the only one of its bench
    needs: str = ""  # hardware without which it cannot be shown
    share: float | None = None  # of the paper's effect; None: an order or a bound, not an effect

    @classmethod
    def effect(cls, text: str, paper: Effect, ours: Effect, source: str = "") -> "Claim":
        """Ours must be a third of the paper's effect, and more than noise."""
        share = ours.gain / paper.gain
        holds = share >= SHARE and ours.is_beyond_noise
        return cls(text, str(paper), str(ours), holds, source, share=share)

    @property
    def row(self) -> tuple[str, str, str, str]:
        """A line of the table of verdicts."""
        verdict = "yes" if self.holds else "NO"
        return self.text, self.paper, self.ours, f"needs {self.needs}" if self.needs else verdict
