"""Profiles: measured, kept, written by hand, and refused with an error that teaches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import profile
from rich.console import Console

import offbeat
from offbeat.plan import Parameter, Speeds, read_profile
from offbeat.planner.measure import device_of, measure_profile, profile_of
from offbeat.telemetry.gradient_times import GRADIENTS_VARIABLE
from offbeat.telemetry.recorder import FOLDER_VARIABLE
from offbeat.telemetry.recording import Recording, Step, read_run
from offbeat.testing import ThreadWorld

SCRIPT = """
import argparse, time
import torch
import offbeat

class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.04)
        return grad

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm")
parser.add_argument("--steps", type=int)
args = parser.parse_args()
torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 2))
model[0].bias.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = offbeat.replicate(model, offbeat.algorithm(args.algorithm))
for _ in range(args.steps):
    hidden = Pause.apply(model[0](torch.ones(4, 8, requires_grad=True)))
    Pause.apply(model[1](hidden)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    replica.step()
replica.detach()
torch.distributed.destroy_process_group()
"""
BY_HAND: dict[str, Any] = {
    "parameters": [{"name": "w", "numel": 300}, {"name": "b", "numel": 100, "dtype": "bfloat16"}],
    "forward": 0.1,
    "backward": 0.2,
    "optimizer": 0.01,
    "bandwidth": 1e10,
}


def write(folder: Path, **changes: Any) -> Path:
    found = {name: value for name, value in (BY_HAND | changes).items() if value != "missing"}
    (folder / "profile.json").write_text(json.dumps(found))
    return folder / "profile.json"


@pytest.mark.quiet
def test_a_script_runs_alone_and_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, measured = list[str](), Speeds.measure("cpu")
    monkeypatch.setattr(Speeds, "measure", lambda device: asked.append(device) or measured)
    (tmp_path / "train.py").write_text(SCRIPT)
    for _ in range(3):  # other load makes any part longer, as would a part that counts another one
        asked.clear()
        found = measure_profile(tmp_path / "train.py", (), 8, False, Console(quiet=True))
        is_quiet = found.forward < 0.16 and found.backward < 0.08 and found.optimizer < 0.04
        if is_quiet and found.ready["1.bias"] < 0.01:
            break
    else:
        pytest.fail(f"a part of a step counts another one: {found}")
    sizes = {p.name: p.numel for p in found.parameters}
    assert sizes == {"0.weight": 2400, "1.weight": 600, "1.bias": 2}
    assert found.order[-1] == "0.weight"
    # Until the first gradient: two pauses, and the first one of backward. Sleeps only last longer.
    assert found.forward >= 0.08
    assert found.backward >= 0.04
    assert found.optimizer >= 0.01
    assert found.ready["0.weight"] == pytest.approx(found.backward, abs=0.005)
    assert len(found.spread) == 6
    assert sum(found.spread) == pytest.approx(6)
    assert found.memory is not None
    assert found.memory > 10**7
    assert all(value > 0 for value in vars(found.speeds).values())
    assert asked == [found.device] == ["cpu"]
    found.write(tmp_path / "kept.json")
    assert read_profile(tmp_path / "kept.json") == found


def test_gradients_are_recorded_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(world: Any) -> None:
        model = torch.nn.Linear(3, 2)
        replica = offbeat.replicate(model, offbeat.alone(), mesh=world)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            replica.step()
        replica.detach()
        model(torch.ones(1, 3)).sum().backward()  # no hook is left

    for folder, wanted in (("without", ""), ("with", "1")):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / folder))
        monkeypatch.setenv(GRADIENTS_VARIABLE, wanted)
        ThreadWorld(1).run(work)
    without, recorded = (read_run(tmp_path / name)[0].steps[-1] for name in ("without", "with"))
    assert not without.ready
    assert not without.parameters
    assert recorded.parameters == {"weight": (6, "float32"), "bias": (2, "float32")}
    assert set(recorded.ready) == {"weight", "bias"}
    assert recorded.device == "cpu"
    assert all(0 < moment < recorded.seconds for moment in recorded.ready.values())
    # Offset and base of both clocks are the same: the last gradient ends backward.
    ((_, end),) = recorded.spans_of("backward")
    assert max(recorded.ready.values()) == pytest.approx(end, abs=0.01)


def test_passes_are_measured_on_the_device_that_has_trained() -> None:
    line = {"time": 0.0, "seconds": 1.0, "bytes_sent": 0, "seconds_stalled": 0.0}
    steps = [Step.parse({**line, "device": "xpu"})] * 8
    found = profile_of([Recording(Path(), steps=steps)], profile(1).speeds)
    assert found.device == device_of([Recording(Path(), steps=steps)]) == "xpu"
    assert device_of([Recording(Path(), steps=[Step.parse(line)])]) == device_of([]) == "cpu"


def test_a_script_with_several_replicas_is_an_error() -> None:
    line = {"time": 0.0, "seconds": 1.0, "bytes_sent": 0, "seconds_stalled": 0.0}
    recording = Recording(Path(), replicas=2, steps=[Step.parse(line)] * 8)
    with pytest.raises(ValueError, match="makes 2 replicas"):
        profile_of([recording], profile(1).speeds)


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_a_script_that_ends_early_is_an_error(steps: int) -> None:
    recording = Recording(Path(), steps=[Step(0.0, 1.0, {}, 0.0)] * steps)
    with pytest.raises(ValueError, match=rf"ended after {steps} steps.*more --steps"):
        profile_of([recording] if steps else [], profile(1).speeds)


def test_a_profile_by_hand_needs_sizes_and_times_only(tmp_path: Path) -> None:
    found = read_profile(write(tmp_path))
    assert found.compute == pytest.approx(0.31)
    assert found.nbytes == 300 * 4 + 100 * 2
    assert found.order == ("b", "w")
    assert found.ready == pytest.approx({"b": 0.05, "w": 0.2})
    assert found.speeds == Speeds.of_bandwidth(1e10)
    parameters = [{"name": "w", "numel": 5, "ready": 0.1}, {"name": "b", "numel": 5, "ready": 0.2}]
    assert read_profile(write(tmp_path, parameters=parameters)).order == ("w", "b")
    assert read_profile(write(tmp_path, spread=[0.9, 1.1], memory=10)).memory == 10
    assert (found.device, read_profile(write(tmp_path, device="xpu")).device) == (None, "xpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": "missing"}, "forward=None, expected a number of seconds, 0 or more"),
        ({"backward": -1}, "backward=-1"),
        ({"optimizer": "1 s"}, "optimizer='1 s'"),
        ({"forward": 0, "backward": 0.0, "optimizer": 0}, "are all 0, expected the seconds of a"),
        ({"bandwidth": "missing"}, "bandwidth=None without speeds, expected that of the memory"),
        ({"parameters": []}, "parameters=[], expected objects"),
        ({"parameters": [3]}, "parameter 0: got 3"),
        ({"parameters": [{"name": "w"}]}, "parameter 0: numel=None"),
        ({"parameters": [{"name": "w", "numel": 2.5}]}, "numel=2.5, expected a whole number"),
        ({"parameters": [{"numel": 2}]}, "name=None"),
        (
            {"parameters": [{"name": "w", "numel": 2, "dtype": "int8"}]},
            "dtype='int8', expected 'float64', ",
        ),
        ({"parameters": [{"name": "w", "numel": 2, "size": 3}]}, "unknown field 'size'"),
        ({"parameters": [{"name": "w", "numel": 2}] * 2}, "'w' is listed twice"),
        ({"parameters": [{"name": "w", "numel": 2, "ready": 1.0}]}, "after the end of backward"),
        ({"spread": [1.0, 0.0]}, "spread holds 0.0, expected numbers above 0"),
        ({"spread": [0.5, 0.7]}, "spread has the mean 0.6, expected 1"),
        ({"parameters": [{"name": "w", "numel": 10**22}]}, "numel=1000000000000000"),
        ({"spread": 3}, "spread=3, expected None or a list"),
        ({"device": 3}, 'device=3, expected None or a str (such as "cpu")'),
        ({"speeds": {"copy": 1}}, "add=None, expected a number of seconds"),
        ({"speed": 1}, "unknown field 'speed'"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="profile") as raised:
        read_profile(write(tmp_path, **changes))
    assert message in str(raised.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    for path in (tmp_path / "p.json", tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match="cannot read"):
            read_profile(path)
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(ValueError, match="expected an object"):
        read_profile(tmp_path / "p.json")


def test_a_faster_device_computes_in_less_time() -> None:
    found = profile(10, 20, speeds=Speeds.of_bandwidth(1e9)).on_device(4.0)
    assert found.compute == pytest.approx(0.35 / 4)
    assert found.ready["0.w"] == pytest.approx(0.05)
    assert found.speeds == Speeds.of_bandwidth(4e9)
    assert found.parameters[0] == Parameter("0.w", 10, ready=found.ready["0.w"])
