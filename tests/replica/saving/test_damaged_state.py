"""Saved states that are damaged or do not fit: one ``ValueError`` on all ranks, nothing written."""

import copy
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import SGD

import offbeat
from offbeat.replica.saving.checksum import checksum
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from outcomes import SECONDS, alike

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

SIZE = 2


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def run(model: nn.Module, steps: int, replica: offbeat.Replica) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def saved_by(text: str, size: int, *, finished: bool, path: Path) -> None:
    """Two steps of every rank, saved to one file a rank."""

    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        with torch.no_grad():
            model[0].weight.add_(world.rank if text != "ddp" else 0.0)
        run(model, 2, replica)
        if finished:
            replica.finish()
        torch.save(replica.state_dict(), path / f"{world.rank}.pt")
        replica.detach()

    ThreadWorld(size).run(work)


def loading(text: str, find: Callable[[int], Any]) -> Callable[[World], None]:
    """Work that loads ``find(rank)`` into a new replica."""

    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        replica.load_state_dict(find(world.rank))
        run(model, 1, replica)
        replica.detach()

    return work


GARBAGE = {
    "nothing": {},
    "none": None,
    "a model's": small().state_dict(),
    "no entry": {"rank0": {}, "rank1": {}},
    "a number": {"rank0": 3, "rank1": 3},
    "number keys": {0: {}, 1: {}},
    "a list": [1, 2],
    "a path": "checkpoint.pt",
}


@pytest.mark.fault("one rank loads what is no saved state", "ValueError on all ranks")
@pytest.mark.parametrize("what", GARBAGE)
def test_load_garbage(what: str, tmp_path: Path) -> None:
    """On one rank alone: the others must not go on without it."""
    saved_by("sgp", SIZE, finished=False, path=tmp_path)

    def find(rank: int) -> Any:
        good = tmp_path / f"{rank}.pt"
        return GARBAGE[what] if rank == 1 else torch.load(good, weights_only=True)

    said = alike(loading("sgp", find))
    assert said.startswith("rank 1: ")
    assert "state_dict()" in said


@pytest.mark.fault(
    "an unfinished state is loaded by another number of ranks",
    "ValueError on all ranks; tells to call finish() before saving",
)
@pytest.mark.parametrize(("text", "old", "new"), [("sgp", 2, 3), ("local_sgd(every=5)", 3, 2)])
def test_load_another_world_size_without_finish(
    text: str, old: int, new: int, tmp_path: Path
) -> None:
    """Replicas differ: to keep some of them would lose what the others learned."""
    saved_by(text, old, finished=False, path=tmp_path)

    def find(rank: int) -> Any:
        return torch.load(tmp_path / f"{min(rank, old - 1)}.pt", weights_only=True)

    assert "call finish() before saving" in alike(loading(text, find), size=new)


@pytest.mark.parametrize(
    ("text", "old", "new"), [("ddp", 2, 3), ("sgp", 3, 1), ("local_sgd(every=5)", 2, 3)]
)
@pytest.mark.fault(
    "a finished state is loaded by another number of ranks",
    "all ranks continue from the averaged model",
)
def test_load_another_world_size_after_finish(
    text: str, old: int, new: int, tmp_path: Path
) -> None:
    """Allowed; new ranks load the file of any old one."""
    saved_by(text, old, finished=True, path=tmp_path)

    def work(world: World) -> Tensor:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        name = f"{min(world.rank, old - 1)}.pt"
        replica.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        assert replica.steps == 2
        loaded = model[0].weight.detach().clone()
        run(model, 1, replica)
        replica.detach()
        return loaded

    first, *others = ThreadWorld(new).run(work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.fault(
    "the unfinished state of another algorithm is loaded",
    "ValueError on all ranks; names both algorithms",
)
@pytest.mark.parametrize(("old", "new"), [("ddp", "sgp"), ("sgp", "ddp")])
def test_load_the_state_of_another_algorithm(old: str, new: str, tmp_path: Path) -> None:
    saved_by(old, SIZE, finished=False, path=tmp_path)

    def find(rank: int) -> Any:
        return torch.load(tmp_path / f"{rank}.pt", weights_only=True)

    said = alike(loading(new, find))
    assert str(offbeat.algorithm(repr(offbeat.algorithm(old)))) in said  # without defaults
    assert str(offbeat.algorithm(new)) in said


@pytest.mark.parametrize(
    ("old", "new"),
    [("ddp", "sgp"), ("sgp", "local_sgd(every=5)"), ("local_sgd(every=5)", "ddp")],
)
@pytest.mark.fault(
    "the finished state of another algorithm is loaded",
    "steps and model are restored; training goes on",
)
def test_load_the_finished_state_of_another_algorithm(old: str, new: str, tmp_path: Path) -> None:
    """As the error of an unfinished one advises: counters and model are taken over."""
    saved_by(old, SIZE, finished=True, path=tmp_path)

    def work(world: World) -> None:
        saved = torch.load(tmp_path / f"{world.rank}.pt", weights_only=True)
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(new), mesh=world)
        replica.load_state_dict(saved)
        assert replica.steps == 2
        for name, tensor in saved[f"rank{world.rank}"]["model"].items():
            assert torch.equal(model.state_dict()[name], tensor)
        run(model, 1, replica)
        replica.detach()

    ThreadWorld(SIZE).run(work, timeout=SECONDS)


