"""The parts of the lab that need neither root nor a network: options, and runs on loopback."""

import io
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.cli.lab import line_printer
from offbeat.kit.quantity import parse_rate
from offbeat.lab import Cut, Kill, Lab, Loopback, Straggler, Unavailable, leftovers
from offbeat.lab.check import LinkMeasurements, measure_links
from offbeat.lab.cluster import Cluster
from offbeat.lab.network import iproute
from offbeat.lab.network.network import Network

Lines = list[tuple[int | None, str]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no command"),
        ("--nodes 0 -- true", "nodes: got 0, expected 1 to 200"),
        ("--nodes 2 --procs-per-node 1,2,3 -- true", "got 3 numbers, 1,2,3, for 2 nodes"),
        ("--procs-per-node 2,x -- true", "got '2,x', expected a number"),
        ("--procs-per-node 2,0 -- true", "got 2,0, expected at least 1 on every node"),
        ("--rate 250 -- true", "rate: got '250', expected a number with kbit, mbit or gbit"),
        (
            "--rate 601gbit -- true",
            "rate: got '601gbit', expected a number with kbit, mbit or gbit",
        ),
        ("--rate 99999999gbit -- true", "from 1kbit to 600gbit; for example 250mbit"),
        ("--straggler x -- true", "straggler: got 'x', expected NODE:FRACTION"),
        ("--straggler 4:0.5 -- true", "got node 4, expected 0 to 3, since the lab has 4"),
        ("--straggler 1:0 -- true", "got the fraction 0, expected one above 0 and at most 1"),
        ("--straggler 1:1.01 -- true", "got the fraction 1.01"),
        ("--cut 1@5s-3s -- true", "cut: got 5-3, expected an end after the start"),
        ("--cut 1@5s -- true", "cut: got '1@5s', expected NODE@START-END"),
        ("--cut 4@1-2 -- true", "got node 4"),
        ("--cut 1@1-3 --cut 1@2-6 -- true", "which overlap; give one: 1@1-6"),
        ("--straggler 1:0.5 --straggler 1:0.7 -- true", "got node 1 more than once"),
        ("--kill 3@1m -- true", "kill: got '3@1m', expected RANK@TIME"),
        ("--kill 4@1 -- true", "got rank 4"),
        ("-- no-such-program", "'no-such-program' was not found"),
        ("--check -- true", "--check runs its own measurement"),
        ("--check --kill 1@1", "--check runs its own measurement"),
        ("--check --nodes 1", "check: got 1 node, expected at least 2"),
        ("--check --algorithm sgp", "--check runs its own measurement"),
        ("--algorithm sgpp -- true", "unknown algorithm 'sgpp'"),
        ("--json -- true", "add --check"),
        ("--latency 50 -- true", "latency: got '50', expected a number with"),
        ("--loss 1% -- true", "jitter and loss: expected a latency"),
        ("--sites 4,x --between 5ms -- true", "sites: got '4,x', expected the number of nodes"),
        ("--sites 2,2 --nodes 5 --between 5ms -- true", "4 nodes together, for 5 nodes"),
    ],
)
@pytest.mark.fault("an option of offbeat lab is wrong", "exit code 2; one line")
def test_wrong_options_are_one_line_and_exit_code_2(arguments: str, said: str) -> None:
    result = CliRunner().invoke(app, ["lab", *arguments.split()])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(app, ["lab", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "offbeat lab --nodes 4 --rate 250mbit -- python train.py --lr 0.1" in result.stdout


@pytest.mark.processes
def test_the_algorithm_is_set_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "offbeat.cli.lab.Lab", lambda nodes, procs, rate, **far: Loopback(nodes, procs)
    )
    monkeypatch.setenv("OFFBEAT_ALGORITHM", "ddp")
    command = ["--nodes", "2", "--", "sh", "-c", 'echo "$OFFBEAT_ALGORITHM"']
    result = CliRunner().invoke(app, ["lab", "--algorithm", "sgp(overlap=1)", *command])
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == ["[0] sgp(overlap=1)", "[1] sgp(overlap=1)"]
    result = CliRunner().invoke(app, ["lab", *command])
    assert sorted(result.stdout.splitlines()) == ["[0] ddp", "[1] ddp"]


def test_times_are_seconds_with_or_without_unit() -> None:
    assert Cut.parse("1@10-15") == Cut.parse("1@10s-15.0s") == Cut(1, 10.0, 15.0)
    assert Kill.parse("3@1.5") == Kill.parse("3@1.5s") == Kill(3, 1.5)
    assert Straggler.parse("2:.5") == Straggler(2, 0.5)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("250mbit", 250_000_000), ("1.5gbit", 1_500_000_000), ("64kbit", 64_000), ("1Gbit", 10**9)],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "250", "250mbps", "-1mbit", "0mbit", "mbit", "1 000mbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a number with kbit, mbit or gbit"):
        parse_rate(text)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_ranks_are_numbered_node_by_node(per_node: list[int]) -> None:
    cluster = Cluster.of(len(per_node), per_node)
    places = [(cluster.node_of(rank), cluster.local_rank(rank)) for rank in range(cluster.size)]
    assert places == [(node, i) for node, count in enumerate(per_node) for i in range(count)]
    assert [places[rank] for rank in cluster.leaders] == [
        (node, 0) for node in range(cluster.nodes)
    ]


