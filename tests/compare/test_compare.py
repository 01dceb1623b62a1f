"""Comparing methods: correct numbers, and results of the other methods when one fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import offbeat
from offbeat.cli import app
from offbeat.cli.compare import _interrupt
from offbeat.compare import Comparison, Experiment, Run, parse_methods, summarize, table
from offbeat.compare.curves import merge_curves
from offbeat.compare.experiment import split_algorithms
from offbeat.compare.measure import LossCurve, measure_run
from offbeat.compare.report.timeline import representative_steps
from offbeat.compare.result import Setup, Spread
from offbeat.compare.run import _REFUSED_OPTION, open_runner
from offbeat.kit.terminal import terminable
from offbeat.lab import Lab, Loopback, Unavailable
from offbeat.lab.check import PAYLOAD
from offbeat.telemetry.recording import Recording, read_run

Line = dict[str, Any]

# Ctrl-C must reach the program also where the tests run in the background of a shell.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from offbeat.cli import app; app(prog_name='offbeat')"
)
SCRIPT = """
import argparse, time
import torch
import torch.distributed as dist
import offbeat

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--fail", default="")
parser.add_argument("--hang", default="")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(50, 2)
replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm))
for step in range(args.steps):
    x = torch.randn(16, 50)
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    with torch.no_grad():  # by hand: an optimizer imports for half a second
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
    replica.report_loss(loss)
    replica.step()
    if step == 3 and dist.get_rank() == 1 and args.algorithm == args.fail:
        raise RuntimeError("the dog ate it")
    if step == 3 and args.algorithm == args.hang:
        time.sleep(600)
replica.finish()
replica.report_loss(0.25, "heldout")
replica.detach()
dist.destroy_process_group()
"""

# As of a framework: it has options, but none of offbeat's.
FRAMEWORK = """
import argparse
import torch
import torch.distributed as dist
import offbeat

parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int, default=6)
args = parser.parse_args()
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
replica = offbeat.replicate(model, {algorithm})
for step in range(args.max_steps):
    replica.step()
replica.detach()
dist.destroy_process_group()
"""


def step(seconds: float = 1.0, sent: float = 0, stalled: float = 0.0, **more: Any) -> Line:
    """A line as the recorder writes it."""
    numbers = {"seconds": seconds, "bytes_sent": sent, "seconds_stalled": stalled}
    fixed = {"time": 0.0, "messages": 1, "staleness": 0, "loss": None, "spans": []}
    return {"event": "step", **fixed, **numbers, **more}


def heldout(loss: float) -> Line:
    return {"event": "heldout", "time": 0.0, "loss": loss}


def finish(distance: float) -> Line:
    return {
        "event": "finish",
        "time": 0.0,
        "consensus_distance": {"mean": distance, "max": 2 * distance},
    }


def write_run(
    folder: Path, ranks: Sequence[Sequence[Line]], nodes: Sequence[Sequence[int]] | None = None
) -> Path:
    """Recordings of a run: the lines of each rank, one rank a node unless ``nodes`` says more."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = nodes or [[rank] for rank in range(len(ranks))]
    for rank, lines in enumerate(ranks):
        about = {"event": "attached", "time": 0.0, "rank": rank, "nodes": nodes}
        about |= {"algorithm": "", "exchanges": ""}
        text = "".join(json.dumps(line) + "\n" for line in [about, *lines])
        (folder / f"rank{rank}.jsonl").write_text(text)
    return folder


def setup(rate: int | None = None) -> Setup:
    return Setup("train.py", (), (1, 1), rate, None if rate else "not shaped", "today", "torch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def compare(*words: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, words)])


# What is compared, and in which order.


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ddp", ["ddp"]),
        ("ddp, sgp", ["ddp", "sgp"]),
        ("ddp,f(x=8,y='local'),sgp", ["ddp", "f(x=8,y='local')", "sgp"]),
        ("a((1,2),[3,4]),b", ["a((1,2),[3,4])", "b"]),
        ("sgp('a,(b'),ddp", ["sgp('a,(b')", "ddp"]),
        ("ddp,", ["ddp", ""]),
    ],
)  # fmt: skip
def test_commas_in_parentheses_and_quotes_belong_to_the_algorithm(
    text: str, parts: list[str]
) -> None:
    assert split_algorithms(text) == parts


