"""``offbeat lab --check``: measurements of the links, with Gloo and packet by packet."""

from offbeat.lab.check.measure import (
    PAYLOAD,
    LinkMeasurements,
    measure_links,
    require_two_nodes,
)
from offbeat.lab.check.paths import PathMeasurement

__all__ = [
    "PAYLOAD",
    "LinkMeasurements",
    "PathMeasurement",
    "measure_links",
    "require_two_nodes",
]
