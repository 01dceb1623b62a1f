"""Far nodes in plans: windows of TCP, loss, connections and sites."""

import json
from pathlib import Path

import numpy as np
import pytest
from clusters import profile, seconds
from hypothesis import given
from hypothesis import strategies as st
from test_command import plan, write
from test_model import METHODS

from offbeat.lab.check import PAYLOAD
from offbeat.lab.network.links import Links
from offbeat.plan import Fabric, Speeds
from offbeat.plan.clocks import Clocks
from offbeat.plan.sites import Sites
from offbeat.plan.windows import FIRST, PATIENCE, SEGMENT, Windows, lossy

FAR = {"rate": 1e8, "latency": 50e-3}
NEAR = 1e-4  # seconds inside a site


@given(
    nbytes=st.integers(1, 10**8), idle=st.floats(0.0, 100.0), before=st.floats(FIRST, 1e8),
    trip=st.floats(0.01, 0.3),
)  # fmt: skip
def test_windows_grow_by_what_is_confirmed_and_halve_while_idle(
    nbytes: int, idle: float, before: float, trip: float
) -> None:
    windows = Windows(before)
    waited = windows.wait(idle, nbytes, 0.0, trip, float("inf"))
    # Packets of one round trip after the other, as the kernel counts them.
    window, quiet = before, idle - (trip + PATIENCE)
    while quiet >= 0 and window > FIRST:
        window, quiet = max(FIRST, window / 2), quiet - (trip + PATIENCE)
    left, sent, at_once, trips = nbytes, 0.0, 0.0, -1
    while left > 0:
        sent, trips = min(window, left), trips + 1
        left, at_once = left - sent, max(at_once, sent)
        window = max(window, min(window + sent, 2 * at_once))
    assert waited == pytest.approx(trips * trip)
    assert windows.size == pytest.approx(window)


def test_a_lossy_connection_carries_a_mean_window_in_a_round_trip() -> None:
    for loss in (1e-4, 1e-3, 1e-2):
        most = lossy(loss, 0.1)
        assert most >= (1 - 1e-9) * 1.22 * SEGMENT / loss**0.5
        waited = Windows().wait(0.0, 1e9, 8.0, 0.1, most)
        assert 8.0 + waited == pytest.approx(1e9 / most * 0.1, rel=0.02)
    assert lossy(0.0, 0.1) == float("inf")


def test_messages_of_two_rings_that_meet_on_a_far_link_pass_one_after_the_other() -> None:
    """By hand, two nodes 100 ms apart: a word of the receive and a message in each of two hops."""
    fabric = Fabric(nodes=2, rate=8e6 / PAYLOAD, latency=0.1)
    second_of = 1e-6  # of a byte

    def ends(later: float, nbytes: float) -> list[float]:
        clocks = Clocks(fabric, profile(40_000))
        clocks.windows["world", 1].size = 1e9  # in use for long
        rings = [(0.0, 80_000), (later, nbytes)]
        zeros = np.zeros_like(clocks.now)
        return [float(clocks.ring(zeros + at, size, "world", 2).max()) for at, size in rings]

    def alone(nbytes: float) -> float:  # halves, of which the second comes right after the first
        return 2 * (0.2 + second_of * nbytes)

    assert ends(0.03, 40_000) == pytest.approx([alone(80_000), 0.03 + alone(40_000) + 0.05 + 0.04])
    assert ends(0.15, 40_000) == pytest.approx([alone(80_000), 0.15 + alone(40_000)])


def test_rings_over_connections_that_lose_packets_pass_one_after_the_other() -> None:
    """Two at once have the windows of one."""
    clocks = Clocks(Fabric(nodes=2, rate=1e9, latency=0.05, loss=0.001), profile(40_000))
    zeros = np.zeros_like(clocks.now)
    first, second = (float(clocks.ring(zeros, 4e6, "world", 2).max()) for _ in range(2))
    assert first > 8e6 / lossy(0.001, 0.1) * 0.1
    assert second == pytest.approx(2 * first, rel=0.01)


@pytest.mark.parametrize("text", METHODS)
def test_two_sites_of_one_node_are_two_far_nodes(text: str) -> None:
    found = profile(40_000, 300_000, 500, speeds=Speeds.of_bandwidth(1e10))
    apart = Fabric(nodes=2, rate=FAR["rate"], latency=FAR["latency"] + NEAR)
    links = Links.parse(sites=(1, 1), between=["50ms@100mbit"])
    near = Fabric(nodes=2, rate=1e15, latency=NEAR, sites=Sites.of(links))
    assert seconds(text, found, near) == pytest.approx(seconds(text, found, apart), rel=1e-4)


