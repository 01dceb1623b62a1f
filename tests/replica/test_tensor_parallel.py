"""Models on a 2-D mesh inside a node, and stages of a pipeline: real processes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sharded import Results, attach, by_scenario, largest, shards, whole
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import SGD

import offbeat
from offbeat.recipes import RECIPES
from ranks import Spawned

pytestmark = [pytest.mark.processes, pytest.mark.timeout(250)]

FSDP_AND_TP, TP, HYBRID = ("node", "dp", "tp"), ("node", "tp"), ("node", "copy", "shard")
CASES = (
    (FSDP_AND_TP, "ddp"),
    (FSDP_AND_TP, "sgp(overlap=1, wire='bf16', within='local')"),
    (FSDP_AND_TP, "daso(every=2)"),
    (FSDP_AND_TP, "adasum(every=2, method='rvhdd', within='local')"),
    (FSDP_AND_TP, "diloco(every=2, fragments=2, delay=1, momentum=0.5, within='local')"),
    (FSDP_AND_TP, "lags(density=1.0)"),
    (TP, "adasum(within='local')"),
    (HYBRID, "adasum(within='local')"),
)
BY_SHARD = (  # these select or scale by all that a rank holds, or depend on the clock, and others
    "noloco(every=2, gossip_lr=0.4, within='local')",
    "local_sgd(every=2, within='local')",
    "d_psgd(within='local')",
    "slgs(density=0.3)",
    "sparse_loco(every=2, density=0.2, within='local')",
    "ad_psgd(within='local')",
)


class Net(nn.Module):
    """Parameters that are divided along both axes of a node, along one of them, and along none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale, self.last = nn.LayerNorm(6), nn.Linear(6, 1)
        self.scale.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(self.first(x))))
        return self.last(self.scale(self.down(hidden)))


