"""The lab with latency in a real network: needs root, iproute2, tbf, and netem or TUN devices."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.lab import Cut, Lab, Unavailable
from offbeat.lab.check import PathMeasurement, measure_links
from offbeat.lab.check.paths import measure_paths
from offbeat.lab.network import delay_line, shaping
from offbeat.lab.network.links import LinkOptions

# A machine whose cores others use too may pause a measurement, in which packets are then late.
ATTEMPTS = 5


@functools.cache
def obstacle() -> str:
    """Why packets cannot be delayed here; empty if they can."""
    try:
        with Lab(1, rate="1gbit", latency="5ms"):
            return ""
    except Unavailable as error:
        return str(error)


def netem() -> bool:
    """Whether the kernel delays packets by itself."""
    with Lab(1, latency="5ms") as lab:
        return lab.delay_line_usage() is None


pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := obstacle():
        pytest.skip(reason)


@pytest.fixture
def by_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the delay line even if the kernel has netem."""
    monkeypatch.setattr(shaping, "has_netem", lambda namespace: False)


def delay_lines(lab: int) -> list[int]:
    """The delay lines of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
            if delay_line.__file__.encode() in path.read_bytes() and int(parent) == lab:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert not delay_lines(os.getpid())
    assert not list(Path("/run/netns").glob(f"offbeat-{os.getpid()}-*"))


def wanted(nodes: int, rate: str | None, **far: object) -> dict[tuple[str, str], float]:
    """Measure a lab until every value was met once; return what was wanted on each path.

    A busy machine spoils one value or another of nine; a wrong link misses its own every time.
    """
    missed: dict[tuple[str, str], PathMeasurement] = {}
    for attempt in range(ATTEMPTS):
        with Lab(nodes, rate=rate, **far) as lab:
            found = {(path.path, path.quantity): path for path in measure_paths(lab)}
        of = found if attempt == 0 else missed
        missed = {name: found[name] for name in of if not found[name].is_met}
        if not missed:
            break
    assert not missed
    return {name: path.wanted for name, path in found.items()}


@pytest.mark.quiet
@pytest.mark.usefixtures("by_devices")
@pytest.mark.parametrize(("latency", "rate"), [(5, 250), (100, 25)])
def test_round_trips_and_rates_are_met_within_5_percent(latency: int, rate: int) -> None:
    assert wanted(2, f"{rate}mbit", latency=f"{latency}ms") == {
        ("node 0 to 1", "round trip"): 2 * latency,
        ("out of node 0", "rate"): rate,
        ("into node 0", "rate"): rate,
    }


@pytest.mark.quiet
@pytest.mark.usefixtures("by_devices")
def test_jitter_loss_and_unequal_rates_are_met() -> None:
    far = LinkOptions(up="10mbit", down="40mbit", latency="20ms", jitter="2ms", loss="3%")
    assert wanted(3, None, **far) == {
        ("node 0 to 1", "round trip"): 40,
        ("node 0 to 1", "loss"): 3,
        ("out of node 0", "rate"): 10,
        ("into node 0", "rate"): 20,
    }


@pytest.mark.quiet
@pytest.mark.usefixtures("by_devices")
def test_pairs_of_sites_have_their_own_links_which_their_nodes_share() -> None:
    between = ["10ms@10mbit", "0-2:30ms@20mbit"]
    assert wanted(4, "100mbit", sites=(2, 1, 1), between=between) == {
        ("site 0 to 1", "round trip"): 20,
        ("site 0 to 1", "rate"): 10,
        ("site 1 to 0", "rate"): 10,
        ("site 0 to 2", "round trip"): 60,
        ("site 0 to 2", "rate"): 20,
        ("site 2 to 0", "rate"): 20,
        ("site 1 to 2", "round trip"): 20,
        ("site 1 to 2", "rate"): 10,
        ("site 2 to 1", "rate"): 10,
    }


@pytest.mark.quiet
def test_netem_and_the_delay_line_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    if not netem():
        pytest.skip("this kernel has no netem")
    far = LinkOptions(latency="30ms", jitter="3ms", loss="2%")
    by_netem = wanted(2, "50mbit", **far)  # each value was met
    monkeypatch.setattr(shaping, "has_netem", lambda namespace: False)
    assert wanted(2, "50mbit", **far) == by_netem


@pytest.mark.quiet
def test_check_shows_the_links_beside_gloo() -> None:
    with Lab(3, rate="50mbit", sites=(1, 2), between=["10ms@20mbit"]) as lab:
        figures = measure_links(lab)
        by_devices = lab.delay_line_usage() is not None
    assert figures.rate_mbit == 20
    assert len(figures.paths) == 3
    # Half is what a loaded machine may lose.
    assert 0.4 < figures.one_way_mbit / 20 < 1.05
    assert 20 < figures.round_trip_ms < 60
    assert (figures.delay_line_cores is not None) == by_devices


@pytest.mark.usefixtures("by_devices")
def test_a_run_tells_what_the_delay_line_cost_and_a_cut_works() -> None:
    lines: list[tuple[int | None, str]] = []
    ask = "timeout 1 bash -c 'exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT'"
    with Lab(2, latency="5ms") as lab:
        command = ["sh", "-c", f"while {ask}; do sleep 0.1; done; until {ask}; do sleep 0.1; done"]
        cut = [Cut(0, 0.5, 2.5), Cut(1, 0.5, 2.5)]
        assert lab.run(command, faults=cut, on_line=lambda *line: lines.append(line)) == 0
    cost = [line for rank, line in lines if rank is None and line.startswith("delay line: ")]
    assert len(cost) == 1
    assert "% of a core" in cost[0]


@pytest.mark.usefixtures("by_devices")
def test_a_delay_line_that_has_ended_is_an_error() -> None:
    with Lab(2, latency="5ms") as lab:
        (line,) = delay_lines(os.getpid())
        os.kill(line, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the delay line has ended with exit code -9"):
            lab.run(["true"])


def test_a_killed_lab_leaves_no_delay_line_and_the_next_removes_the_rest() -> None:
    program = "from offbeat.cli import app; app(prog_name='offbeat')"
    arguments = ["lab", "--nodes", "2", "--latency", "5ms", "--", "sh", "-c", "echo up; sleep 600"]
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lab:
        assert lab.stdout is not None
        assert "up" in lab.stdout.readline()
        lines = delay_lines(lab.pid)
        assert lines or netem()
        lab.kill()
        lab.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{line}").exists() for line in lines) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{line}").exists() for line in lines)
    with Lab(1):
        assert not list(Path("/run/netns").glob(f"offbeat-{lab.pid}-*"))


@pytest.mark.usefixtures("by_devices")
@pytest.mark.fault("the kernel cannot delay packets", "exit code 2; names the modules")
def test_a_kernel_without_netem_and_tun_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offbeat.lab.network.delaying._DEVICE", tmp_path / "tun")
    result = CliRunner().invoke(app, ["lab", "--latency", "5ms", "--", "true"])
    assert result.exit_code == 2
    assert "modprobe sch_netem, or modprobe tun" in result.stderr
    assert result.stderr.count("\n") == 1
