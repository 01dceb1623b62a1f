"""Claims about figures: that one is within a bound, or less than another."""

from bench.harness.claim import Claim


def at_most(
    text: str, ours: float, bound: float, form: str = "{:.2f} x", of: str = "", source: str = ""
) -> Claim:
    """``form`` shows both figures, ``of`` tells what ours is about."""
    said = f"{form.format(ours)} {of}".rstrip()
    return Claim(text, f"at most {form.format(bound)}", said, bool(ours <= bound), source)


def at_least(
    text: str, ours: float, bound: float, form: str = "{:.2f} x", of: str = "", source: str = ""
) -> Claim:
    said = f"{form.format(ours)} {of}".rstrip()
    return Claim(text, f"at least {form.format(bound)}", said, bool(ours >= bound), source)


def less(
    text: str, ours: float, theirs: float, form: str = "{:.3f}", paper: str = "lower"
) -> Claim:
    said = f"{form.format(ours)} against {form.format(theirs)}"
    return Claim(text, paper, said, bool(ours < theirs))
