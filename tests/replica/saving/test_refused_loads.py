"""A load that is refused on one rank changes nothing on any."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import MultiStepLR, StepLR

import offbeat
from offbeat.replica.saving import registered
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import Quadratic, seeded

pytestmark = pytest.mark.usefixtures("fast_heartbeat")
Parts = dict[str, Any]


def build(world: World) -> Parts:
    """Two networks, each with a replica, and one optimizer, scheduler and scaler."""
    first, second = seeded(0, lambda: (nn.Linear(3, 2), nn.Linear(2, 2)))
    nets = nn.ModuleList([first, nn.Sequential(second, nn.BatchNorm1d(2))])
    optimizer = Adam(nets.parameters(), lr=0.1)
    replicas = [offbeat.replicate(net, offbeat.sgp(overlap=1), mesh=world) for net in nets]
    return {
        "first": replicas[0],
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2),
        "second": replicas[1],
    }


def train(parts: Parts, steps: int) -> None:
    first, second, scaler = parts["first"], parts["second"], parts["scaler"]
    for _ in range(steps):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(first.world.rank))
        scaler.scale(second.model(first.model(x)).square().sum()).backward()
        scaler.step(parts["optimizer"])
        scaler.update()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
        first.step()
        second.step()


def everything(parts: Parts) -> Any:
    models = [parts[name].model.state_dict() for name in ("first", "second")]
    return copy.deepcopy([models, {name: part.state_dict() for name, part in parts.items()}])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Parts], None]:
    def damage(path: Path, parts: Parts) -> None:
        saved = torch.load(path)
        change(saved)
        torch.save(saved, path)

    return damage


def truncate(path: Path, parts: Parts) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def refuse(path: Path, parts: Parts) -> None:
    """Fail once, after the optimizer has taken the state."""

    def fail(optimizer: Adam) -> None:
        hook.remove()
        raise RuntimeError("on purpose")

    hook = parts["optimizer"].register_load_state_dict_post_hook(fail)


def of_another_step(path: Path, parts: Parts) -> None:
    path.write_bytes(path.with_name("earlier").read_bytes())


def _bump(saved: dict[str, Any], name: str) -> None:
    saved[name]["rank1"]["model"]["bias" if name == "first" else "0.bias"] += 1


DAMAGES: dict[str, Callable[[Path, Parts], None]] = {
    "torn": truncate,
    "empty": lambda path, parts: path.write_bytes(b""),
    "missing": lambda path, parts: path.unlink(),
    "a part less": edited(lambda saved: saved.pop("scaler")),
    "no optimizer's state": edited(lambda saved: saved.update(optimizer={})),
    "another optimizer's groups": edited(lambda saved: saved["optimizer"]["param_groups"].pop()),
    "no scaler's state": edited(lambda saved: saved.update(scaler={})),
    "an optimizer that fails": refuse,
    "the first replica": edited(lambda saved: _bump(saved, "first")),
    "the second replica": edited(lambda saved: _bump(saved, "second")),
    "no replica's state": edited(lambda saved: saved.update(second={"rank1": {"size": 2}})),
    "another step": of_another_step,
}


@pytest.mark.fault(
    "`load_per_rank` is refused on one rank",
    "ValueError on all ranks; optimizers, schedulers, scalers and replicas of all ranks are as "
    "before",
    group="Checkpoints",
)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_refused_load_changes_nothing(
    damage: Callable[[Path, Parts], None], tmp_path: Path
) -> None:
    def work(world: World) -> str:
        parts = build(world)
        train(parts, 1)
        offbeat.save_per_rank(tmp_path / str(world.rank), **parts)
        earlier = next((tmp_path / str(world.rank)).iterdir()).read_bytes()
        train(parts, 1)
        offbeat.save_per_rank(tmp_path / str(world.rank), **parts)
        path = next((tmp_path / str(world.rank)).iterdir())
        path.with_name("earlier").write_bytes(earlier)
        train(parts, 1)
        before = everything(parts)
        if world.rank == 1:
            damage(path, parts)
        with pytest.raises(ValueError, match="rank") as error:
            offbeat.load_per_rank(tmp_path / str(world.rank), **parts)
        assert same(everything(parts), before)
        train(parts, 1)  # the ranks are still in step
        for name in ("first", "second"):
            parts[name].finish()
            parts[name].detach()
        return str(error.value).replace(str(tmp_path / "0"), "").replace(str(tmp_path / "1"), "")

    assert len({*ThreadWorld(2).run(work)}) == 1


class Picky:
    """A registered object that refuses a state on one rank."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.value = refuses, 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.refuses and self.value != 2:
            raise KeyError("a state of another version")


def test_a_registered_state_is_loaded_as_it_was() -> None:
    """``MultiStepLR`` has whole numbers as keys, which plain JSON makes text."""

    def work(world: World) -> None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)
        schedules = [MultiStepLR(SGD(replica.model.parameters(), 0.1), [3, 6]) for _ in range(2)]
        replica.register("schedule", schedules[0], is_saved=True)
        state, texts = schedules[0].state_dict(), replica.state_dict()["rank0"]["registered"]
        replica.register("schedule", schedules[1], is_saved=True)
        schedules[1].milestones.clear()
        saved = replica.state_dict()
        saved["rank0"]["registered"] = texts
        del saved["rank0"]["checksum"]
        replica.check_state_dict(saved)
        assert not schedules[1].milestones, "a check loads nothing"
        replica.load_state_dict(saved)
        assert schedules[1].state_dict() == state
        # An older one is plain JSON.
        saved["rank0"]["registered"] = {"schedule": json.dumps({"last_epoch": 7})}
        replica.load_state_dict(saved)
        assert schedules[1].last_epoch == 7
        replica.register("weights", replica.model, is_saved=True)
        with pytest.raises(ValueError, match="registered 'weights': it holds tensors"):
            replica.state_dict()
        replica.detach()

    ThreadWorld(1).run(work)


@pytest.mark.parametrize("state", [[1, 2], (1, {2: "3"}), {"list": [1]}, {}], ids=str)
def test_a_registered_state_may_be_any_of_plain_values(state: Any) -> None:
    text = registered._text_of("state", SimpleNamespace(state_dict=lambda: state))
    assert registered._value_of(text) == state


def test_a_registered_state_that_one_rank_refuses_is_loaded_by_none() -> None:
    def work(world: World) -> str:
        replica = offbeat.replicate(Quadratic(), offbeat.sgp(), mesh=world)
        picky = Picky(refuses=world.rank == 1)
        replica.register("picky", picky, is_saved=True)
        saved = replica.state_dict()
        picky.value = 2
        replica.step()
        for load in (replica.check_state_dict, replica.load_state_dict):
            with pytest.raises(ValueError, match="cannot load a registered state") as said:
                load(saved)
        assert (picky.value, replica.steps) == (2, 1)
        replica.step()
        replica.detach()
        return str(said.value)

    first, second = ThreadWorld(2).run(work)
    assert first == second
    assert "rank 1" in first
    assert "another version" in first