def test_without_iproute2_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.lab.network.iproute.shutil.which", lambda tool, path: None)
    with pytest.raises(Unavailable, match=r"'ip', which is not installed; install iproute2"):
        iproute.require()


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("Error: Specified qdisc kind is unknown.\nCommand failed -:1", "modprobe sch_tbf"),
        ("Error: Unknown device type.\nCommand failed -:2", "modprobe -a veth bridge"),
        ("RTNETLINK answers: Operation not permitted", "--privileged"),
        ("mount --make-shared /run/netns failed: Permission denied", "--privileged"),
        ("something else", "something else"),
    ],
)
def test_what_iproute2_says_becomes_a_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, fix: str
) -> None:
    tool = tmp_path / "ip"
    tool.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Unavailable, match=re.escape(fix)):
        Network("offbeat-test", 2).build()


@pytest.mark.processes
def test_loopback_runs_the_same_ranks() -> None:
    lines: Lines = []
    with Loopback(2, [2, 1]) as runner:
        command = ["sh", "-c", "echo $RANK $GROUP_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME; exit 3"]
        assert runner.run(command, keep_going=True, on_line=lambda *line: lines.append(line)) == 3
    assert sorted(line for rank, line in lines if rank is not None) == [
        "0 0 127.0.0.1 lo",
        "1 0 127.0.0.1 lo",
        "2 1 127.0.0.1 lo",
    ]


@pytest.mark.processes
def test_loopback_kills_and_halts_but_cuts_nothing() -> None:
    with Loopback(2) as runner:
        script = ["sh", "-c", "test $RANK = 0 && exec sleep 600; exit 0"]
        assert runner.run(script, faults=[Kill(0, 0.1), Straggler(1, 0.5)]) == 0
        with pytest.raises(ValueError, match="nodes on loopback have no links"):
            runner.run(script, faults=[Cut(0, 1, 2)])


@pytest.mark.processes
def test_arguments_of_a_run_are_checked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Loopback(1) as runner:
        with pytest.raises(
            ValueError, match=r"log directory: got '.*file', which cannot be created"
        ):
            runner.run(["true"], log_dir=tmp_path / "file")
        with pytest.raises(ValueError, match="'true' was not found on PATH"):
            runner.run(["true"], env={"PATH": str(tmp_path)})
    with pytest.raises(
        ValueError, match="this lab has no network; enter its context first: with Lab"
    ):
        Lab(1).run(["true"])


@pytest.mark.processes
def test_output_may_be_anything() -> None:
    lines: Lines = []
    with Loopback(1) as runner:
        script = r"printf 'a\rb\r\n\n\377\303\251 end'; exec sleep 0"
        assert runner.run(["sh", "-c", script], on_line=lambda *line: lines.append(line)) == 0
    assert lines == [(0, "a"), (0, "b"), (0, ""), (0, "\N{REPLACEMENT CHARACTER}é end")]


@pytest.mark.processes
def test_an_error_in_the_callback_comes_out_even_for_the_last_line() -> None:
    def broken(rank: int | None, line: str) -> None:
        raise KeyError(line)

    with Loopback(1) as runner, pytest.raises(KeyError, match="last"):
        runner.run(["echo", "last"], on_line=broken)


def test_lines_have_a_prefix_and_the_labs_own_go_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = line_printer()
    write(3, "three")
    write(None, "rank 3 killed")
    assert capsys.readouterr() == ("[3] three\n", "[lab] rank 3 killed\n")


@pytest.mark.processes
def test_a_failed_check_shows_what_the_ranks_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "probe.py"
    broken.write_text("raise SystemExit('no such luck')")
    monkeypatch.setattr("offbeat.lab.check.gloo_probe.__file__", str(broken))
    with Loopback(2) as runner, pytest.raises(RuntimeError, match=r"exit code 1.*\n.*no such luck"):
        measure_links(runner)


def test_figures_are_shown_beside_the_rate() -> None:
    figures = LinkMeasurements(4, 250.0, 240.0, 225.0, 237.0, 0.25, None)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(figures.table())
    text = console.export_text()
    assert re.search(r"all-reduce.*237 Mbit/s.*95%", text)
    assert "0.25 ms" in text
    assert "inside" not in text


@pytest.mark.fault("a lab is entered beside one in a container", "the latter goes on")
def test_processes_of_labs_in_other_containers_are_left_alone() -> None:
    """A lab whose key has the number of a process that only its own namespace knows."""
    here = leftovers.key(0).rpartition("-")[2]
    sleeping = {
        namespace: subprocess.Popen(
            ["sleep", "60"], env={leftovers.MARK: f"999999999-1-0-{namespace}"}
        )
        for namespace in (here, "1")
    }
    try:
        leftovers.remove()
        assert sleeping[here].wait(timeout=30) == -signal.SIGKILL
        assert sleeping["1"].poll() is None
    finally:
        for process in sleeping.values():
            process.kill()
            process.wait()


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").mkdir()
    with Loopback(1) as lab, pytest.raises(ValueError, match=r"rank0.log' \(Is a directory\)"):
        lab.run(["true"], log_dir=tmp_path)
