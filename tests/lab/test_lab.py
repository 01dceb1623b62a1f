"""The lab in a real network: needs root, iproute2 and tbf."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lab_scripts
from offbeat.cli import app
from offbeat.lab import Cut, Kill, Lab, Straggler, Unavailable
from offbeat.lab.check import measure_links
from offbeat.lab.cluster import Cluster
from offbeat.lab.faults import Fault, RunControl

NETWORKS = Path("/run/netns")
RATE, RATE_TEXT = 100e6, "100mbit"
BURST = 128 * 1024  # bytes that a link lets pass at once
# Ctrl-C must reach the program also where the tests run in the background of a shell.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from offbeat.cli import app; app(prog_name='offbeat')"
)
# A shell, a child in its process group, and one that has left the group.
STRAY = "sleep 600 & setsid sleep 600 & echo ready; wait"


@functools.cache
def obstacle() -> str:
    """Why there can be no lab here; empty if there can."""
    try:
        with Lab(1, rate="1gbit"):
            return ""
    except Unavailable as error:
        return str(error)


pytestmark = pytest.mark.processes


class Lines(list[tuple[int | None, str]]):
    """Collects output; pass its ``add`` as ``on_line``."""

    def add(self, rank: int | None, line: str) -> None:
        self.append((rank, line))

    def of(self, rank: int | None) -> list[str]:
        """What one rank printed."""
        return [line for who, line in self if who == rank]


def namespaces(pid: int) -> set[str]:
    """The namespaces of a process's labs."""
    return {path.name for path in NETWORKS.glob(f"offbeat-{pid}-*")}


