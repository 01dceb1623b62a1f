"""``offbeat doctor`` on real networks, each with a fault that it must name."""

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import TCPStore
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.doctor import Finding, links
from offbeat.lab import Lab, Unavailable
from offbeat.lab.network import iproute
from ranks import fork_server


@functools.cache
def obstacle() -> str:
    """Why there can be no lab here; empty if there can."""
    try:
        with Lab(1, rate="1gbit"):
            return ""
    except Unavailable as error:
        return str(error)


pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := obstacle():
        pytest.skip(reason)


@pytest.mark.quiet
@pytest.mark.fault("a blocked port, or a slow rank, under offbeat doctor", "both are named")
def test_the_links_between_ranks_are_diagnosed() -> None:
    lines = []
    with Lab(3, rate="100mbit") as lab:
        # In a long queue what rank 2 sends would hold up its answers to what it receives.
        slower = "qdisc change dev eth0 root tbf rate 10mbit burst 32kb latency 4ms"
        iproute.batch("tc", [slower], lab._network.namespace(2))
        iproute.batch("ip", ["rule add to 10.98.0.2 prohibit"], lab._network.namespace(0))
        command = [sys.executable, "-m", "offbeat", "doctor", "--json"]
        code = lab.run(command, keep_going=True, on_line=lambda *line: lines.append(line))
    assert code == 1
    report = json.loads("\n".join(line for rank, line in lines if rank == 0 and line[:1] in " {}"))
    bad = [each for each in report["findings"] if each["verdict"] in ("error", "warning")]
    texts = [each["found"] for each in bad]
    assert sum("rank 0 cannot connect to rank 1 at 10.98.0.2" in text for text in texts) == 1
    assert sum("rank 1 cannot connect to rank 0 at 10.98.0.1" in text for text in texts) == 1
    assert sum("rank 2 sends" in text for text in texts) == 1
    assert not [each for each in bad if each["check"] in ("store", "address", "ports", "clocks")]
    rates = {(x["source"], x["target"]): x["mbit"] for x in report["links"] if not x["error"]}
    assert rates.keys() == {(0, 2), (1, 2), (2, 0), (2, 1)}
    assert rates[2, 0] == pytest.approx(10, rel=0.3)
    assert rates[1, 2] > 30  # of 96, while tests beside this one compute


def reports(size: int, *ranks: dict[str, str]) -> list[Any]:
    """What ranks find, each with variables of its own; this process hosts their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = partial(_examined, store.port, size)
    with ProcessPoolExecutor(len(ranks), fork_server()) as pool:
        return [*pool.map(work, range(len(ranks)), ranks)]


def _examined(port: int, size: int, rank: int, own: dict[str, str]) -> Any:
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    at["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with (
        patch.dict(os.environ, at | {"WORLD_SIZE": str(size), "RANK": str(rank)} | own),
        patch.object(links, "PATIENCE", timedelta(seconds=12)),
    ):
        return links.examine([Finding("torch", "ok", "2")])


@pytest.mark.fault(
    "a rank has no address, or has not come, under offbeat doctor", "it is named, with all findings"
)
def test_a_rank_without_an_address_is_diagnosed() -> None:
    (_, measured), nothing = reports(2, {}, {"GLOO_SOCKET_IFNAME": "eth9"})
    assert nothing is None
    there, back = measured
    assert there.error == "an address: it has none (GLOO_SOCKET_IFNAME=eth9 has no IPv4 address)"
    assert back.error == ""
    assert back.mbit > 0


def test_ranks_that_have_not_come_are_named() -> None:
    nothing, (found, measured) = reports(4, {"RANK": "3"}, {"RANK": "1"})
    assert nothing is None
    assert found[0].ranks == (1, 3)
    assert found[1].found == "ranks [0, 2] of 4 did not reach the store within 12 s"
    assert measured == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "two"},
            "WORLD_SIZE='two' (a whole number from 1 to ",
        ),
        (
            {"MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "0"},
            "WORLD_SIZE='0' (a whole number from 1 to ",
        ),
        ({"WORLD_SIZE": "2"}, "RANK=None (a whole number from 0 to "),
        ({"MASTER_PORT": "99999", "RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT='99999'"),
    ],
)
def test_variables_of_a_launcher_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"MASTER_ADDR": "127.0.0.1"} | given).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.output)["findings"][-1]
    assert (found["check"], found["verdict"]) == ("launcher", "error")
    assert said in found["found"]


SLOW_RESOLVER = """
import socket
from offbeat.doctor.addresses import addresses
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.53", 53))
for finding in addresses(False):
    print(finding.check, finding.verdict, finding.found, finding.fix, sep="|")
"""


@pytest.mark.fault("a name server that does not answer, under offbeat doctor", "it is named")
def test_a_slow_resolver_is_diagnosed() -> None:
    isolated = (
        "ip link set lo up; mount -t tmpfs none /mnt; echo > /mnt/hosts;"
        "printf 'nameserver 127.0.0.53\\noptions timeout:2 attempts:1\\n' > /mnt/resolv.conf;"
        "for f in hosts resolv.conf; do touch /etc/$f; mount --bind /mnt/$f /etc/$f; done;"
        'exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "-mn", "sh", "-c", isolated, "sh", sys.executable, "-c", SLOW_RESOLVER],
        capture_output=True,
        text=True,
        timeout=100,
    )
    rows = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
    assert rows["host names"][0] == "warning", done.stderr
    assert "looked up slowly" in rows["host names"][1]
    assert "/etc/hosts" in rows["host names"][2]