def test_baseline_and_floor_join_once() -> None:
    def texts(*arguments: Any) -> tuple[list[str], str]:
        methods, baseline = parse_methods(*arguments)
        return [method.text for method in methods], baseline.text

    assert texts("ddp,sgp") == (["ddp", "sgp"], "ddp")
    assert texts("ddp,sgp", "sgp()") == (["ddp", "sgp"], "sgp")
    assert texts("sgp", "torch-ddp", True) == (["torch-ddp", "sgp", "alone"], "torch-ddp")
    assert texts("alone,sgp", None, True) == (["alone", "sgp"], "alone")


def test_methods_take_turns(script: Path) -> None:
    methods, baseline = parse_methods("ddp,sgp")
    experiment = Experiment(script, methods, baseline, ("--lr", "1"), steps=7, rounds=2)
    order = [(number, method.text) for number, method in experiment.run_order()]
    assert order == [(1, "ddp"), (1, "sgp"), (2, "ddp"), (2, "sgp")]
    chosen = ["--algorithm", "sgp", "--steps", "7", "--lr", "1"]
    assert experiment.command(methods[1]) == [sys.executable, str(script), *chosen]
    unchanged = Experiment(script, methods, baseline, ("--lr", "1"), env_only=True)
    assert unchanged.command(methods[1]) == [sys.executable, str(script), "--lr", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--algorithms", "ddp,sgpp"], "expected one of ddp, local_sgd, diloco"),
        (["--algorithms", "ddp,"], "cannot read the algorithm ''"),
        (["--algorithms", "ddp,local_sgd(evry=8)"], "the arguments of local_sgd are every"),
        (["--algorithms", "ddp,ddp()"], "are the same algorithm; list each algorithm once"),
        (["--algorithms", "ddp", "--baseline", "nothing"], "unknown algorithm 'nothing'"),
        (["--algorithms", "ddp", "--rate", "fast"], "for example 250mbit"),
        (["--algorithms", "ddp", "--latency", "50"], "for example 50ms"),
        (["--algorithms", "ddp", "--sites", "2,2"], "between: got nothing for the sites 0 and 1"),
        (["--algorithms", "ddp", "--nodes", "0"], "nodes: got 0"),
        (["--algorithms", "ddp", "--procs-per-node", "two"], "for example 2,1"),
        (["--algorithms", "ddp", "--rounds", "0"], "rounds: got 0, expected 1 or more"),
        (["--algorithms", "ddp", "--steps", "0"], "steps: got 0"),
        (
            ["--algorithms", "ddp", "--env-only", "--steps", "9"],
            "pass the script's own option after --, for example: -- --max_steps 9",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    script: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    done = compare(script, *words, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_wrong_straggler_removes_no_earlier_recording(script: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "out" / "round1" / "0-ddp" / "rank0.jsonl"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    words = ["--algorithms", "ddp", "--nodes", "2", "--straggler", "5:0.5"]
    done = compare(script, *words, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "straggler: got node 5" in done.output
    assert earlier.exists()


def test_a_missing_script_is_refused() -> None:
    done = compare("nowhere.py", "--algorithms", "ddp")
    assert done.exit_code == 2
    assert "is not a file" in done.output


# Reading and measuring.


def test_a_growing_recording_is_read_line_by_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, [[step(1.0)]]) / "rank0.jsonl"
    recording = Recording(path)
    recording.update()
    half, rest = json.dumps(step(2.0))[:20], json.dumps(step(2.0))[20:]
    with path.open("a") as file:
        file.write(half)
    recording.update()
    assert [each.seconds for each in recording.steps] == [1.0]
    with path.open("a") as file:
        file.write(rest + "\n" + json.dumps(heldout(0.5)) + "\n" + json.dumps(step(3.0)) + "\n")
    recording.update()
    recording.update()
    assert [each.seconds for each in recording.steps] == [1.0, 2.0, 3.0]
    assert recording.heldout == [(2, 0.5)]


def test_a_rank_that_has_not_begun_has_no_recording_yet(tmp_path: Path) -> None:
    write_run(tmp_path, [[step()], [step()]])
    (tmp_path / "rank1.jsonl").write_text('{"event": "atta')
    assert [recording.rank for recording in read_run(tmp_path)] == [0]
    assert Run(parse_methods("ddp")[0][0], 1, tmp_path).recordings() == []


def test_measures_of_a_run_worked_out_by_hand(tmp_path: Path) -> None:
    # Ten steps, of which the first two are the warm-up. Loss falls from 10 to 1 on rank 0, and
    # is 2 higher on rank 1.
    def lines(rank: int) -> list[Line]:
        losses = [10 - k + 2 * rank for k in range(10)]
        warm_up = [step(9.0, 100, loss=loss) for loss in losses[:2]]
        counted = [step(0.5 + rank, 40 + rank, 0.5 * rank, loss=loss) for loss in losses[2:]]
        counted = [line | {"choosing": 0.5} for line in counted]  # which counts, too
        return [*warm_up, *counted, finish(0.75), heldout(3.0 + rank)]

    ranks = [lines(0), lines(1)]
    found = measure_run(read_run(write_run(tmp_path, ranks)))
    assert found.steps == 10
    assert found.seconds == 2.0  # of the slowest rank
    assert found.bytes_sent == found.bytes_on_link == 41  # of the busiest node
    assert found.stall == 0.25  # mean over ranks
    assert found.final_loss == 2.0  # last step, mean of 1 and 3
    assert found.heldout_loss == 3.5
    assert found.distance == 0.75
    assert found.curve.seconds[:3] == (9.0, 18.0, 19.5)
    assert found.curve.heldout == ((10, 3.5),)


def test_the_speed_that_is_kept_beside_a_slow_rank(tmp_path: Path) -> None:
    """Rank 1 takes twice as long: of 3/2 of the speed of rank 0 they keep all, or 2/3."""
    equal = [step(2.0, stalled=1.0, weight=4.0)], [step(2.0, weight=4.0)]
    fitting = [step(2.0, weight=8.0)], [step(2.0, weight=4.0)]
    found = [
        measure_run(read_run(write_run(tmp_path / name, [own * 5 for own in ranks])))
        for name, ranks in (("equal", equal), ("fitting", fitting))
    ]
    assert [each.speed_kept for each in found] == [pytest.approx(2 / 3), pytest.approx(1.0)]


def test_bytes_are_summed_over_a_node_and_split_by_axis(tmp_path: Path) -> None:
    axes = {"world": 60, "node": 10, "local": 1000}
    ranks = [[step(sent=1070, bytes_by_axis=axes)] * 5 for _ in range(3)]
    found = measure_run(read_run(write_run(tmp_path, ranks, nodes=[[0, 1], [2]])))
    assert found.bytes_sent == 2 * (60 + 10)
    assert found.bytes_on_link == 60 + 2 * 10  # of a ring one hop in two stays inside the node
    # Recordings that do not tell axes apart count as "world".
    ranks = [[step(sent=1070)] * 5 for _ in range(3)]
    assert (
        measure_run(read_run(write_run(tmp_path, ranks, nodes=[[0, 1], [2]]))).bytes_sent
        == 2 * 1070
    )


def test_only_steps_that_all_ranks_completed_count(tmp_path: Path) -> None:
    found = measure_run(read_run(write_run(tmp_path, [[step()] * 7, [step()] * 5])))
    assert found.steps == len(found.curve.seconds) == 5
    assert (found.final_loss, found.heldout_loss, found.distance) == (None, None, None)


def test_smooth_loss_and_the_time_to_reach_a_target() -> None:
    curve = LossCurve(tuple(map(float, range(1, 21))), (*map(float, range(20, 1, -1)), None))
    assert curve.smooth[:3] == [20.0, 19.5, 18.5]  # two steps are a tenth of the run
    assert curve.smooth[-2:] == [2.5, 2.0]
    rare = LossCurve((1.0,) * 20, (4.0, *[None] * 9, 2.0, *[None] * 9))
    assert rare.smooth == [4.0] * 10 + [2.0] * 10
    assert LossCurve((1.0, 2.0), (None, 3.0)).smooth == [None, 3.0]
    assert curve.seconds_to(18.5) == 3.0
    assert curve.seconds_to(0.5) is None
    lucky = LossCurve(tuple(map(float, range(1, 31))), (0.5, *[1.0 - k / 100 for k in range(29)]))
    assert lucky.seconds_to(0.805) == 23.0, "not the first batch, whose loss is below by chance"


@pytest.mark.parametrize("every", [1, 7, 10])
def test_a_long_curve_keeps_the_losses_that_there_are(every: int) -> None:
    losses = [float(k) if k % every == 0 else None for k in range(2000)]
    curves = merge_curves([LossCurve(tuple(map(float, range(2000))), tuple(losses))])
    for points in (curves.smooth, curves.train):
        assert 150 < len(points) <= 401
    assert {point.loss for point in curves.train} <= set(losses)
    assert curves.smooth[-1].step == 2000


# Comparing.


def comparison(
    folder: Path,
    algorithms: str,
    rounds: dict[str, list[float]],
    rate: int | None = None,
    target: float | None = None,
) -> Comparison:
    """Two ranks, seconds per step by method and round; loss falls from 5 to 1 and then is 1."""
    methods, baseline = parse_methods(algorithms)
    path = folder / "train.py"
    path.touch()
    runs = []
    for method in methods:
        for number, seconds in enumerate(rounds[method.text], 1):
            home = folder / f"{method.slug}-{number}"
            lines = [
                step(seconds, 0 if method.is_floor else 1000, 0.125, loss=max(5.0 - k, 1.0))
                for k in range(10)
            ]
            runs.append(Run(method, number, write_run(home, [lines, lines]), code=0))
    experiment = Experiment(path, methods, baseline, target_loss=target)
    return summarize(experiment, setup(rate), runs)


def test_medians_and_the_factor_within_rounds(tmp_path: Path) -> None:
    found = comparison(tmp_path, "ddp,sgp", {"ddp": [4.0, 6.0, 20.0], "sgp": [2.0, 2.0, 5.0]})
    ddp, sgp = found.results
    assert ddp.is_baseline
    assert ddp.seconds_per_step == Spread(6.0, 4.0, 20.0)
    assert sgp.faster == Spread(3.0, 2.0, 4.0)  # 4/2, 6/2 and 20/5
    assert sgp.seconds_to_target == Spread(10.0, 10.0, 25.0)  # the fifth step is the first at 1
    assert (found.target_loss, found.steps, found.rounds) == (1.0, 10, 3)
    assert sgp.floor is sgp.share_of_floor is None
    assert found.results[1].course is not None
    assert [point.loss for point in found.results[1].course.smooth[:3]] == [5.0, 4.0, 3.0]


@pytest.mark.parametrize(
    ("rate", "floor"),
    [(None, 2.0), (8000, 2.0), (2500, 8000 / (2500 * PAYLOAD))],  # 1000 bytes
)
def test_floor_is_computation_or_the_link(tmp_path: Path, rate: int | None, floor: float) -> None:
    rounds = {"ddp": [5.0, 10.0], "alone": [2.0, 4.0]}  # the machine was slower for a while
    found = comparison(tmp_path, "ddp,alone", rounds, rate)
    assert found.results[0].floor == Spread((floor + 4.0) / 2, floor, 4.0)
    assert found.results[0].share_of_floor == Spread.of([floor / 5, 4 / 10])
    assert found.results[1].is_floor
    assert found.results[1].floor is None


def test_a_target_that_was_not_reached_and_stalls_that_torch_hides(tmp_path: Path) -> None:
    rounds = {"torch-ddp": [1.0], "sgp": [1.0]}
    first, second = comparison(tmp_path, "torch-ddp,sgp", rounds, target=0.5).results
    assert first.seconds_to_target is second.seconds_to_target is None
    assert first.stall_per_step is None
    assert second.stall_per_step == Spread(0.125, 0.125, 0.125)


def test_the_floor_does_not_set_the_target(tmp_path: Path) -> None:
    methods, baseline = parse_methods("sgp,alone")
    (tmp_path / "train.py").touch()
    experiment = Experiment(tmp_path / "train.py", methods, baseline)
    runs = [
        Run(method, 1, write_run(tmp_path / method.slug, [[step(loss=loss)] * 2]), code=0)
        for method, loss in zip(methods, (1.0, 9.0), strict=True)
    ]
    assert summarize(experiment, setup(), runs).target_loss == 1.0


def test_failed_and_interrupted_runs_are_distinguished(tmp_path: Path) -> None:
    methods, baseline = parse_methods("ddp,sgp,local_sgd")
    (tmp_path / "train.py").touch()
    experiment = Experiment(tmp_path / "train.py", methods, baseline)
    lines = [step(2.0, loss=float("nan"))] * 5
    homes = [write_run(tmp_path / method.slug, [lines, lines]) for method in methods]
    runs = [
        Run(methods[0], 1, homes[0], code=0),
        Run(methods[1], 1, homes[1], code=3, failed_rank=1, last_lines=["boom"]),
        Run(methods[2], 1, homes[2]),
    ]
    found = summarize(experiment, setup(), runs)
    ddp, sgp, local = found.results
    assert [result.state for result in found.results] == ["done", "failed", "interrupted"]
    assert ddp.note == "the loss is not finite"
    assert (sgp.note, sgp.last_lines) == ("failed: round 1, rank 1, exit code 3", ("boom",))
    assert sgp.seconds_per_step is None
    assert local.seconds_per_step == Spread(2.0, 2.0, 2.0)
    assert local.course is None
    parsed = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert parsed["results"][0]["course"]["train"][0]["loss"] is None
    # An interrupted run does not count beside a complete one.
    runs.append(Run(methods[0], 2, write_run(tmp_path / "again", [[step(9.0)]] * 2)))
    again = summarize(experiment, setup(), runs).results[0]
    assert (again.state, again.seconds_per_step) == ("interrupted", Spread(2.0, 2.0, 2.0))
    assert again.note == "interrupted in round 2; the loss is not finite"


@pytest.mark.parametrize("width", [200, 60])
def test_table_has_every_column_in_either_direction(tmp_path: Path, width: int) -> None:
    found = comparison(tmp_path, "ddp,sgp,alone", {"ddp": [2.0], "sgp": [1.0], "alone": [0.5]})
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table(found, width))
    text = captured.get()
    words = ["ddp", "sgp", "baseline", "1.00 s", "2.00×", "50 %", "1.00 kB", "held-out", "–"]
    assert [word for word in words if word not in text] == []
    assert "not shaped" in text


def test_timeline_shows_the_median_step_and_the_rare_exchange(tmp_path: Path) -> None:
    def lines(rank: int) -> list[Line]:
        spans = [["forward", 0.0, 0.25], ["exchange:world", -1.0, 0.5], ["exchange:node", 0.5, 9.0]]
        return [
            # With pauses between steps: messages that left there are seen in the next step alone.
            step(1.0 + k / 16 + rank, 80 * (k % 4 == 3), time=10.0 * k, spans=spans * (k % 4 == 3))
            for k in range(20)
        ]

    silent, sending = representative_steps("m", read_run(write_run(tmp_path, [lines(0), lines(1)])))
    assert silent.title == "without exchange, 12 of 16 steps"
    assert sending.title == "with exchange, 4 of 16 steps"
    # Steps 7, 11, 15 and 19 send; of four the third is the median.
    assert [track.seconds for track in sending.tracks] == [1.0 + 15 / 16, 2.0 + 15 / 16]
    shown = [(part.kind, part.start, part.end) for part in sending.tracks[0].spans]
    # Joined, and cut to the step.
    assert shown == [("forward", 0.0, 0.25), ("exchange", 0.0, 1.9375)]
    assert silent.tracks[0].spans == ()


def test_a_message_in_flight_is_shown_in_all_of_its_steps(tmp_path: Path) -> None:
    """It is sent at the end of every fourth step, and recorded by the wait two steps later."""

    def lines(rank: int) -> list[Line]:
        told = [["exchange:node", -1.75, -0.5], ["exchange:local", 0.0, 0.5]]
        sent = [{"local": 8, "node": 80 * (k % 4 == 3)} for k in range(20)]
        return [
            step(1.0, time=k + 1.0, bytes_by_axis=sent[k], spans=told if k % 4 == 1 else [])
            for k in range(20)
        ]

    recordings = read_run(write_run(tmp_path, [lines(0), lines(1)], nodes=[[0], [1]]))
    found = representative_steps("m", recordings)
    assert [timeline.title for timeline in found] == [
        "without exchange, 8 of 16 steps",
        "message in flight, 4 of 16 steps",
        "with exchange, 4 of 16 steps",
    ]
    steps = recordings[0].steps
    assert [list(steps[k].spans_of("exchange")) for k in (7, 8, 9)] == [
        [(0.25, 1.5)],
        [(-0.75, 0.5)],
        [(-1.75, -0.5), (0.0, 0.5)],
    ]


# Networks.


def test_without_root_ranks_run_on_loopback_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with open_runner(2, 1, "100mbit") as (runner, unshaped):
        assert isinstance(runner, Loopback)
        assert runner.rate is None
        assert unshaped is not None
        assert unshaped.startswith("the network has no rate limit")


def test_without_a_rate_nothing_is_shaped() -> None:
    with open_runner(2, [2, 1], None) as (runner, unshaped):
        assert runner.cluster.per_node == (2, 1)
        assert "no --rate" in str(unshaped)


@pytest.mark.processes
def test_links_with_latency_are_those_of_the_lab() -> None:
    between = ["2ms@100mbit"]
    with open_runner(2, 1, None, sites=[1, 1], between=between) as (runner, unshaped):
        if unshaped is not None:
            pytest.skip(unshaped)
        assert runner.links.far[0, 1].latency == 0.002
        assert str(runner.links) == "no rate limit; sites of 1, 1 nodes, 100 Mbit/s, 2 ms one way"


# Real runs.


@pytest.mark.processes
def test_two_methods_on_two_workers_in_two_rounds(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = compare(
        *(script, "--algorithms", "ddp,local_sgd(every=2)", "--nodes", 2, "--rounds", 2),
        *("--steps", 5, "--out", out, "--json"),
    )
    assert done.exit_code == 0, done.output
    assert "the network has no rate limit" in done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((out / "compare.json").read_text())
    ddp, local = found["results"]
    assert (ddp["name"], local["name"]) == ("ddp", "local_sgd(every=2)")
    assert [result["state"] for result in found["results"]] == ["done", "done"]
    # A ring sends 102 gradients, two flags and a call number once, parameters every second step.
    assert ddp["bytes_per_step"]["median"] == 4 * (102 + 3)
    assert local["bytes_per_step"]["median"] == 4 * 102 / 2
    assert local["heldout_loss"]["median"] == 0.25
    assert local["faster"]["min"] > 0
    assert ddp["consensus_distance"]["median"] == 0.0
    assert 0 < local["final_loss"]["median"] < 5
    assert (out / "report.html").stat().st_size > 10_000
    begun = {
        f"{number} {method}": json.loads(path.read_text().splitlines()[0])["time"]
        for number in (1, 2)
        for method, folder in (("ddp", "0-ddp"), ("local", "1-local_sgd-every-2"))
        for path in [out / "recordings" / f"round{number}" / folder / "rank0.jsonl"]
    }
    assert sorted(begun, key=lambda name: begun[name]) == ["1 ddp", "1 local", "2 ddp", "2 local"]


@pytest.mark.processes
@pytest.mark.fault("a method fails in offbeat compare", "its last lines are shown; others go on")
def test_a_failing_method_is_shown_and_the_others_are_reported(
    script: Path, tmp_path: Path
) -> None:
    done = compare(
        *(script, "--algorithms", "local_sgd,ddp", "--nodes", 2, "--rounds", 1),
        *("--out", tmp_path / "o", "--", "--fail", "local_sgd"),
    )
    assert done.exit_code == 1
    assert "local_sgd failed: round 1, rank 1, exit code 1" in done.output
    assert "RuntimeError: the dog ate it" in done.output
    local, ddp = json.loads((tmp_path / "o" / "compare.json").read_text())["results"]
    assert (local["state"], ddp["state"]) == ("failed", "done")
    assert ddp["seconds_per_step"]["median"] > 0
    assert "RuntimeError: the dog ate it" in local["last_lines"][-1]


@pytest.mark.processes
@pytest.mark.fault("a script under offbeat compare never calls replicate()", "exit code 1; says so")
def test_a_script_that_records_nothing_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('no offbeat here')")
    done = compare(path, "--algorithms", "ddp", "--nodes", 1, "--rounds", 1, "--out", tmp_path)
    assert done.exit_code == 1
    assert "it must call offbeat.replicate" in done.output


@pytest.mark.processes
def test_a_script_without_options_is_compared_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FRAMEWORK.format(algorithm="offbeat.algorithm()"))
    done = compare(
        *(path, "--algorithms", "ddp,local_sgd(every=2)", "--nodes", 1, "--rounds", 1),
        *("--out", tmp_path, "--env-only", "--json", "--", "--max_steps", 4),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["steps"] == 4
    local = read_run(tmp_path / "recordings" / "round1" / "1-local_sgd-every-2")
    expected = {repr(offbeat.local_sgd(every=2)): "local_sgd(every=2)"}
    assert [recording.algorithms for recording in local] == [expected]


@pytest.mark.processes
@pytest.mark.fault(
    "a script under offbeat compare trains with another algorithm", "exit code 1; names both"
)
def test_a_script_with_an_algorithm_of_its_own_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FRAMEWORK.format(algorithm="offbeat.local_sgd(every=3)"))
    done = compare(
        *(path, "--algorithms", "sgp,local_sgd(every=3)", "--nodes", 1, "--rounds", 1),
        *("--out", tmp_path, "--env-only"),
    )
    assert done.exit_code == 1
    assert "the script trained with local_sgd(every=3), not with sgp; it must" in done.output
    sgp, local = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert (sgp["state"], local["state"]) == ("failed", "done")
    assert sgp["seconds_per_step"] is None


@pytest.mark.parametrize(
    ("said", "hinted"),
    [
        ("train.py: error: unrecognized arguments: --algorithm ddp", True),
        ("train.py: error: argument --algorithm: invalid choice: 'ddp'", True),
        ("No such option: --algorithm", True),
        ("Unknown command line flag 'algorithm'", True),
        ("ValueError: Some are not used by the HfArgumentParser: ['--algorithm', 'ddp']", True),
        ("usage: train.py [--algorithm A]\nerror: unrecognized arguments: --steps 6", False),
        ("ValueError: unknown algorithm 'ddp'", False),
    ],
)
def test_what_parsers_say_to_an_unknown_option(said: str, hinted: bool) -> None:
    assert any(map(_REFUSED_OPTION.search, said.splitlines())) == hinted


@pytest.mark.processes
@pytest.mark.fault(
    "a script under offbeat compare has no option --algorithm", "exit code 1; names --env-only"
)
def test_an_unknown_option_leads_to_env_only(tmp_path: Path) -> None:
    said = "train.py: error: unrecognized arguments: --algorithm ddp"
    path = tmp_path / "train.py"
    path.write_text(f"raise SystemExit({said!r})")
    words = [path, "--algorithms", "ddp", "--nodes", 1, "--out", tmp_path, "--no-report"]
    hint = "let it call offbeat.algorithm() without a text, and add --env-only"
    done = compare(*words)
    assert done.exit_code == 1
    assert said in done.output
    assert hint in done.output
    assert hint not in compare(*words, "--env-only").output


def test_termination_interrupts_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable(_interrupt):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.processes
@pytest.mark.fault("offbeat compare receives Ctrl-C", "all processes end; finished runs are kept")
def test_ctrl_c_ends_everything_and_keeps_what_was_measured(script: Path, tmp_path: Path) -> None:
    words = [script, "--algorithms", "ddp,local_sgd", "--nodes", 2, "--rounds", 9]
    words += ["--out", tmp_path, "--", "--hang", "local_sgd"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "compare", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    home = tmp_path / "recordings" / "round1" / "1-local_sgd"
    wait_until(lambda: len(list(steps_of(home))) == 2 * 4)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in errors
    ddp, local = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert (ddp["state"], local["state"]) == ("done", "interrupted")
    assert local["seconds_per_step"]["median"] > 0
    assert "local_sgd" in output
    assert (tmp_path / "report.html").exists()
    before = len(list(steps_of(home)))
    time.sleep(0.3)
    assert len(list(steps_of(home))) == before


@pytest.mark.processes
def test_in_the_lab_the_rate_is_known(script: Path, tmp_path: Path) -> None:
    try:
        with Lab(1, rate="1gbit"):
            pass
    except Unavailable as error:
        pytest.skip(str(error))
    (tmp_path / "report.html").write_text("of an earlier comparison")
    done = compare(
        *(script, "--algorithms", "sgp", "--nodes", 2, "--rate", "100mbit", "--compute-only"),
        *("--rounds", 1, "--out", tmp_path, "--no-report"),
    )
    assert done.exit_code == 0, done.output
    assert "100 Mbit/s" in done.output
    assert not (tmp_path / "report.html").exists()
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["setup"]["rate"] == 100_000_000
    assert found["setup"]["unshaped"] is None
    sgp, alone = found["results"]
    assert sgp["floor"] == alone["seconds_per_step"]
    assert alone["bytes_per_step"]["median"] == 0


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.05)


def steps_of(folder: Path) -> Iterator[str]:
    for path in folder.glob("rank*.jsonl"):
        yield from (line for line in path.read_text().splitlines() if '"step"' in line)
