"""``offbeat lab --check``: measurements of the links, with Gloo and packet by packet."""

from offbeat.lab.check.measure import measure_links, require_two_nodes
from offbeat.lab.check.measurements import PAYLOAD, LinkMeasurements, PathMeasurement

__all__ = [
    "PAYLOAD",
    "LinkMeasurements",
    "PathMeasurement",
    "measure_links",
    "require_two_nodes",
]
