"""Links: what the options mean, and the commands for tc."""

import re

import pytest

from offbeat.lab import Lab
from offbeat.lab.network import shaping
from offbeat.lab.network.links import Links
from offbeat.lab.network.wire import Wire


def test_rates_of_one_direction_take_precedence() -> None:
    links = Links.parse("100mbit", up="20mbit", latency="50ms", jitter="5ms", loss="0.1%")
    assert links.up == Wire(20_000_000)
    assert links.down == Wire(100_000_000, 0.05, 0.005, 0.001)
    assert links.round_trip == pytest.approx(0.1)
    assert str(links) == ("20 Mbit/s up, 100 Mbit/s down, 50 ± 5 ms one way, 0.1 % loss")


def test_pairs_of_sites_may_be_unequal() -> None:
    links = Links.parse(sites=(4, 4, 6), between=["60ms@200mbit", "2-0:75ms"], jitter="6ms")
    assert links.far == {
        (0, 1): Wire(200_000_000, 0.06, 0.006),
        (0, 2): Wire(None, 0.075, 0.006),
        (1, 2): Wire(200_000_000, 0.06, 0.006),
    }
    assert [links.site_of(node) for node in (0, 3, 4, 7, 8, 13)] == [0, 0, 1, 1, 2, 2]
    assert [list(links.nodes_of(site)) for site in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11, 12, 13],
    ]
    assert [wire.latency for wire in links.wires_between(9, 1)] == [0, 0.075, 0]
    assert [wire.latency for wire in links.wires_between(0, 1)] == [0, 0]
    assert links.round_trip == pytest.approx(0.15)
    assert not links.down.delays


def test_a_network_without_limits_is_known_as_such() -> None:
    assert not Links.parse().limited
    assert Links.parse(down="1gbit").limited
    assert Links.parse(latency="2ms").limited
    assert Links.parse(sites=(1, 1), between=["2ms"]).limited


@pytest.mark.parametrize(
    ("nodes", "options", "said"),
    [
        (4, {"latency": "50"}, "latency: got '50', expected a number with"),
        (4, {"latency": "0.5ms"}, "from 1ms to 10s, for one way; for example 50ms"),
        (4, {"latency": "5ms", "jitter": "6ms"}, "at most the latency of 5 ms"),
        (4, {"latency": "5ms", "loss": "60%"}, "loss: got '60%', expected a percentage from 0% to"),
        (4, {"loss": "1%"}, "jitter and loss: expected a latency, or sites"),
        (4, {"up": "20"}, "up: got '20', expected a number with kbit"),
        (2, {"sites": (1, 1)}, "between: got nothing for the sites 0 and 1"),
        (2, {"sites": (1, 1), "between": ["x"]}, "latency: got 'x'"),
        (2, {"sites": (1, 1), "between": ["@1mbit"]}, "between: got '@1mbit', expected [SITE-SITE"),
        (2, {"sites": (1, 1), "between": ["0-2:5ms"]}, "got the sites 0 and 2, expected two"),
        (2, {"sites": (1, 1), "between": ["1-1:5ms"]}, "got the sites 1 and 1, expected two"),
        (2, {"sites": (1, 1), "between": ["5ms", "6ms"]}, "between: got all pairs twice"),
        (
            2,
            {"sites": (1, 1), "between": ["0-1:5ms", "1-0:6ms"]},
            "between: got the sites 0 and 1 twice",
        ),
        (3, {"sites": (1, 1, 1), "between": ["0-1:5ms"]}, "nothing for the sites 0 and 2"),
        (3, {"sites": (3,), "between": ["5ms"]}, "sites: got 3, expected the nodes of at least"),
        (2, {"between": ["5ms"]}, "sites: got none, expected the nodes of at least two sites"),
        (2, {"sites": (2, 0), "between": ["5ms"]}, "sites: got 2,0, expected"),
        (3, {"sites": (1, 1), "between": ["5ms"]}, "sites: got 1,1, 2 nodes together, for 3 nodes"),
        (2, {"sites": (1, 1), "between": ["5ms"], "latency": "5ms"}, "got '5ms' with sites"),
    ],
)
def test_what_fits_no_links_is_refused(nodes: int, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Lab(nodes, **options)
    assert "\n" not in str(error.value)


def test_a_queue_holds_the_bandwidth_delay_product_and_50_ms() -> None:
    (near,) = shaping.bucket("eth0", Wire(80_000_000), 0.0)
    (far,) = shaping.bucket("eth0", Wire(80_000_000), 0.1)
    burst = 128 * 1024
    assert near == (
        f"qdisc add dev eth0 root tbf rate 80000000bit burst {burst}b limit {burst + 500_000}b"
    )
    assert far.endswith(f"limit {burst + 1_500_000}b")
    assert shaping.bucket("eth0", Wire(None, 0.05), 0.1) == []
    (widest,) = shaping.bucket("eth0", Wire(600 * 10**9), 20.0)
    assert widest.endswith(f"limit {2**32 - 1}b")


def test_netem_keeps_the_order_and_feeds_the_bucket() -> None:
    (plain,) = shaping.netem("node1", Wire(None, 0.05))
    assert plain == "qdisc add dev node1 root handle 1: netem limit 16777216 delay 50000us"
    (full,) = shaping.netem("node1", Wire(10**8, 0.05, 0.005, 0.001))
    assert full.endswith("delay 50000us 5000us rate 1000gbit loss random 0.1%")
    (bucket,) = shaping.bucket("node1", Wire(10**8), 0.1, "parent 1:1")
    assert bucket.startswith("qdisc add dev node1 parent 1:1 tbf rate 100000000bit")