@pytest.mark.parametrize("text", METHODS)
def test_nodes_of_sites_share_the_link_between_them(text: str) -> None:
    found = profile(40_000, 3_000_000, 500)

    def step(rate: str, latency: str) -> float:
        links = Links.parse(sites=(2, 3), between=[f"{latency}@{rate}"])
        return seconds(text, found, Fabric(nodes=5, rate=1e9, sites=Sites.of(links)))

    times = [step("1gbit", "10ms"), step("100mbit", "10ms"), step("100mbit", "50ms")]
    assert times == sorted(times)
    if text not in ("alone", "ad_psgd"):
        assert times[0] < times[2]


def test_all_messages_of_one_time_divide_the_link_of_two_sites() -> None:
    sites = Sites.of(Links.parse(sites=(2, 2), between=["50ms@100mbit"]))
    assert sites is not None
    one = sites.between(np.array([0]), np.array([2]))[1][0]
    both = sites.between(np.array([0, 1, 2]), np.array([2, 3, 0]))[1]
    assert both == pytest.approx([2 * one, 2 * one, one])  # the way back is another


def test_pairs_of_gossip_take_turns_on_the_link_of_two_sites() -> None:
    found = profile(500_000)
    message = 4 * 500_000 + 16

    def step(rate: str, nic: float = 1e12) -> float:
        links = Links.parse(sites=(2, 2), between=[f"10ms@{rate}"])
        return seconds("d_psgd", found, Fabric(nodes=4, rate=nic, sites=Sites.of(links)))

    # Two messages pass in each direction, and one of them while the others compute.
    passing = 8 * message / PAYLOAD / 100e6
    assert step("100mbit") == pytest.approx(0.35 + 0.02 + passing, rel=0.05)
    slow = 8 * message / PAYLOAD / 10e6  # where the link is never idle
    assert step("10mbit") == pytest.approx(2 * slow, rel=0.05)
    near = seconds("d_psgd", found, Fabric(nodes=4, rate=1e9, latency=0.01 + 1e-4))
    assert step("100gbit", 1e9) == pytest.approx(near, rel=0.01)  # the links of nodes decide


@pytest.mark.parametrize(
    "text",
    ["ddp(wire='bf16')", "adasum", "diloco(every=2, wire='int8')", "daso(total_steps=20)"],
)
def test_a_link_of_near_sites_carries_the_bytes_of_staged_exchanges(text: str) -> None:
    """Below the distance from which messages leave all at once."""

    def step(way: str, each: int = 1) -> float:
        sites = Sites.of(Links.parse(sites=(2, 2), between=[way]))
        where = Fabric(nodes=4, ranks_per_node=each, rate=1e9, sites=sites, inside_rate=1e13)
        return seconds(text, profile(500_000), where)

    slow, far, free = step("4.9ms@20mbit"), step("5.1ms@20mbit"), step("4.9ms@100gbit")
    assert slow - 0.35 > 5 * (free - 0.35)  # beside the time of computing
    assert far / 2.5 < slow < 2.5 * far
    # Of eight ranks on a node one has the means of daso and slices of the others: all send as much.
    if text.startswith("daso"):
        assert step("1ms@100gbit", 8) == pytest.approx(step("1ms@100gbit"), rel=0.05)


@pytest.mark.parametrize("text", ["ddp(bucket_mb=100)", "sgp", "diloco(every=2)"])
def test_connections_gain_where_packets_are_lost_and_cost_nothing_near(text: str) -> None:
    found = profile(2_000_000)
    far = [Fabric(nodes=2, loss=1e-3, connections=count, **FAR) for count in (1, 8)]
    one, wide = (seconds(text, found, each) - 0.35 for each in far)
    assert one > 4 * wide
    near = [Fabric(nodes=2, rate=1e9, connections=count) for count in (1, 8)]
    assert seconds(text, found, near[0]) == seconds(text, found, near[1])


def test_sites_are_planned_from_the_command_line(tmp_path: Path) -> None:
    words = ["--profile", str(write(tmp_path)), "--algorithms", "ddp,diloco(every=10)"]
    far = ["--sites", "2,3", "--between", "50ms@100mbit", "--loss", "0.1%", "--connections", "8"]
    done = plan(*words, *far, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [row["nodes"] for row in found["rows"]] == [5, 5]
    assert found["setup"]["sites"] == "2, 3 nodes, 100 Mbit/s, 50 ms one way"
    assert (found["setup"]["loss"], found["setup"]["connections"]) == (0.001, 8)
    assert found["rows"][0]["prediction"]["seconds"] > 8 * 2 * 0.05
    shown = plan(*words, *far)
    assert "sites of 2, 3 nodes" in " ".join(shown.output.split())
    for wrong, message in (
        (["--between", "50ms@100mbit"], "sites: got none, expected the nodes of at least two"),
        (["--sites", "2,x", "--between", "50ms"], "sites: got '2,x', expected the number of nodes"),
        ([*far, "--nodes", "4"], "nodes=4, expected the 5 of the sites"),
        (["--connections", "0"], "connections=0, expected a whole number of connections, 1 or"),
    ):
        failed = plan(*words, *wrong)
        assert failed.exit_code == 2
        assert message in failed.output