def processes(pid: int) -> list[str]:
    """What a process's labs have started and still runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"OFFBEAT_LAB={pid}-".encode() in path.read_bytes():
                found.append(path.parent.joinpath("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def nothing_left(pid: int) -> bool:
    """Whether nothing is left of a process's labs, once the killed have gone."""
    deadline = time.monotonic() + 30
    while processes(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not namespaces(pid) and not processes(pid)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    if reason := obstacle():
        pytest.skip(reason)
    yield
    assert nothing_left(os.getpid())


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``offbeat lab`` in another process, and wait for its first rank to be ready."""
    started = []

    def lab(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "lab", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        started.append(process)
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        return process

    yield lab
    for process in started:
        process.kill()
        process.communicate()


def shell(script: str) -> list[str]:
    """A command for every rank."""
    return ["sh", "-c", script]


def python(script: str, *arguments: str) -> list[str]:
    """A script for every rank, in a bare interpreter unless it needs torch."""
    flags = [] if "import torch" in script else ["-I", "-S"]
    return [sys.executable, *flags, "-c", script, *arguments]


def test_ranks_are_told_their_place_on_unequal_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE OMP_NUM_THREADS"
    more = "MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME TORCHELASTIC_USE_AGENT_STORE MINE"
    command = shell("echo " + " ".join(f"${name}" for name in f"{names} {more}".split()))
    lines = Lines()
    with Lab(2, [2, 1]) as lab:
        assert lab.run(command, env={"MINE": "x"}, on_line=lines.add) == 0
        assert lab.run(command, env={"OMP_NUM_THREADS": "3"}, on_line=lines.add) == 0
    said = [[lines.of(rank)[run].split() for rank in range(3)] for run in range(2)]
    assert [line[:6] for line in said[0]] == [
        ["0", "3", "2", "0", "2", "1"],
        ["1", "3", "2", "0", "2", "1"],
        ["0", "3", "1", "1", "2", "1"],
    ]
    assert {(line[6], *line[8:]) for line in said[0]} == {("10.98.0.254", "eth0", "True", "x")}
    assert {line[5] for line in said[1]} == {"3"}


@pytest.mark.quiet
def test_the_rate_is_real_between_nodes_both_ways_and_not_inside_one() -> None:
    size = 2_500_000
    phases = [([2], 0, size), ([0], 2, size), ([2, 3], 0, size), *[([1], 0, size)] * 5]
    lines = Lines()
    with Lab(3, [2, 1, 1], rate=RATE_TEXT) as lab:
        nodes = [lab.cluster.node_of(rank) for rank in range(4)]
        command = python(lab_scripts.TRANSFER, json.dumps(phases), json.dumps(nodes))
        assert lab.run(command, on_line=lines.add) == 0
    seconds = {int(line.split()[0]): float(line.split()[1]) for _, line in lines}
    to_first, to_last, both_to_first, *inside = (seconds[phase] for phase in range(len(phases)))
    # Both buckets on the way, the sender's and the receiver's, are full at the start.
    least = (size - 2 * BURST) * 8 / RATE
    assert to_first > least
    assert to_last > least
    # Two senders on different nodes: here the receiver's link is what limits.
    assert both_to_first > (2 * size - 3 * BURST) * 8 / RATE
    assert min(inside) < least / 2  # a busy machine may take one of them aside


def test_nodes_meet_congestion_as_linux_does_whatever_the_machine_is_tuned_to() -> None:
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "cubic" not in known:
        pytest.skip(f"this kernel has only {known}")
    lines = Lines()
    with Lab(2, rate=RATE_TEXT) as lab:
        assert lab.run(python(lab_scripts.CONGESTION), on_line=lines.add) == 0
    assert [lines.of(rank) for rank in range(2)] == [["cubic"], ["cubic"]]


@pytest.mark.quiet
def test_check_finds_the_line_rate_and_no_limit_inside_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.lab.check.measure._SECONDS", 0.2)
    with Lab(2, [2, 1], rate="200mbit") as lab:
        figures = measure_links(lab)
    # At most 96 % of the line carry content (1448 of 1514 bytes in a packet); the buckets' burst
    # of 128 KiB adds up to 5 % to these 5 MiB. Half is what a loaded machine may lose.
    assert 0.5 < figures.all_reduce_mbit / 200 < 1.05
    assert figures.one_way_mbit / 200 < 1.05
    assert figures.both_ways_mbit / 200 < 1.05
    assert figures.inside_node_mbit is not None
    assert figures.inside_node_mbit > 300
    assert figures.round_trip_ms > 0
    assert json.loads(figures.to_json())["rate_mbit"] == 200


def test_the_first_failure_is_the_exit_code_and_ends_the_others() -> None:
    lines, begin = Lines(), time.monotonic()
    with Lab(3) as lab:
        code = lab.run(shell("test $RANK = 1 && exit 3; exec sleep 600"), on_line=lines.add)
        assert code == 3
        assert not processes(os.getpid())
        assert "rank 1 failed: exit code 3; terminating the other ranks" in lines.of(None)[0]
        assert lab.run(shell("test $RANK = 2 && kill -9 $$; exec sleep 600")) == 128 + 9
    assert time.monotonic() - begin < 60


def test_ranks_that_ignore_sigterm_are_killed_after_a_grace_period(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offbeat.lab.launch.GRACE", 0.3)
    deaf = "trap '' TERM; touch deaf; sleep 600"
    script = (
        f"cd {tmp_path}; test $RANK = 0 && {{ {deaf}; }}; until test -e deaf; do :; done; exit 4"
    )
    with Lab(2) as lab:
        assert lab.run(shell(script)) == 4


def test_keep_going_lets_the_others_go_on() -> None:
    lines = Lines()
    script = "test $RANK = 1 && exit 3; sleep 0.3; echo done"
    with Lab(3) as lab:
        assert lab.run(shell(script), keep_going=True, on_line=lines.add) == 3
    assert lines.of(0) == lines.of(2) == ["done"]


def test_killing_rank_0_is_no_failure_and_leaves_the_store() -> None:
    lines = Lines()
    ask = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT && echo answered"
    script = f"test $RANK = 0 && {{ sleep 600 & wait; }}; sleep 0.6; {ask}"
    with Lab(2) as lab:
        assert lab.run(["bash", "-c", script], faults=[Kill(0, 0.2)], on_line=lines.add) == 0
        assert lines.of(1) == ["answered"]
        assert lines.of(None) == ["rank 0 killed"]
        # Others may fail on their own account.
        assert lab.run(shell("test $RANK = 0 && sleep 600; exit 5"), faults=[Kill(0, 0.3)]) == 5


def test_a_plain_ddp_script_runs() -> None:
    lines = Lines()
    with Lab(2, rate=RATE_TEXT) as lab:
        assert lab.run(python(lab_scripts.PLAIN_DDP), on_line=lines.add) == 0, lines
    assert lines.of(0)[-1].startswith("parameters")
    assert lines.of(0)[-1] == lines.of(1)[-1]
    assert "hostname" not in str(lines)  # torch warns of addresses without a name


@pytest.mark.fault(
    "a rank is killed during training",
    "PeerLost on every other rank within seconds; names the rank",
    group="Lost ranks and connections",
)
def test_an_offbeat_script_knows_its_nodes_and_survivors_are_told_who_is_lost() -> None:
    lines = Lines()
    with Lab(2, [2, 1], rate=RATE_TEXT) as lab:
        code = lab.run(python(lab_scripts.OFFBEAT), keep_going=True, on_line=lines.add)
    assert code == 128 + 9
    for rank in (1, 2):
        assert lines.of(rank)[0] == "nodes ((0, 1), (2,))"
        # By its heartbeat in the store, which has survived, and not as the store's host.
        assert re.match("lost rank 0 is lost: (its process has|no sign of)", lines.of(rank)[1])


@pytest.mark.fault(
    "a link is down for a second",
    "messages arrive later; no error",
    group="Lost ranks and connections",
)
def test_a_cut_delays_and_does_not_break() -> None:
    lines = Lines()
    with Lab(2) as lab:
        command = python(lab_scripts.SILENCE)
        assert lab.run(command, faults=[Cut(1, 1.0, 2.0)], on_line=lines.add) == 0
    (silence,) = lines.of(1)
    assert float(silence) > 0.9
    assert lines.of(None) == ["node 1: link down, until 2 s", "node 1: link up"]


@dataclass(frozen=True)
class CutAfter(Fault):
    """Cuts the link of ``node`` once ``event`` has come: ranks may take long to start."""

    node: int
    event: threading.Event

    def validate(self, cluster: Cluster) -> None:
        """Accept any cluster: the test knows its own."""

    def inject(self, control: RunControl, stop: threading.Event) -> None:
        """Cut it, until the end of the run."""
        while not self.event.wait(0.1):
            if stop.is_set():
                return
        control.set_link(self.node, False)


@pytest.mark.fault(
    "the link of a node is cut for minutes",
    "PeerLost on every rank, 6 s later on an idle machine",
    group="Lost ranks and connections",
)
def test_a_cut_that_lasts_ends_every_rank_for_itself() -> None:
    """The rank behind it cannot reach the store; its beacon and heartbeats are silent."""
    lines, all_train = Lines(), threading.Event()

    def note(rank: int | None, line: str) -> None:
        lines.add(rank, line)
        if [said for _, said in lines].count("trains") == 3:
            all_train.set()

    with Lab(3) as lab:
        command = python(lab_scripts.LOST_LINK)
        lab.run(command, keep_going=True, faults=[CutAfter(1, all_train)], on_line=note)
    for rank in range(3):
        trains, said = lines.of(rank)
        assert trains == "trains"
        assert ("which no longer answers" if rank == 1 else "rank 1 is lost") in said


def test_a_link_that_was_cut_is_up_again_in_the_next_run() -> None:
    ask = "timeout 1 bash -c 'exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT'"
    with Lab(1) as lab:
        until_cut = shell(f"while {ask}; do sleep 0.1; done; exit 7")
        assert lab.run(until_cut, faults=[Cut(0, 0.1, 600)]) == 7
        assert lab.run(shell(f"until {ask}; do sleep 0.1; done")) == 0


@pytest.mark.quiet
def test_a_straggler_computes_a_fraction_of_the_time() -> None:
    lines = Lines()
    with Lab(2) as lab:
        command = python(lab_scripts.COMPUTE)
        assert lab.run(command, faults=[Straggler(1, 0.25)], on_line=lines.add) == 0
    (slow,), (usual,) = lines.of(1), lines.of(0)
    # Four times in the long run; less in a third of a second that begins before the first halt.
    assert float(slow) > 1.5 * float(usual)


def test_a_straggler_is_halted_with_its_node_alone_and_never_left_halted() -> None:
    sent: list[tuple[int, int, float]] = []
    stop = threading.Event()
    control = RunControl(
        set_link=lambda node, up: None,
        signal_node=lambda node, number: sent.append((node, number, time.monotonic())),
        kill=lambda rank: None,
        log=lambda line: None,
    )
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    Straggler(3, 0.4).inject(control, stop)
    timer.join()
    assert {node for node, _, _ in sent} == {3}
    assert [number for _, number, _ in sent[:2]] == [signal.SIGSTOP, signal.SIGCONT]
    assert sent[-1][1] == signal.SIGCONT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.fault(
    "offbeat lab receives Ctrl-C or SIGTERM", "all processes and networks are removed"
)
def test_a_signal_ends_everything(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    lab = start("--nodes", "2", "--rate", RATE_TEXT, "--", *shell(STRAY))
    assert namespaces(lab.pid)
    assert processes(lab.pid)
    os.killpg(lab.pid, number)  # as a terminal does: to the lab's process group
    assert lab.wait(timeout=60) == 128 + number
    assert nothing_left(lab.pid)


@pytest.mark.fault("offbeat lab is killed", "the next lab removes what is left")
def test_two_labs_at_once_and_what_a_killed_one_left_behind(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    other = start("--nodes", "2", "--", *shell(STRAY))
    with Lab(2) as lab:
        ask = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT"
        assert lab.run(["bash", "-c", ask]) == 0
    assert len(namespaces(other.pid)) == 3  # two nodes and the hub: the living are left alone
    assert len(processes(other.pid)) == 6  # a shell and its two children on each node
    other.kill()
    other.wait()
    # The ranks have gone with their lab; the namespaces and what the ranks had started have not,
    # unless somebody else starts a lab just now.
    with Lab(1):
        assert nothing_left(other.pid)


def test_the_command_passes_through_untouched() -> None:
    script = shell('for word in "$@"; do echo "word:$word"; done')
    words = ["--nodes", "7", "--", "--help", "two words"]
    for separator in (["--"], []):
        arguments = ["lab", "--nodes", "1", *separator, *script, "sh", *words]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == [f"[0] word:{word}" for word in words]


def test_logs_go_to_one_file_a_rank(tmp_path: Path) -> None:
    lines, folder = Lines(), tmp_path / "new" / "logs"
    with Lab(2) as lab:
        script = shell("echo rank $RANK; echo error >&2")
        assert lab.run(script, log_dir=folder, on_line=lines.add) == 0
    assert not lines
    assert [(folder / f"rank{rank}.log").read_text() for rank in range(2)] == [
        "rank 0\nerror\n",
        "rank 1\nerror\n",
    ]


def test_an_error_in_the_callback_ends_the_run() -> None:
    def broken(rank: int | None, line: str) -> None:
        raise BrokenPipeError(line)

    with Lab(2) as lab, pytest.raises(BrokenPipeError, match="hello"):
        lab.run(shell("echo hello; exec sleep 600"), on_line=broken)


@pytest.mark.fault(
    "the kernel cannot limit rates", "exit code 2; names the module; nothing is left"
)
def test_a_kernel_without_tbf_is_named_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tc = tmp_path / "tc"
    tc.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 1\n")
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = CliRunner().invoke(app, ["lab", "--nodes", "2", "--rate", RATE_TEXT, "--", "true"])
    assert result.exit_code == 2
    assert "tbf" in result.stderr
    assert "modprobe sch_tbf" in result.stderr
    assert not namespaces(os.getpid())


@pytest.mark.fault("offbeat lab runs without root", "exit code 2; one line")
def test_other_users_are_told_to_be_root() -> None:
    # The capability to read files, since the interpreter may be in a folder of root's.
    nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"]
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    command = [sys.executable, "-m", "offbeat", "lab", "--", "true"]
    done = subprocess.run(
        ["setpriv", *nobody, *may_read, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs root, and this is user 65534; run it as root" in done.stderr
