"""Models that FSDP2 shards inside a node, with exchanges between nodes: real processes."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD

import offbeat
from offbeat import Algorithm
from offbeat.methods import TopK
from ranks import Spawned

pytestmark = pytest.mark.processes

Results = dict[str, list[Any]]
RECIPES: dict[int, dict[int, tuple[str, ...]]] = {  # by all ranks, and those of a node
    4: {
        2: (
            "ddp",
            "local_sgd(every=3, within='local')",
            "sgp(overlap=1, wire='bf16', within='local')",
            "daso(every=2)",
            "adasum(every=2, method='rvhdd', within='local')",
            "diloco(every=3, within='local')",
            "diloco(every=4, fragments=3, delay=2, lr=1.0, momentum=0.5, within='local')",
            # All entries: chunks of shards are others than those of slices.
            "sparse_loco(every=3, density=1.0, decay=0.9, bits=None, lr=0.7, within='local')",
            "noloco(every=3, gossip_lr=0.4, within='local')",
            "sgp(overlap=1, within='local', outer='SGD(lr=1, momentum=0.5)', outer_every=4)",
            "sgp(within='local')",
            "local_sgd(every=2, within='local') for 4 steps, then ddp",
        ),
    },
    6: {
        3: ("daso(every=3)", "adasum(method='gram', within='local')"),
        2: ("ddp", "d_psgd(within='local')"),
    },
}
Model = Callable[[], nn.Module]


class Net(nn.Module):
    """Layers of 5, 7 and 1 rows, which no number of ranks divides; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)
        self.again, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 1)
        self.again.weight = self.tied.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.again(torch.tanh(self.tied(self.first(x))))))
        return self.last(hidden) + self.frozen(hidden).mean(1, keepdim=True)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in (model.first, model.last, model.frozen):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def shards(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds."""
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def steps(
    model: nn.Module, optimizer: SGD, replica: offbeat.Replica, numbers: range
) -> Iterator[int]:
    for step in numbers:
        model(batch(replica.world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        yield step


def attach(
    model: nn.Module, text: str | Algorithm, mesh: DeviceMesh
) -> tuple[SGD, offbeat.Replica]:
    optimizer = optimizer_of(model)
    return optimizer, attached(model, text, mesh, optimizer)


def optimizer_of(model: nn.Module) -> SGD:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


def attached(
    model: nn.Module, text: str | Algorithm, mesh: DeviceMesh, optimizer: SGD
) -> offbeat.Replica:
    return offbeat.replicate(model, offbeat.algorithm(text), mesh=mesh, optimizer=optimizer)


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    # Sums, since shards may be empty.
    return max(float((one[name] - other[name]).abs().sum()) for name in one)


def layout(local: int) -> DeviceMesh:
    shape = (dist.get_world_size() // local, local)
    return init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))


def compare(rank: int, results: Any, local: int, texts: tuple[str, ...]) -> None:
    """Train sharded and unsharded models; send what differs."""
    mesh = layout(local)
    for text in texts:
        found: list[Any] = []
        for model in (plain(), sharded(plain(), mesh["local"])):
            optimizer = optimizer_of(model)
            with torch.no_grad():  # an evaluation before, after which FSDP2 keeps gathered copies
                model.eval()(torch.ones(1, 3, dtype=torch.float64))
            model.train()
            replica = attached(model, text, mesh, optimizer)
            sent = []
            for step in steps(model, optimizer, replica, range(8)):
                sent.append(replica.stats()["last"]["bytes_sent"])
                if step == 5:
                    own, buffers = shards(model), copy.deepcopy(dict(model.named_buffers()))
                    with replica.consensus(), torch.no_grad():
                        model.eval()
                        shown = model(torch.ones(1, 3, dtype=torch.float64))
                        average = whole(model)
                    model.train()
                    assert largest(own, shards(model)) == 0
                    assert largest(buffers, dict(model.named_buffers())) == 0
            middle, distance = whole(model), replica.consensus_distance()["max"]
            replica.finish()
            found.append((middle, whole(model), average, shown, distance, sum(sent[1:])))
            notes = replica.notes
            replica.detach()
        (plain_run, shard_run) = found
        differences = [largest(a, b) for a, b in zip(plain_run[:3], shard_run[:3], strict=True)]
        differences.append(float((plain_run[3] - shard_run[3]).abs()))
        equal_distance = (plain_run[4] > 0) == (shard_run[4] > 0)
        results.put(("compare", (text, max(differences), equal_distance, shard_run[5], notes)))


@pytest.mark.parametrize(("ran", "ranks"), [("on_four", 4), ("on_six", 6)])
def test_a_sharded_run_equals_the_unsharded_one(
    ran: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    results = request.getfixturevalue(ran)["compare"]
    assert len(results) == ranks * sum(map(len, RECIPES[ranks].values()))
    for text, difference, equal_distance, _, notes in results:
        assert difference <= 1e-12, (text, difference)  # inner products are summed in other orders
        assert equal_distance, text
        assert (text == "ddp") != any("FSDP2" in note for note in notes)


def test_a_node_sends_one_model_per_step(on_four: Results) -> None:
    """Four ranks on two nodes, in the 7 steps after the first one, which compares ranks."""
    results = [result for result in on_four["compare"] if result[0] == "sgp(within='local')"]
    model_bytes = sum(p.nbytes for p in plain().parameters() if p.requires_grad)
    sent = sum(sent for *_, sent, _ in results) / 2  # of a node
    assert sent == 7 * (model_bytes + 2 * 16)  # each rank adds a weight and the number of the call


RESUMED = (
    "ddp",
    "sgp(overlap=1, within='local')",
    "sgp(overlap=1, outer='SGD(lr=1, momentum=0.5)', outer_every=3)",
    "daso(every=3)",
    "adasum(within='local')",
)


def resume(rank: int, results: Any, folder: Path) -> None:
    mesh = layout(2)
    for text in RESUMED:
        path = folder / text
        ends: list[dict[str, Tensor]] = []
        saved: dict[str, Any] = {}
        for begin in (0, 3):
            model = sharded(plain(), mesh["local"])
            optimizer, replica = attach(model, text, mesh)
            if begin:
                model.load_state_dict(saved)
                offbeat.load_per_rank(path, replica=replica, optimizer=optimizer)
            for step in steps(model, optimizer, replica, range(begin, 8)):
                if step == 2:  # what daso has just sent is in flight
                    offbeat.save_per_rank(path, replica=replica, optimizer=optimizer)
                    saved = copy.deepcopy(model.state_dict())
            ends.append(shards(model))
            replica.detach()
        results.put(("resume", (text, largest(*ends))))


def test_a_resumed_run_equals_the_uninterrupted_one(on_four: Results) -> None:
    assert sorted(on_four["resume"]) == sorted((text, 0.0) for text in RESUMED for _ in range(4))


def end(rank: int, results: Any, folder: Path) -> None:
    mesh = layout(2)
    model = sharded(plain(), mesh["local"])
    optimizer, replica = attach(model, "sgp(overlap=1, within='local')", mesh)
    for _ in steps(model, optimizer, replica, range(5)):
        pass
    replica.finish()
    offbeat.save_per_rank(folder / "finished", replica=replica, optimizer=optimizer)
    results.put(("end", {name: p.tolist() for name, p in whole(model).items()}))
    replica.detach()


def begin(rank: int, results: Any, folder: Path) -> None:
    mesh = layout(2)
    model = sharded(plain(), mesh["local"])
    optimizer, replica = attach(model, "local_sgd(every=2, within='local')", mesh)
    offbeat.load_per_rank(folder / "finished", replica=replica, optimizer=optimizer)
    results.put(("begin", {name: p.tolist() for name, p in whole(model).items()}))
    for _ in steps(model, optimizer, replica, range(2)):
        pass
    replica.detach()


def test_more_nodes_load_what_was_saved_after_finish(on_four: Results, on_six: Results) -> None:
    assert len(on_six["begin"]) == 6
    ended, *others = *on_four["end"], *on_six["begin"]
    assert all(state == ended for state in others)


def save_dcp(rank: int, results: Any, folder: Path) -> None:
    mesh = layout(2)
    model = sharded(plain(), mesh["local"])
    optimizer, replica = attach(model, "sgp(overlap=1, within='local')", mesh)
    for _ in steps(model, optimizer, replica, range(5)):
        pass
    with replica.consensus():  # all nodes save the same
        results.put(("save_dcp", {name: p.tolist() for name, p in whole(model).items()}))
        checkpoint.save(get_model_state_dict(model), checkpoint_id=folder / "dcp")
    replica.detach()


def load_dcp(rank: int, results: Any, folder: Path, local: int) -> None:
    mesh = layout(local)
    model = sharded(plain(), mesh["local"])
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(model, state)
    optimizer, replica = attach(model, "sgp(overlap=1, within='local')", mesh)
    results.put(("load_dcp", {name: p.tolist() for name, p in whole(model).items()}))
    for _ in steps(model, optimizer, replica, range(2)):
        pass
    replica.detach()


def test_distributed_checkpoints_are_loaded_on_other_nodes(
    on_four: Results, on_six: Results
) -> None:
    """Saved on two nodes of two ranks; other numbers of nodes, and of ranks in a node."""
    assert len(on_six["load_dcp"]) == 2 * 6
    saved, *others = *on_four["save_dcp"], *on_six["load_dcp"]
    assert all(state == saved for state in others)


def settings(rank: int, results: Any) -> None:
    """Options of FSDP2: the runs learn, and shards with one number are equal after finish()."""
    mesh = layout(2)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, options in (
        ("kept", {"reshard_after_forward": False}),
        ("bf16", {"mp_policy": narrow}),
        ("meta", {}),
    ):
        if name == "meta":
            with torch.device("meta"):
                model = sharded(Net(), mesh["local"])
            model.to_empty(device="cpu")
            torch.manual_seed(rank)  # replicate() copies the shards of the first node
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    nn.init.uniform_(tensor, 0.1, 0.3)
        else:
            model = plain().float()
            model.norm = nn.LayerNorm(5)  # torch has no BatchNorm of bf16 with float32 buffers
            sharded(model, mesh["local"], **options)
        optimizer, replica = attach(model, "sgp(overlap=1, within='local')", mesh)
        losses = []
        for step in range(30):
            loss = model(batch(rank, step % 3).float()).float().square().mean()
            loss.backward()
            norm = replica.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            losses.append(float(loss))
        replica.finish()
        learned = sum(losses[-3:]) < 0.8 * sum(losses[:3])
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, shards(model))
        alike = largest(everyone[0], everyone[2]) + largest(everyone[1], everyone[3])
        results.put(("settings", (name, learned, alike, float(norm))))
        replica.detach()


def test_options_of_fsdp(on_four: Results) -> None:
    results = on_four["settings"]
    assert {(name, learned, alike) for name, learned, alike, _ in results} == {
        ("kept", True, 0.0),
        ("bf16", True, 0.0),
        ("meta", True, 0.0),
    }
    for name in ("kept", "bf16", "meta"):  # the norm is that of the whole model of a node
        norms = sorted(norm for other, *_, norm in results if other == name)
        assert norms[0] == norms[1]
        assert norms[2] == norms[3]


def refusals(rank: int, results: Any) -> None:
    mesh = layout(2)
    everyone = init_device_mesh("cpu", (4,))
    part = plain()
    fully_shard(part.first, mesh=mesh["local"])
    at = {"device_id": torch.device("cpu"), "use_orig_params": True}
    flattened = FullyShardedDataParallel(plain(), **at)
    for name, model, text in (
        ("crosses", sharded(plain(), everyone), "sgp"),
        ("hybrid", sharded(plain(), mesh), "sgp"),
        ("partly", part, "sgp"),
        ("FSDP1", flattened, "sgp"),
        ("inside", sharded(plain(), mesh["local"]), Algorithm(gradients=TopK(over="local"))),
        ("partition", sharded(plain(), mesh["local"]), "adasum(partition=True)"),
    ):
        try:
            attach(model, text, mesh)
        except ValueError as error:
            results.put(("refusals", (name, str(error))))


def diverging(rank: int, results: Any) -> None:
    mesh = layout(2)
    model = sharded(plain(), mesh["local"])
    optimizer, replica = attach(model, "adasum(within='local')", mesh)
    try:
        for step in steps(model, optimizer, replica, range(4)):
            if step == 1 and rank == 3:
                with torch.no_grad():
                    model.first.weight.to_local()[0, 0] = torch.nan  # type: ignore[operator]
    except ValueError as error:
        results.put(("diverging", str(error)))


@pytest.mark.fault(
    "the shard of one rank is not finite under adasum",
    "ValueError on all ranks; names the parameter",
    group="Gradients",
)
def test_a_shard_that_is_not_finite(on_four: Results) -> None:
    results = on_four["diverging"]
    assert len(results) == 4
    assert len(set(results)) == 1
    assert "is not finite after the optimizer's step" in results[0]


REFUSED = {
    "crosses": "over the ranks [0, 1, 2, 3], and the node of this rank is [0, 1]",
    "hybrid": "is sharded over the ranks [0, 1, 2, 3]",
    "partly": "is not sharded, and others are",
    "FSDP1": "shard it by torch.distributed.fsdp.fully_shard",
    "inside": "cannot exchange gradients of a sharded model",
    "partition": "cannot exchange gradients of a sharded model",
}


@pytest.mark.fault(
    "a model is sharded over nodes, in part, or under a method that cannot",
    "ValueError on all ranks",
    group="Models and algorithms",
)
def test_what_cannot_be_exchanged_in_shards(on_four: Results) -> None:
    for name, text in REFUSED.items():
        said = [error for other, error in on_four["refusals"] if other == name]
        assert len(said) == 4
        assert all(text in error for error in said), said


def run_four(rank: int, results: Any, folder: Path) -> None:
    """Run all that two nodes of two ranks show: starting processes takes most of the time."""
    for local, texts in RECIPES[4].items():
        compare(rank, results, local, texts)
    for scenario in (resume, end, save_dcp):
        scenario(rank, results, folder)
    for scenario in (settings, refusals, diverging):
        scenario(rank, results)


def run_six(rank: int, results: Any, folder: Path) -> None:
    for local, texts in RECIPES[6].items():
        compare(rank, results, local, texts)
        load_dcp(rank, results, folder, local)
    begin(rank, results, folder)


def by_scenario(results: list[Any]) -> Results:
    found = defaultdict(list)
    for scenario, result in results:
        found[scenario].append(result)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the four ranks save and the six load."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def on_four(folder: Path) -> Results:
    return by_scenario(Spawned(run_four, 4, folder).join(110))


@pytest.fixture(scope="module")
def on_six(folder: Path, on_four: Results) -> Results:
    return by_scenario(Spawned(run_six, 6, folder).join(110))
