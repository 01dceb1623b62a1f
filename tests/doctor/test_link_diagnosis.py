"""What measured links mean: each cause is named, with the ranks and the methods that suffer."""

from dataclasses import replace
from itertools import permutations

import pytest

from offbeat.doctor.diagnosis import diagnose
from offbeat.doctor.finding import Finding, Report
from offbeat.doctor.probe import Link

HEALTHY = [
    Link(a, b, mbit=9400.0, round_trip_ms=0.2, ahead_ms=1.0) for a, b in permutations(range(4), 2)
]


def found(links: list[Link]) -> dict[str, Finding]:
    """The findings other than "ok", by check."""
    return {each.check: each for each in diagnose(links, "1-2") if each.verdict != "ok"}


def test_healthy_links_have_no_remarks() -> None:
    assert not found(HEALTHY)
    assert {each.check for each in diagnose(HEALTHY, "1-2")} == {"rate", "round trip", "clocks"}


def test_a_block_in_one_direction_is_told_from_one_in_both() -> None:
    def block(*ways: tuple[int, int]) -> Finding:
        links = [replace(x, error="x") if (x.source, x.target) in ways else x for x in HEALTHY]
        return found(links)["connection"]

    assert "rank 1 cannot connect to rank 2" in block((1, 2)).found
    assert "other direction works" in block((1, 2)).found
    assert "other direction" not in block((1, 2), (2, 1)).found
    assert "on ports 1-2" in block((1, 2)).fix
    assert Report([block((1, 2))]).has_errors


@pytest.mark.parametrize("verb", ["sends", "receives"])
def test_a_slow_rank_is_named_with_its_direction(verb: str) -> None:
    end = "source" if verb == "sends" else "target"
    links = [replace(x, mbit=10.0) if getattr(x, end) == 3 else x for x in HEALTHY]
    assert found(links)["rate"].found == f"rank 3 {verb} 10 Mbit/s, others 9.4 Gbit/s"


def test_what_is_slow_everywhere_names_the_methods_that_suffer() -> None:
    links = [replace(x, mbit=100.0, round_trip_ms=80.0, ahead_ms=-5000.0) for x in HEALTHY]
    remarks = found(links)
    assert "ddp and adasum suffer" in remarks["rate"].fix
    assert "wait for several messages" in remarks["round trip"].fix
    assert "5.00 s apart" in remarks["clocks"].found
    assert not Report([*remarks.values()]).has_errors
