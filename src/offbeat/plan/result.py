"""A plan as plain data: the predictions for all methods and numbers of nodes."""

import json
from dataclasses import asdict, dataclass
from typing import final

from offbeat.plan.fabric import Fabric
from offbeat.plan.predict import Prediction
from offbeat.plan.profile import Profile
from offbeat.plan.worth import Worth


@final
@dataclass(frozen=True)
class Setup:
    """The conditions that all predictions have in common; rates in bit/s, times in seconds."""

    profile: str
    numel: int
    nbytes: int
    compute: float
    memory: int | None
    ranks_per_node: int
    rate: float
    latency: float
    inside_rate: float
    full_duplex: bool
    loss: float
    connections: int
    sites: str
    jitter: str
    late: str
    straggler: str
    device_factor: float

    @classmethod
    def of(
        cls,
        name: str,
        profile: Profile,
        fabric: Fabric,
        stragglers: tuple[str, str, str],
        device_factor: float,
    ) -> "Setup":
        """Describe a profile and a network.

        ``stragglers`` are jitter, late steps and the slow rank as text.
        """
        links = ["ranks_per_node", "rate", "latency", "inside_rate", "full_duplex"]
        links += ["loss", "connections"]
        alone = ("numel", "nbytes", "compute", "memory")
        return cls(
            profile=name,
            jitter=stragglers[0],
            late=stragglers[1],
            straggler=stragglers[2],
            sites="none" if fabric.sites is None else str(fabric.sites),
            device_factor=device_factor,
            **{field: getattr(profile, field) for field in alone},
            **{field: getattr(fabric, field) for field in links},
        )


@final
@dataclass(frozen=True)
class Row:
    """The prediction for one method and number of nodes.

    ``faster`` is the baseline's time of a step divided by this method's; ``worth``: what its steps
    are worth, where it was measured.
    """

    name: str
    nodes: int
    faster: float
    prediction: Prediction
    worth: Worth | None = None


@final
@dataclass(frozen=True)
class Plan:
    """Holds the predictions of ``offbeat plan``, in the order of methods.

    ``at`` is the number of nodes that is shown in detail.
    """

    setup: Setup
    nodes: tuple[int, ...]
    at: int
    baseline: str
    rows: tuple[Row, ...]
    recommended: str
    reason: str

    def of(self, nodes: int) -> list[Row]:
        """Return the rows for a number of nodes."""
        return [row for row in self.rows if row.nodes == nodes]

    def to_json(self) -> str:
        """Return all fields as JSON text."""
        return json.dumps(asdict(self), indent=2)