# ---- damage -------------------------------------------------------------------------------------


def wide() -> nn.Sequential:
    """Layers of which most bits of a file are, and buffers."""
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def train(model: nn.Module, steps: int, replica: offbeat.Replica) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(replica.world.rank)
    for _ in range(steps):
        model(torch.randn(4, 2, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def files_of(text: str, steps: int = 3, size: int = SIZE) -> list[bytes]:
    """What each rank saves after some steps, as the bytes of its file."""

    def work(world: World) -> bytes:
        model = wide()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        train(model, steps, replica)
        file = io.BytesIO()
        torch.save(replica.state_dict(), file)
        replica.detach()
        return file.getvalue()

    return ThreadWorld(size).run(work)


def read(file: bytes) -> Any:
    return torch.load(io.BytesIO(file), weights_only=True)


def refusals(text: str, tried: list[list[Any]]) -> list[str]:
    """The errors, alike on all ranks, in whose models nothing was written, and which can train on.

    The same replicas refuse one state after another.
    """

    def work(world: World) -> list[str]:
        model, said = wide(), []
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        train(model, 2, replica)
        before = {**snapshot(model), **{n: b.clone() for n, b in model.named_buffers()}}
        for states in tried:
            calls = replica._members.heartbeat.phase.calls
            with pytest.raises(ValueError, match="rank") as raised:
                replica.load_state_dict(states[world.rank])
            assert raised.type is ValueError
            said.append(str(raised.value))
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, before[name]), (name, said)
            assert replica.steps == 2
            assert replica._members.heartbeat.phase.calls == calls + 1, "others may be in the next"
        train(model, 2, replica)
        replica.finish()
        replica.detach()
        return said

    found, *others = ThreadWorld(SIZE).run(work)
    assert all(other == found for other in others)
    return found


def refusal(text: str, states: list[Any]) -> str:
    return refusals(text, [states])[0]


Entry = dict[str, Any]


def put(*path: str, value: Any) -> Callable[[Entry], None]:
    """Set what stands at ``path``; a function is applied to what stood there."""

    def change(entry: Entry) -> None:
        for key in path[:-1]:
            entry = entry[key]
        old = entry.get(path[-1])
        entry[path[-1]] = value(old) if callable(value) else value

    return change


def drop(*path: str) -> Callable[[Entry], None]:
    def change(entry: Entry) -> None:
        for key in path[:-1]:
            entry = entry[key]
        del entry[path[-1]]

    return change


def nan(tensor: Tensor) -> Tensor:
    return tensor * float("nan")


def one_infinite(tensor: Tensor) -> Tensor:
    tensor.view(-1)[0] = float("inf")
    return tensor


def numbered(key: str) -> Callable[[Entry], None]:
    def change(entry: Entry) -> None:
        tensor = entry["model"].pop("0.weight")
        entry["model"][key] = tensor

    return change


WEIGHT, PENDING = ("parameters", "weight"), ("parameters", "pending_weight")
ORDER, RESIDUAL = ("gradients", "order"), ("gradients", "residual", "0.weight")
FLIGHT, PACE, LAYER = ("parameters", "flight"), ("parameters", "pace"), ("model", "0.weight")
OVERLAP, DASO, LAGS = "sgp(overlap=1)", "daso(every=2, wait=2, warmup_steps=0)", "lags(density=0.1)"
ADAPTIVE = "lags(density='adaptive')"

CRAFTED: dict[str, tuple[str, Callable[[Entry], None], str]] = {
    "no parameter": ("sgp", drop(*LAYER), "lacks '0.weight'"),
    "an unknown parameter": ("sgp", put("model", "extra", value=torch.ones(2)), "'extra'"),
    "a renamed parameter": ("sgp", numbered("0.Weight"), "'0.weight'"),
    "a wrong shape": ("sgp", put(*LAYER, value=torch.ones(2)), "shape (2,), expected (8, 2)"),
    "no tensor": ("sgp", put(*LAYER, value="a file"), "is 'a file', expected a tensor"),
    "a complex parameter": ("sgp", put(*LAYER, value=Tensor.cfloat), "complex64"),
    "an integral parameter": ("sgp", put(*LAYER, value=Tensor.long), "int64"),
    "a parameter on meta": ("sgp", put(*LAYER, value=lambda t: t.to("meta")), "on meta"),
    "a sparse parameter": ("sgp", put(*LAYER, value=Tensor.to_sparse), "layout torch.sparse_coo"),
    "a NaN parameter": ("sgp", put(*LAYER, value=nan), "not finite"),
    "an infinite parameter": ("sgp", put(*LAYER, value=one_infinite), "not finite"),
    "a complex buffer": ("ddp", put("model", "1.running_mean", value=Tensor.cfloat), "complex64"),
    "no steps": ("sgp", drop("step"), "cannot load"),
    "no model": ("sgp", drop("model"), "cannot load"),
    "no slot": ("sgp", drop("parameters"), "cannot load"),
    "one more part": ("sgp", put("more", value=1), "cannot load"),
    "a model of no kind": ("ddp", put("model", value=5), "is 5, expected a dict"),
    "a slot of no kind": ("ddp", put("gradients", value=[]), "is [], expected a dict"),
    "steps true": ("adasum", put("step", value=True), "is True, expected a int"),
    "steps as a float": ("adasum", put("step", value=3.0), "is 3.0, expected a int"),
    "negative steps": ("adasum", put("step", value=-3), "after -3 steps"),
    "no weight": ("sgp", drop(*WEIGHT), "lacks 'weight'"),
    "weight 0": ("sgp", put(*WEIGHT, value=0.0), "the weight is 0.0"),
    "weight NaN": (OVERLAP, put(*WEIGHT, value=float("nan")), "the weight is nan"),
    "weight infinite": (OVERLAP, put(*WEIGHT, value=float("inf")), "the weight is inf"),
    "weight as a text": (OVERLAP, put(*WEIGHT, value="1"), "expected a float"),
    "negative weight in flight": (OVERLAP, put(*PENDING, value=-0.5), "the mass is -0.5"),
    "weight NaN in flight": (OVERLAP, put(*PENDING, value=float("nan")), "the mass is nan"),
    "NaN in flight": (OVERLAP, put("parameters", "pending", "0.bias", value=nan), "not finite"),
    "a short order": ("ddp", put(*ORDER, value=lambda order: order[:1]), "does not name each"),
    "an order of others": ("ddp", put(*ORDER, value=["nope"] * 6), "does not name each"),
    "an order twice": ("ddp", put(*ORDER, value=lambda order: order * 2), "does not name each"),
    "an order of numbers": ("ddp", put(*ORDER, value=[1, 2, 3]), "does not name each"),
    "another order": ("ddp", put(*ORDER, value=lambda order: order[::-1]), "the order of the grad"),
    "an order of no kind": ("ddp", put(*ORDER, value="0.bias"), "expected a list"),
    "measured as a number": ("ddp", put("gradients", "measured", value=1), "expected a bool"),
    "negative exchanges": (
        LAGS,
        put("gradients", "exchanges", value=-1),
        "'exchanges': the count is -1",
    ),
    "other exchanges": (LAGS, put("gradients", "exchanges", value=9), "the exchanges of the grad"),
    "densities": (LAGS, put("gradients", "densities", value={"0.weight": 0.5}), "'0.weight'"),
    "a NaN residual": (LAGS, put(*RESIDUAL, value=nan), "not finite"),
    "an integral residual": (LAGS, put(*RESIDUAL, value=Tensor.int), "int32"),
    "no residual": (LAGS, drop(*RESIDUAL), "lacks '0.weight'"),
    "density -5": (ADAPTIVE, put("gradients", "densities", "0.bias", value=-5.0), "(0, 1]"),
    "density NaN": (
        ADAPTIVE,
        put("gradients", "densities", "0.bias", value=float("nan")),
        "(0, 1]",
    ),
    "negative skips": (
        "adasum",
        put("parameters", "skipped", value=-1),
        "'skipped': the count is -1",
    ),
    "a NaN anchor": ("adasum(every=2)", put("parameters", "anchor", "0.bias", value=nan), "finite"),
    "a flight of five": (DASO, put(*FLIGHT, value=[1, 2, 3, 4, 5]), "no sum can be in flight"),
    "a flight of texts": (DASO, put(*FLIGHT, value=["0", "2", "3"]), "no sum can be in flight"),
    "a flight of another root": (DASO, put(*FLIGHT, value=[1, 2, 3]), "no sum can be in flight"),
    "a flight of the past": (DASO, put(*FLIGHT, value=[0, 2, 2]), "no sum can be in flight"),
    "a flight too long": (DASO, put(*FLIGHT, value=[0, 9, 9]), "no sum can be in flight"),
    "another flight": (DASO, put(*FLIGHT, value=[0, 2, 4]), "the flight of the parameters"),
    "one more pace": (DASO, put(*PACE, "evil", value=1), "'evil'"),
    "a pace of 3": (DASO, put(*PACE, "every", value=3), "never comes to the cadence"),
    "a NaN loss as the best": (DASO, put(*PACE, "best", value=float("nan")), "never comes"),
    "other nodes": (DASO, put("parameters", "nodes", value=[[0, 1]]), "of the nodes [[0, 1]]"),
    "a negative turn": (DASO, put("parameters", "turn", value=-1), "'turn': the count is -1"),
    "no generator": ("ad_psgd", put("parameters", "random", value=torch.zeros_like), "generator"),
    "a NaN change": ("ad_psgd", put("parameters", "delta", "0.bias", value=nan), "not finite"),
}


@pytest.mark.fault(
    "one rank loads a state with impossible values",
    "ValueError on all ranks; names the value; nothing is written",
)
@pytest.mark.parametrize("text", sorted({text for text, _, _ in CRAFTED.values()}))
def test_load_crafted_states(text: str) -> None:
    """With a checksum that is right for it, and without one, as earlier versions saved it."""
    files, tried, expected = files_of(text), [], []
    for what, (of, change, said) in CRAFTED.items():
        for is_old in (False, True) if of == text else ():
            states = [read(file) for file in files]
            entry = states[1]["rank1"]
            del entry["checksum"]
            change(entry)
            if not is_old:
                entry["checksum"] = checksum({"rank1": entry})
            tried.append(states)
            expected.append((what, said))
    for (what, said), found in zip(expected, refusals(text, tried), strict=True):
        assert said in found, what
        assert found.startswith(("rank 1: ", "ranks 0 and 1 ")), what


@pytest.mark.fault(
    "one rank loads a state that was changed",
    "ValueError on all ranks; by its checksum; nothing is written",
)
@pytest.mark.parametrize(
    "change",
    [
        put(*LAYER, value=lambda tensor: tensor + 1e-7),
        put(*LAYER, value=Tensor.double),
        put("model", "1.running_mean", value=torch.zeros_like),
        put("model", "1.num_batches_tracked", value=torch.zeros_like),
        put(*WEIGHT, value=0.25),
        put("step", value=4),
        put("checksum", value=0),
        put("checksum", value=None),
    ],
)
def test_load_a_changed_state(change: Callable[[Entry], None]) -> None:
    states = [read(file) for file in files_of(OVERLAP)]
    change(states[1]["rank1"])
    assert "rank 1: the state 'rank1' is not what was saved" in refusal(OVERLAP, states)


def test_load_a_state_that_contains_itself() -> None:
    states = [read(file) for file in files_of("sgp")]
    states[1]["rank1"]["parameters"]["more"] = states[1]
    assert "rank 1: cannot load this state: RecursionError" in refusal("sgp", states)


def test_a_stride_that_was_flipped_to_zero() -> None:
    """It says nothing about one element; views of bytes refuse it all the same."""
    states = [read(file) for file in files_of("sgp")]
    model = states[1]["rank1"]["model"]
    model["2.bias"] = model["2.bias"].as_strided((1,), (0,))
    assert checksum(model["2.bias"]) == checksum(model["2.bias"].clone())

    def work(world: World) -> None:
        replica = offbeat.replicate(wide(), offbeat.sgp(), mesh=world)
        replica.load_state_dict(states[world.rank])
        replica.detach()

    ThreadWorld(SIZE).run(work)


@pytest.mark.fault(
    "one rank loads the state of another rank under its own name", "ValueError on all ranks"
)
def test_another_ranks_state_under_this_ranks_name() -> None:
    states = [read(file) for file in files_of("ddp")]
    states[1] = {"rank1": states[0]["rank0"]}
    assert "is not what was saved" in refusal("ddp", states)


@pytest.mark.fault(
    "ranks load states of different steps", "ValueError on all ranks; lists the steps"
)
def test_load_states_of_different_steps() -> None:
    states = [read(files_of("ddp", steps=3 + rank)[rank]) for rank in range(SIZE)]
    assert "of different numbers of steps: [3, 4] by rank" in refusal("ddp", states)


@pytest.mark.fault("one rank loads a state from after finish()", "ValueError on all ranks")
def test_load_states_of_before_and_after_finish(tmp_path: Path) -> None:
    for finished in (False, True):
        (tmp_path / str(finished)).mkdir()
        saved_by("sgp", SIZE, finished=finished, path=tmp_path / str(finished))

    def find(rank: int) -> Any:
        return torch.load(tmp_path / str(rank == 1) / f"{rank}.pt", weights_only=True)

    assert "they differ in the settled" in alike(loading("sgp", find))


@pytest.mark.fault(
    "a state that another rank inherits is damaged", "ValueError on all ranks; by its checksum"
)
def test_every_inherited_state_is_checked() -> None:
    """Rank 0 of one takes over the residuals of both."""
    parts = [read(file) for file in files_of(LAGS)]
    parts[1]["rank1"]["gradients"]["residual"]["0.weight"] += 1

    def work(world: World) -> None:
        replica = offbeat.replicate(wide(), offbeat.algorithm(LAGS), mesh=world)
        replica.load_state_dict({**parts[0], **parts[1]})

    assert "'rank1' is not what was saved" in alike(work, size=3)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("text", ["ddp", "sgp", OVERLAP, LAGS, ADAPTIVE, DASO, "adasum(every=2)"])
def test_states_of_earlier_versions_have_no_checksum(text: str) -> None:
    files = files_of(text)

    def work(world: World) -> None:
        saved = read(files[world.rank])
        expected = copy.deepcopy(saved)
        del saved[f"rank{world.rank}"]["checksum"]
        replica = offbeat.replicate(wide(), offbeat.algorithm(text), mesh=world)
        train(replica.model, 2, replica)
        replica.load_state_dict(saved)
        assert same(replica.state_dict(), expected)
        replica.detach()

    ThreadWorld(SIZE).run(work)


class Lopsided(offbeat.Topology):
    """All send to the first, who sends to the others in turn; with shares of numpy."""

    def peers(self, rank: int, size: int, index: int) -> offbeat.Peers:
        half = np.float64(0.5)
        turn = 1 + index % (size - 1)
        if rank == 0:
            return offbeat.Peers(((turn, half),), tuple(range(1, size)), half)
        return offbeat.Peers(((0, half),), (0,) if rank == turn else (), half)

    def period(self, size: int) -> int:
        return size - 1


def test_weights_are_plain_numbers_whatever_a_topology_returns(tmp_path: Path) -> None:
    """One to whom nobody has sent has a weight in flight too, which is zero."""

    def work(world: World) -> None:
        replica = offbeat.replicate(small(), offbeat.sgp(Lopsided(), overlap=1), mesh=world)
        for _ in range(3):
            replica.step()
            torch.save(replica.state_dict(), tmp_path / f"{world.rank}.pt")
            saved = torch.load(tmp_path / f"{world.rank}.pt", weights_only=True)
            replica.load_state_dict(saved)
            assert same(replica.state_dict(), saved)
        replica.detach()

    with pytest.warns(RuntimeWarning, match="weights come down to"):  # halved in each exchange
        ThreadWorld(3).run(work)


EVERY_KIND = [
    *("ddp", "local_sgd(every=2)", OVERLAP, LAGS, ADAPTIVE, DASO, "ad_psgd"),
    *("adasum(every=2, wire='bf16')", "sgp('ring', wire='bf16')"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("text", EVERY_KIND)
def test_checksums_survive_a_load_into_a_template(text: str, tmp_path: Path) -> None:
    """As ``torch.distributed.checkpoint`` loads: into the state of a replica that has not run."""
    files = files_of(text, steps=9)

    def template(world: World) -> Any:
        replica = offbeat.replicate(wide(), offbeat.algorithm(text), mesh=world)
        saved = replica.state_dict()
        replica.detach()
        return saved

    templates = ThreadWorld(SIZE).run(template)
    for rank in range(SIZE):
        dcp.save(read(files[rank]), checkpoint_id=tmp_path / str(rank), no_dist=True)
        dcp.load(templates[rank], checkpoint_id=tmp_path / str(rank), no_dist=True)
        assert same(templates[rank], read(files[rank]))

    def load(world: World) -> None:
        replica = offbeat.replicate(wide(), offbeat.algorithm(text), mesh=world)
        replica.load_state_dict(templates[world.rank])
        assert same(replica.state_dict(), read(files[world.rank]))
        replica.detach()

    ThreadWorld(SIZE).run(load)


def test_buffers_may_hold_what_they_like() -> None:
    """A mask of minus infinity, NaN where nothing is known yet, and a gap between two numbers."""

    def build() -> nn.Sequential:
        model = wide()
        model.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("nan")]))
        model.register_buffer("phases", torch.tensor([1j, 2.0]))
        model.register_buffer("columns", torch.arange(6.0).view(2, 3).t())
        model.register_buffer("nothing", torch.empty(0))
        model.register_buffer("eighth", torch.tensor(0.5, dtype=torch.float8_e4m3fn))
        return model

    def work(world: World) -> None:
        model = build()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        train(model, 1, replica)
        saved = replica.state_dict()
        with torch.no_grad():
            model.mask.zero_()
            model.phases.zero_()
        replica.load_state_dict(saved)
        assert model.mask.isnan().tolist() == [False, False, True]
        assert model.phases.tolist() == [1j, 2.0]
        replica.detach()

    ThreadWorld(SIZE).run(work)


