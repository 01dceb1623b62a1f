"""What was measured of all methods in one run, from which a plan predicts it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from typer import BadParameter

from bench.harness import files
from bench.harness.ranks import on_nodes
from bench.harness.report import DRAWN_DIGITS, plain
from bench.harness.step_times import Timed
from bench.plan.cells import Layout, Links, measure
from offbeat.lab.network.links import LinkOptions
from offbeat.plan import Parameter, Profile, Speeds


@dataclass(frozen=True)
class Recorded:
    """Seconds of a step by method, beside the links and the step of a rank alone.

    ``options`` are those of links in the lab, beside their rate.
    """

    layout: Layout
    rate: str
    links: Links
    profile: Profile
    seconds: dict[str, float]
    options: LinkOptions = field(default_factory=LinkOptions)

    @classmethod
    def run(
        cls, methods: Sequence[Timed], layout: Layout, rate: str, links: Links, speeds: Speeds,
        options: LinkOptions | None = None,
    ) -> "Recorded":  # fmt: skip
        """Measure the methods."""
        where, far = (layout.nodes, layout.each, rate), options or LinkOptions()
        profile, times = on_nodes(measure, ([*methods], layout), *where, **far)
        seconds = {m.name: time.step for m, time in zip(methods, times, strict=True)}
        return cls(layout, rate, links, replace(profile, speeds=speeds), seconds, far)

    def named(self, method: str) -> str:
        """Return what ``--only`` looks in."""
        options = [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([f"{method} on {self.layout} at {self.rate}", *options])

    def again(self, methods: Sequence[Timed], only: str = "") -> "Recorded":
        """Measure the methods that have ``only`` in their names here once more.

        The least of both counts, since other load on the machine can only add time.
        """
        among = [method for method in methods if only in self.named(method.name)]
        if not among:
            return self
        given = self.layout, self.rate, self.links, self.profile.speeds, self.options
        found = Recorded.run(among, *given)
        least = {name: min(self.seconds[name], new) for name, new in found.seconds.items()}
        alone = min((self.profile, found.profile), key=lambda profile: profile.compute)
        return replace(self, seconds=self.seconds | least, profile=alone)

    @classmethod
    def read(cls, written: dict[str, Any]) -> "Recorded":
        layout, links = Layout(**written["layout"]), Links(**written["links"])
        layers = tuple(Parameter(**each) for each in written["profile"]["parameters"])
        made = {
            "parameters": layers,
            "speeds": Speeds(**written["profile"]["speeds"]),
            "spread": (),
        }
        profile = Profile(**written["profile"] | made)
        options = written.get("options", {})
        return cls(layout, written["rate"], links, profile, written["seconds"], options)

    @property
    def crowded(self) -> Profile:
        """The profile of a rank beside all others, on the cores of one machine."""
        speeds = self.profile.speeds.faster(1 / self.links.share(self.layout))
        return replace(self.profile, speeds=speeds)


def recorded(name: str) -> list[Recorded]:
    """Return the runs of the last result. Raises if it has kept none."""
    written = json.loads(files.result(name).read_text("utf-8"))
    if "picture" not in written:
        raise BadParameter(f"the result of {name} has kept no runs; measure it, without --again")
    return [Recorded.read(json.loads(text)) for text in written["picture"]["runs"]]


def kept(runs: list[Recorded]) -> dict[str, list[str]]:
    """Return what :func:`recorded` reads, a line for each run."""
    return {"runs": [json.dumps(plain(asdict(run), DRAWN_DIGITS)) for run in runs]}