PLAN = {
    "first": ColwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Replicate()),
}


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def parallel(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Distribute over the axes of a node, as their names say."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], PLAN)
    axes = tuple(name for name in names if name not in ("node", "tp"))
    if axes:
        for block in (model.first, model.up):
            fully_shard(block, mesh=mesh[axes], **options)
        fully_shard(model, mesh=mesh[axes], **options)
    return model


def layout(names: tuple[str, ...], *sizes: int) -> DeviceMesh:
    shape = sizes or (2,) * (len(names) - 1)
    nodes = dist.get_world_size() // torch.Size(shape).numel()
    return init_device_mesh("cpu", (nodes, *shape), mesh_dim_names=names)


def batch(mesh: DeviceMesh, step: int) -> Tensor:
    """The ranks of an axis of tensor parallelism, or of a pipeline, have one batch."""
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
    seed = 0
    for name, size, at in zip(names, mesh.shape, place, strict=True):
        seed = seed if name in ("tp", "pp") else seed * size + at
    generator = torch.Generator().manual_seed(100 * seed + step)
    return torch.randn(4, 4, 3, generator=generator, dtype=torch.float64)


def steps(
    model: nn.Module, optimizer: SGD, replica: offbeat.Replica, mesh: DeviceMesh, numbers: range
) -> Iterator[int]:
    """Train with clipping, and the first step with two batches."""
    for step in numbers:
        for is_last in (False, True) if step == 0 else (True,):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            replica.set_requires_sync(is_last)
            model(batch(mesh, 2 * step + is_last)).square().mean().backward()
        replica.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        yield step


def compare(rank: int, results: Any, folder: str) -> None:
    """Train parallel and plain models; send what differs."""
    for names, text in CASES:
        mesh, found = layout(names), []
        for model in (plain(), parallel(plain(), mesh)):
            optimizer, replica = attach(model, text, mesh)
            for step in steps(model, optimizer, replica, mesh, range(4)):
                if step == 2:
                    own = shards(model)
                    with replica.consensus(), torch.no_grad():
                        shown = {"output": model(torch.ones(1, 4, 3, dtype=torch.float64))}
                        average = whole(model)
                    assert largest(own, shards(model)) == 0
            middle = whole(model)
            replica.finish()
            found.append((shown, average, middle, whole(model)))
            replica.detach()
        off = max(largest(one, other) for one, other in zip(*found, strict=True))
        results.put(("compare", (names, text, off)))


def replicas(rank: int, results: Any, folder: str) -> None:
    """Parts that two ranks hold, under methods that are not compared with the plain run."""
    mesh = layout(FSDP_AND_TP)
    for text in BY_SHARD:
        model = parallel(plain(), mesh)
        optimizer, replica = attach(model, text, mesh)
        for _ in steps(model, optimizer, replica, mesh, range(3)):
            pass
        mine, everyone = shards(model), [{}] * 8
        dist.all_gather_object(everyone, mine)
        there, names = everyone[rank ^ 1], ("norm.weight", "norm.bias", "scale.weight", "last.bias")
        results.put(("replicas", (text, all(torch.equal(mine[n], there[n]) for n in names))))
        replica.detach()


def distance(rank: int, results: Any, folder: str) -> None:
    """Nodes that differ in one entry of a norm, which two ranks hold."""
    mesh = layout(FSDP_AND_TP)
    model = parallel(plain(), mesh)
    _, replica = attach(model, "local_sgd(every=9, within='local')", mesh)
    if rank in (4, 5):
        with torch.no_grad():
            model.norm.weight.to_local()[0] += 2.0
    results.put(("distance", replica.consensus_distance()["max"]))
    replica.detach()


def resume(rank: int, results: Any, folder: str) -> None:
    mesh = layout(FSDP_AND_TP)
    for text in ("lags(density=0.3)", "sgp(overlap=1)"):
        path, ends, saved = Path(folder) / text, [], dict[str, Any]()
        for first in (0, 2):
            model = parallel(plain(), mesh)
            optimizer, replica = attach(model, text, mesh)
            if first:
                model.load_state_dict(saved)
                offbeat.load_per_rank(path, replica=replica, optimizer=optimizer)
            for step in steps(model, optimizer, replica, mesh, range(first, 4)):
                if step == 1:
                    offbeat.save_per_rank(path, replica=replica, optimizer=optimizer)
                    saved = copy.deepcopy(model.state_dict())
            ends.append(shards(model))
            replica.detach()
        results.put(("resume", (text, largest(*ends))))


def distributed_checkpoint(rank: int, results: Any, folder: str) -> None:
    """Saved on one layout, loaded on others and without any."""
    mesh = layout(FSDP_AND_TP)
    model = parallel(plain(), mesh)
    optimizer, replica = attach(model, "sgp(overlap=1, within='local')", mesh)
    for _ in steps(model, optimizer, replica, mesh, range(2)):
        pass
    with replica.consensus():
        saved = whole(model)
        checkpoint.save(get_model_state_dict(model), checkpoint_id=f"{folder}/dcp")
    replica.detach()
    for other in (layout(TP), layout(("node",))):
        model = parallel(plain(), other)
        state = get_model_state_dict(model)
        checkpoint.load(state, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(model, state)
        optimizer, replica = attach(model, "sgp(overlap=1)", other)
        results.put(("distributed_checkpoint", largest(saved, whole(model))))
        for _ in steps(model, optimizer, replica, other, range(1)):
            pass
        replica.detach()


def mixed_precision(rank: int, results: Any, folder: str) -> None:
    mesh = layout(FSDP_AND_TP)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallel(plain().float(), mesh, mp_policy=policy)
    optimizer, replica = attach(model, "sgp(overlap=1, within='local')", mesh)
    norms, losses = [], []
    for _ in range(4):
        loss = model(batch(mesh, 0).bfloat16()).float().square().mean()
        loss.backward()
        norms.append(float(replica.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        losses.append(float(loss))
    results.put(("mixed_precision", (rank // 4, norms, losses[-1] < losses[0])))
    replica.detach()


def refusals(rank: int, results: Any, folder: str) -> None:
    mesh = layout(FSDP_AND_TP)
    summand, buffered, mixed = plain(), parallel(plain(), mesh), plain()
    part = DTensor.from_local(summand.last.bias.detach(), mesh["tp"], [Partial()])
    summand.last.bias = nn.Parameter(part)
    buffered.register_buffer("cache", distribute_tensor(torch.ones(2), mesh["tp"], [Replicate()]))
    flat = layout(("node", "dp"), 4)
    fully_shard(mixed.first, mesh=flat["dp"])
    fully_shard(mixed, mesh=mesh["dp", "tp"])
    for name, model, given in (
        ("summand", summand, mesh),
        ("buffer", buffered, mesh),
        ("half a node", parallel(plain(), layout(("node", "dp"))), mesh),
        ("two meshes", mixed, mesh),
        ("elastic axes", parallel(plain(), mesh), mesh),
        ("elastic stages", plain(), layout(("node", "pp"))["node"]),
    ):
        try:
            offbeat.replicate(model, offbeat.sgp(), mesh=given, elastic="elastic" in name)
        except ValueError as error:
            results.put(("refusals", (name, str(error))))


class Stage(nn.Module):
    """A half of :class:`Net`."""

    def __init__(self, net: nn.Module, number: int) -> None:
        super().__init__()
        names = (("first", "norm"), ("up", "down", "scale", "last"))[number]
        for name in names:
            self.add_module(name, getattr(net, name))
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 0:
            return self.norm(self.first(x))
        return self.last(self.scale(self.down(torch.tanh(self.up(x)))))


def pipeline(rank: int, results: Any, folder: str) -> None:
    """Two stages on two ranks each, which divide the batch: a run for each stage."""
    mesh = layout(("node", "pp", "dp"))
    number = mesh.get_local_rank("pp")
    for text in ("ddp", "sgp(overlap=1, within='local')"):
        model = plain()
        optimizer, replica = attach(model, text, mesh)
        for step in range(3):
            model(batch(mesh, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.finish()
        replica.detach()
        stage = Stage(plain(), number)
        optimizer, replica = attach(stage, text, mesh["node", "dp"])
        part = PipelineStage(stage, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(part, 2, loss_fn=lambda y, _: y.square().mean())
        for step in range(3):
            x = batch(mesh, step)
            schedule.step(x) if number == 0 else schedule.step(target=x)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if step == 1:
                offbeat.save_per_rank(f"{folder}/pp{number}", replica=replica, optimizer=optimizer)
        replica.finish()
        expected = whole(model)
        off = largest({name: expected[name] for name in whole(stage)}, whole(stage))
        results.put(("pipeline", (text, off)))
        offbeat.load_per_rank(f"{folder}/pp{number}", replica=replica, optimizer=optimizer)
        results.put(("pipeline", (text, float(replica.steps != 2))))
        replica.detach()


SCENARIOS = (
    compare,
    replicas,
    distance,
    resume,
    distributed_checkpoint,
    mixed_precision,
    refusals,
    pipeline,
)


def run(rank: int, results: Any, folder: str) -> None:
    for scenario in SCENARIOS:
        scenario(rank, results, folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What all scenarios send: starting processes takes most of the time."""
    return by_scenario(Spawned(run, 8, str(tmp_path_factory.mktemp("saved"))).join(240))


def test_every_recipe_is_among_them() -> None:
    texts = [*(text for _, text in CASES), *BY_SHARD]
    recipes = {recipe.__name__ for recipe in RECIPES}
    assert {text.partition("(")[0] for text in texts} == recipes - {"torch_ddp", "alone"}


def test_a_run_on_several_axes_equals_the_plain_one(found: Results) -> None:
    """With accumulation and clipping."""
    assert len(found["compare"]) == 8 * len(CASES)
    for names, text, difference in found["compare"]:
        assert difference <= 1e-13, (names, text, difference)


def test_ranks_that_hold_the_same_part_stay_equal(found: Results) -> None:
    assert len(found["replicas"]) == 8 * len(BY_SHARD)
    assert all(equal for _, equal in found["replicas"]), found["replicas"]


def test_replicated_parts_count_once_in_distances(found: Results) -> None:
    assert found["distance"] == [1.0] * 8


def test_a_resumed_run_equals_the_uninterrupted_one(found: Results) -> None:
    assert len(found["resume"]) == 8 * 2
    assert all(difference == 0 for _, difference in found["resume"]), found["resume"]


def test_distributed_checkpoints_are_loaded_on_other_layouts(found: Results) -> None:
    assert found["distributed_checkpoint"] == [0.0] * 8 * 2


def test_mixed_precision(found: Results) -> None:
    assert len(found["mixed_precision"]) == 8
    for node in (0, 1):  # the norm is that of the whole model
        norms = [norms for other, norms, learned in found["mixed_precision"] if other == node]
        assert all(each == norms[0] for each in norms)
    assert all(learned for *_, learned in found["mixed_precision"])


REFUSED = {
    "summand": "each rank holds a summand",
    "buffer": "buffer 'cache' is a DTensor",
    "half a node": "shard over all ranks of a node and no others",
    "two meshes": "distribute all parameters over axes of one mesh",
    "elastic axes": "of which several ranks of a node hold the same part",
    "elastic stages": "elastic=True with a mesh of some ranks only",
}


@pytest.mark.fault(
    "the parameters of a sharded model are partial sums, or lie on a part of a node or on several "
    "meshes; a buffer is a DTensor; tensor parallelism or stages of a pipeline are elastic",
    "ValueError on all ranks",
    group="Models and algorithms",
)
def test_what_cannot_be_exchanged_on_a_mesh(found: Results) -> None:
    for name, text in REFUSED.items():
        said = [error for other, error in found["refusals"] if other == name]
        assert len(said) == 8, (name, said)
        assert all(text in error for error in said), said


def test_the_stages_of_a_pipeline_are_exchanged_one_by_one(found: Results) -> None:
    assert len(found["pipeline"]) == 8 * 4
    assert all(difference <= 1e-13 for _, difference in found["pipeline"]), found["pipeline"]