@pytest.mark.fault(
    "one bit of a checkpoint file is flipped",
    "ValueError on all ranks, or the values that were saved",
)
@pytest.mark.parametrize("text", [OVERLAP, LAGS])
def test_a_flipped_bit_never_loads_other_values(text: str) -> None:
    chance = random.Random(text)
    good = files_of(text)
    opened: list[Any] = []
    for _ in range(200):
        file = bytearray(good[1])
        file[chance.randrange(len(file))] ^= 1 << chance.randrange(8)
        try:
            opened.append(read(bytes(file)))
        except Exception:
            continue  # torch.load has refused it, with one of many errors

    def work(world: World) -> list[str]:
        replica = offbeat.replicate(wide(), offbeat.algorithm(text), mesh=world)
        expected, outcomes = read(good[world.rank]), []
        for flipped in opened:
            train(replica.model, 1, replica)  # so that a load which does nothing is seen
            try:
                replica.load_state_dict(flipped if world.rank == 1 else read(good[0]))
            except ValueError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("loaded")
                assert same(replica.state_dict(), expected)
        replica.detach()
        return outcomes

    here, there = ThreadWorld(SIZE).run(work, timeout=30.0)
    assert here == there
    assert "loaded" in here, "a file has bits that mean nothing"
    assert sum("checksum is wrong" in said for said in here) > 20


@pytest.mark.parametrize("text", ["sgp(overlap=1, within='local')", "daso(every=2, total_steps=9)"])
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.fault(
    "a checkpoint with messages in flight is loaded on other nodes",
    "ValueError on all ranks; shows both layouts. After finish() it loads",
    group="Checkpoints",
)
def test_a_state_of_other_nodes(text: str, finished: bool) -> None:
    """A slice in flight belongs to the local rank that has sent it."""

    def save(world: World) -> Entry:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        run(model, 3, replica)
        if finished:
            replica.finish()
        return replica.state_dict()

    saved = ThreadWorld(nodes=((0, 1), (2, 3))).run(save)

    def load(world: World) -> str:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        try:
            replica.load_state_dict(saved[world.rank])
        except ValueError as error:
            return str(error)
        run(model, 2, replica)
        replica.finish()
        return "loaded"

    (said,) = set(ThreadWorld(nodes=((0, 2), (1, 3))).run(load))
    if finished:
        assert said == "loaded"
    else:
        assert "[[0, 1], [2, 3]], but these are [[0, 2], [1, 3]]" in said
