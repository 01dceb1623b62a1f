"""Bad input is one clear ``ValueError`` on all ranks alike, and never a hang."""

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import HashStore, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import offbeat
from offbeat.methods import Average, Mean, PairAverage, PushSum
from offbeat.testing import ThreadWorld
from offbeat.topology.graph import Peers, Topology
from offbeat.transport.world import World
from outcomes import SECONDS, alike

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

SIZE = 2
every_slot = pytest.mark.parametrize("text", ["ddp", "sgp"])


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def run(model: nn.Module, steps: int, replica: offbeat.Replica) -> None:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


# ---- models that differ between ranks -----------------------------------------------------------


class Named(nn.Module):
    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor))


def named(**parameters: Tensor) -> Callable[[], nn.Module]:
    return lambda: Named(**parameters)


def frozen() -> nn.Module:
    model = Named(a=torch.ones(2, 3), b=torch.ones(2))
    model.a.requires_grad_(False)
    return model


def buffered(shape: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Named(a=torch.ones(2, 3), b=torch.ones(2))
        model.register_buffer("statistics", torch.zeros(shape))
        return model

    return build


USUAL = named(a=torch.ones(2, 3), b=torch.ones(2))
DIFFERENT = {
    "name": (named(a=torch.ones(2, 3), c=torch.ones(2)), "'b'|'c'"),
    "one more": (named(a=torch.ones(2, 3), b=torch.ones(2), c=torch.ones(2)), "'c'"),
    "one fewer": (named(a=torch.ones(2, 3)), "'b'"),
    "shape": (named(a=torch.ones(3, 2), b=torch.ones(2)), r"shape of 'a'.*\[2, 3\].*\[3, 2\]"),
    "dtype": (named(a=torch.ones(2, 3).bfloat16(), b=torch.ones(2)), "dtype of 'a'.*bfloat16"),
    "frozen": (frozen, "'a' is trainable here and frozen there"),
    "order": (named(b=torch.ones(2), a=torch.ones(2, 3)), "order"),
    "strides": (named(a=torch.ones(3, 2).t(), b=torch.ones(2)), "strides of 'a'"),
    "a buffer": (buffered(2), "'statistics'"),
}


BOTH_NAMED = "ValueError on all ranks; names both ranks and the parameter"
DIFFERENCES = {
    "the names or the number of parameters": ["name", "one more", "one fewer"],
    "shapes or dtypes": ["shape", "dtype"],
    "which parameters are frozen": ["frozen"],
    "the order of parameters": ["order"],
    "memory formats (strides)": ["strides"],
    "buffers": ["a buffer"],
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.fault(f"two ranks differ in {fault}", BOTH_NAMED))
        for fault, kinds in DIFFERENCES.items()
        for what in kinds
    ],
)
def test_models_that_differ_between_ranks(what: str, draws: random.Random) -> None:
    (other, match), odd = DIFFERENT[what], draws.choice([1, 2])

    def work(world: World) -> None:
        model = other() if world.rank == odd else USUAL()
        offbeat.replicate(model, offbeat.ddp(), mesh=world)

    text = alike(work, size=3)
    assert f"ranks 0 and {odd} differ" in text
    with pytest.raises(ValueError, match=match):
        raise ValueError(text)


@pytest.mark.fault("two ranks differ in buffers", BOTH_NAMED)
def test_buffers_that_differ_in_shape() -> None:
    def work(world: World) -> None:
        offbeat.replicate(buffered(2 + (world.rank == 1))(), offbeat.ddp(), mesh=world)

    assert "shape of 'statistics'" in alike(work)


@pytest.mark.fault(
    "replicate() is called again after it refused a model", "the same ranks attach and train"
)
def test_a_world_goes_on_after_a_refusal() -> None:
    """The next ``replicate`` of the same ranks works: nothing was left half open."""

    def work(world: World) -> None:
        odd = frozen() if world.rank == 0 else USUAL()
        with pytest.raises(ValueError, match="differ"):
            offbeat.replicate(odd, offbeat.sgp(), mesh=world)
        replica = offbeat.replicate(USUAL(), offbeat.sgp(), mesh=world)
        replica.step()
        replica.detach()

    ThreadWorld(SIZE).run(work, timeout=SECONDS)


# ---- models that cannot be exchanged ------------------------------------------------------------


def without_parameters() -> nn.Module:
    return nn.Tanh()


def all_frozen() -> nn.Module:
    return small().requires_grad_(False)


def on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def complex_numbers() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def uninitialized() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def with_buffer(buffer: Tensor) -> nn.Module:
    model = small()
    model.register_buffer("table", buffer)
    return model


def meta_buffer() -> nn.Module:
    return with_buffer(torch.empty(2, device="meta"))


def lazy_buffer() -> nn.Module:
    return with_buffer(nn.UninitializedBuffer())


with warnings.catch_warnings(action="ignore"):  # deprecated in torch 2.13
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def quantized_buffer() -> nn.Module:
    return with_buffer(QUANTIZED)


def sparse_buffer() -> nn.Module:
    return with_buffer(torch.eye(2).to_sparse())


def views(first: slice, second: slice) -> nn.Module:
    flat = torch.ones(4, 4)
    return Named(a=flat[first], b=flat[second])


def overlapping() -> nn.Module:
    return views(slice(3), slice(2, 4))


def one_memory() -> nn.Module:
    model = small()
    model.register_module("2", nn.Linear(2, 3))
    model[2].weight.data = model[0].weight.data
    return model


IMPOSSIBLE = {
    overlapping: "parameters 'a' and 'b' share memory",
    one_memory: "parameters '0.weight' and '2.weight' share memory",
    meta_buffer: "buffer 'table' is on the meta device",
    lazy_buffer: "'table' is not initialized yet",
    quantized_buffer: "buffer 'table' is quantized or sparse",
    sparse_buffer: "buffer 'table' is quantized or sparse",
    without_parameters: "no trainable parameters",
    all_frozen: "no trainable parameters",
    on_meta: "'1.weight' is on the meta device",
    complex_numbers: "'weight' is complex",
    uninitialized: "'1.weight' is not initialized",
}
CASES = {
    "the model of a rank has no trainable parameters": [without_parameters, all_frozen],
    "a parameter is on the meta device": [on_meta],
    "a parameter is complex": [complex_numbers],
    "a lazy parameter is not initialized": [uninitialized],
    "two parameters share memory": [overlapping, one_memory],
}
NAMED = "ValueError on all ranks; names the rank and the fault"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, marks=pytest.mark.fault(case, NAMED), id=build.__name__)
        for case, builds in CASES.items()
        for build in builds
    ],
)
def test_models_that_cannot_be_exchanged(build: Callable[[], nn.Module]) -> None:
    """On one rank alone: the others, whose models are fine, must hear of it."""

    def work(world: World) -> None:
        model = build() if world.rank == 1 else small()
        offbeat.replicate(model, offbeat.ddp(), mesh=world)

    said = alike(work)
    assert said.startswith("rank 1: ")
    assert IMPOSSIBLE[build] in said


def test_one_rank_alone_is_refused_too() -> None:
    for build, said in IMPOSSIBLE.items():
        with pytest.raises(ValueError, match=said):
            offbeat.replicate(build(), offbeat.ddp(), mesh=ThreadWorld(1).world(0))


@pytest.mark.parametrize("second", [slice(2, 4), slice(1, None, 2)], ids=["behind", "between"])
def test_parameters_may_be_views_that_share_nothing(second: slice) -> None:
    first = slice(2) if second.step is None else slice(0, None, 2)
    world = ThreadWorld(1).world(0)
    offbeat.replicate(views(first, second), offbeat.ddp(), mesh=world)


BUFFERS = [torch.int16, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", BUFFERS, ids=str)
@pytest.mark.fault(
    "a buffer has a dtype that the backend cannot send",
    "the values of rank 0 on all ranks, or ValueError on all",
)
def test_buffers_of_unusual_dtypes_are_equalized_or_refused(dtype: torch.dtype) -> None:
    """Gloo moves few of them; quantized models and rotary embeddings bring all of them."""

    def work(world: World) -> str:
        model = small()
        model.register_buffer("table", torch.full((3,), world.rank + 1).to(dtype))
        try:
            replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        except ValueError as error:
            return str(error)
        assert torch.equal(model.table, torch.ones(3).to(dtype))
        replica.finish()
        replica.detach()
        return "equalized"

    (said,) = set(ThreadWorld(SIZE).run(work, timeout=SECONDS))
    assert said == "equalized" or "'table'" in said


@pytest.mark.fault(
    "a buffer shares memory with itself (expand)",
    "the values of rank 0 on all ranks, or ValueError on all",
)
def test_an_expanded_buffer_is_equalized_or_refused() -> None:
    """A buffer that shares memory with itself, as masks made by ``expand`` do."""

    def work(world: World) -> str:
        model = small()
        model.register_buffer("mask", torch.full((1, 3), float(world.rank)).expand(2, 3))
        try:
            replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        except ValueError as error:
            return str(error)
        assert torch.equal(model.mask, torch.zeros(2, 3))
        replica.finish()
        replica.detach()
        return "equalized"

    (said,) = set(ThreadWorld(SIZE).run(work, timeout=SECONDS))
    assert said == "equalized" or "'mask'" in said


@pytest.mark.parametrize("verb", ["finish", "consensus"])
@pytest.mark.fault(
    "a buffer is added on one rank after replicate()",
    "ValueError on all ranks from finish() and consensus(); names the buffer",
)
def test_a_buffer_added_on_one_rank(verb: str) -> None:
    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        run(model, 1, replica)
        if world.rank == 1:
            model.register_buffer("late", torch.zeros(3))
        if verb == "finish":
            replica.finish()
        else:
            replica.consensus().__enter__()

    said = alike(work, size=3)
    assert f"{verb}() found different buffers: 'late' is missing on rank 0 and [[3]" in said


def test_a_buffer_added_on_all_ranks_is_averaged() -> None:
    def work(world: World) -> float:
        model = small()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        model.register_buffer("late", torch.tensor(float(world.rank)))
        replica.finish()
        return float(model.late)

    assert ThreadWorld(3).run(work) == [1.0, 1.0, 1.0]


class Raises(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a backward of the user's")


@pytest.mark.parametrize("then", ["step", "another backward"])
@pytest.mark.fault(
    "a backward raises on one rank, and the script goes on",
    "ValueError on all ranks; says so",
    group="Gradients",
)
def test_a_backward_that_raised_and_was_caught(then: str) -> None:
    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        for step in range(3):
            x = model[0](torch.ones(2))
            try:
                model[1](Raises.apply(x) if (step, world.rank) == (1, 1) else x).sum().backward()
            except ArithmeticError:
                if then == "another backward":
                    model(torch.ones(2)).sum().backward()
            replica.step()

    said = alike(work)
    assert "the last backward" in said
    assert "raised" in said
    assert "checkpointing" not in said


class Lookup(nn.Module):
    """Sparse gradients that no module announces, on one rank and from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, sparse: bool) -> Tensor:
        return F.embedding(torch.tensor([1, 2]), self.table, sparse=sparse).sum()


@pytest.mark.parametrize("text", ["ddp", "ddp(wire='bf16')"])
@pytest.mark.fault(
    "a sparse gradient appears on one rank during training",
    "ValueError on all ranks; names the parameter",
    group="Gradients",
)
def test_a_sparse_gradient_that_appears_on_one_rank(text: str) -> None:
    def work(world: World) -> None:
        model = Lookup()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        for step in range(3):
            model(sparse=world.rank == 1 and step == 1).backward()
            model.zero_grad()
            replica.step()

    text = alike(work, size=3)
    assert "'table' has a gradient of layout torch.sparse_coo" in text
    assert "sparse=False" in text


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """``torch.distributed`` with this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.fault(
    "the model is wrapped in DistributedDataParallel", "ValueError; says to pass model.module"
)
def test_a_model_wrapped_in_ddp() -> None:
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*model\.module"):
        offbeat.replicate(DistributedDataParallel(small()), offbeat.ddp())


@every_slot
@pytest.mark.fault(
    "replicate() is called twice for one model",
    "ValueError on all ranks; the first replica trains on",
)
def test_replicate_twice(text: str) -> None:
    """The second is refused, and the first goes on."""

    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        run(model, 1, replica)
        try:
            offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        finally:
            run(model, 2, replica)
            replica.detach()
            offbeat.replicate(model, offbeat.algorithm(text), mesh=world).detach()

    said = alike(work)
    assert "already belongs to a replica" in said
    assert "detach()" in said


@pytest.mark.fault(
    "there is no process group",
    "ValueError; says to call init_process_group()",
    group="Settings and arguments",
)
def test_no_process_group() -> None:
    with pytest.raises(ValueError, match=r"init_process_group\(\)"):
        offbeat.replicate(small(), offbeat.ddp())


@pytest.mark.fault(
    "something other than a module is passed as the model",
    "ValueError; says what is expected",
    group="Settings and arguments",
)
def test_not_a_model() -> None:
    with pytest.raises(ValueError, match="model"):
        offbeat.replicate([nn.Linear(1, 1)], offbeat.ddp(), mesh=ThreadWorld(1).world(0))


# ---- recipes and their arguments ----------------------------------------------------------------

TEXTS = {
    "adam": "ddp, local_sgd, diloco, sparse_loco, sgp",
    "ddp(bucket=3)": "wire, bucket_mb",
    "ddp(None, 25, 1)": "positional arguments: got 3, expected at most 1.*wire, bucket_mb",
    "ad_psgd('local')": "positional arguments: got 1, expected at most 0.*within",
    "sgp(overlaps=1)": "topology",
    "local_sgd(every=H)": "literal",
    "ddp(bucket_mb=float('inf'))": "literal",
    "ddp(__import__('os'))": "literal",
    "sgp(*['ring'])": "literal",
    "sgp(**{'topology': 'ring'})": "literal",
    "offbeat.ddp()": "literal",
    "ddp()()": "literal",
    "ddp(wire=None, wire=None)": "literal",
    "ddp(bucket_mb={[]: 1})": "literal",
    "ddp(": "literal",
    "ddp; sgp": "literal",
    "": "literal",
    "\0": "literal",
    "(" * 300: "literal",
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:30]))
@pytest.mark.fault(
    "a text names no algorithm, or wrong arguments",
    "ValueError; lists the valid ones",
    group="Settings and arguments",
)
def test_texts_that_name_no_algorithm(text: str) -> None:
    with pytest.raises(ValueError, match=TEXTS[text]):
        offbeat.algorithm(text)


@pytest.mark.parametrize("text", [5, b"ddp"], ids=repr)
def test_an_algorithm_must_be_named_by_a_text(text: Any) -> None:
    with pytest.raises(ValueError, match="algorithm"):
        offbeat.algorithm(text)


def test_without_a_text_the_environment_names_the_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFBEAT_ALGORITHM", "local-sgd(every=3)")
    assert offbeat.algorithm() == offbeat.algorithm(None) == offbeat.local_sgd(every=3)
    assert offbeat.algorithm("ddp") == offbeat.ddp()  # a text comes first


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_text_and_without_the_variable_the_fix_is_named(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFBEAT_ALGORITHM", raising=False)
    if value is not None:
        monkeypatch.setenv("OFFBEAT_ALGORITHM", value)
    with pytest.raises(ValueError, match=r"pass a text .* or set the variable, as offbeat compare"):
        offbeat.algorithm()


def test_a_wrong_text_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFBEAT_ALGORITHM", "sgpp")
    with pytest.raises(ValueError, match="variable OFFBEAT_ALGORITHM: unknown algorithm 'sgpp'"):
        offbeat.algorithm()


ARGUMENTS: list[tuple[Callable[[], object], str]] = [
    (lambda: offbeat.local_sgd(every=0), "every=0, expected"),
    (lambda: offbeat.local_sgd(every=2.5), "every=2.5, expected"),
    (lambda: offbeat.local_sgd(every="3"), "every='3', expected"),
    (lambda: offbeat.local_sgd(every=True), "every=True, expected"),
    (lambda: offbeat.local_sgd(every=None), "every=None, expected"),
    (lambda: offbeat.local_sgd(within="node"), "within='node', expected"),
    (lambda: offbeat.local_sgd(within=["local"]), "within=.*expected"),
    (lambda: offbeat.sgp(within="world"), "within='world', expected"),
    (lambda: offbeat.sgp(topology=5), "topology=5, expected"),
    (lambda: offbeat.sgp(topology="star"), "topology='star', expected.*'exponential', 'ring'"),
    (lambda: offbeat.sgp(topology=None), "topology=None, expected"),
    (lambda: offbeat.sgp(topology=["ring"]), "topology=.*expected"),
    (lambda: offbeat.sgp(topology=offbeat.Ring), "topology=.*expected"),
    (lambda: offbeat.ddp(wire="fp8"), "wire='fp8', expected"),
    (lambda: offbeat.ddp(wire=torch.bfloat16), "wire=torch.bfloat16, expected"),
    (lambda: offbeat.ddp(bucket_mb=0), "bucket_mb=0, expected"),
    (lambda: offbeat.ddp(bucket_mb=-1), "bucket_mb=-1, expected"),
    (lambda: offbeat.ddp(bucket_mb="x"), "bucket_mb='x', expected"),
    (lambda: offbeat.ddp(bucket_mb=None), "bucket_mb=None, expected"),
    (lambda: offbeat.ddp(bucket_mb=True), "bucket_mb=True, expected"),
    (lambda: offbeat.ddp(bucket_mb=1j), "bucket_mb=1j, expected"),
    (lambda: offbeat.ddp(bucket_mb=float("nan")), "bucket_mb=nan, expected"),
    (lambda: offbeat.ddp(bucket_mb=float("inf")), "bucket_mb=inf, expected"),
    (lambda: Mean(over="node"), "over='node', expected"),
    (lambda: Average(over="local"), "over='local', expected"),
    (lambda: PushSum(over="local"), "over='local', expected"),
    (lambda: PairAverage(over="local"), "over='local', expected"),
    (lambda: offbeat.ad_psgd(within="node"), "within='node', expected"),
    (lambda: PushSum(topology="ring"), "topology='ring', expected"),
    (lambda: offbeat.Algorithm(gradients=Average()), "the gradients slot holds"),
    (lambda: offbeat.Algorithm(parameters=Mean()), "the parameters slot holds"),
    (lambda: offbeat.Algorithm(gradients=Mean), "the gradients slot holds"),
    (lambda: offbeat.Algorithm(parameters="sgp"), "the parameters slot holds"),
]


@pytest.mark.parametrize(("make", "match"), ARGUMENTS, ids=[match for _, match in ARGUMENTS])
@pytest.mark.fault(
    "a recipe gets an argument of another type or out of range",
    "ValueError; names the argument, its value and what is expected",
    group="Settings and arguments",
)
def test_arguments_that_mean_nothing(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("algorithm", ["ddp", offbeat.ddp, None], ids=["name", "recipe", "nothing"])
@pytest.mark.fault(
    "replicate() gets no algorithm", "ValueError on all ranks", group="Settings and arguments"
)
def test_replicate_wants_an_algorithm(algorithm: Any) -> None:
    def work(world: World) -> None:
        offbeat.replicate(small(), algorithm, mesh=world)

    assert "expected what a recipe returns" in alike(work)


DIFFERENT_ALGORITHMS = [
    ("ddp", "sgp"),
    ("ddp", "ddp(bucket_mb=1)"),
    ("sgp", "sgp(within='local')"),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT_ALGORITHMS)
@pytest.mark.fault(
    "ranks pass different algorithms or settings", "ValueError on all ranks; shows both"
)
def test_different_algorithms_on_ranks(one: str, other: str) -> None:
    def work(world: World) -> None:
        text = other if world.rank == 1 else one
        offbeat.replicate(small(), offbeat.algorithm(text), mesh=world)

    said = alike(work)
    assert "algorithm" in said
    assert str(offbeat.algorithm(one)) in said
    assert str(offbeat.algorithm(other)) in said


class Circle(Topology):
    """As the docstring of ``Topology`` shows: a plain class, made anew in every process."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        return Peers((((rank + 1) % size, 0.5),), ((rank - 1) % size,), 0.5)

    def period(self, size: int) -> int:
        return 1


class Deaf(Circle):
    """Everybody keeps everything."""

    def peers(self, rank: int, size: int, index: int) -> Peers:
        return Peers((), (), 1.0)


def test_a_topology_of_ones_own_is_equal_on_all_ranks() -> None:
    """Every process makes its own object of it, with an address of its own."""

    def work(world: World) -> Any:
        model = small()
        replica = offbeat.replicate(model, offbeat.sgp(Circle()), mesh=world)
        run(model, 2, replica)
        saved = replica.state_dict()
        replica.detach()
        again = offbeat.replicate(small(), offbeat.sgp(Circle()), mesh=world)
        again.load_state_dict(saved)
        assert again.steps == 2
        again.detach()

    ThreadWorld(SIZE).run(work, timeout=SECONDS)


@pytest.mark.fault(
    "a topology does not connect all ranks",
    "ValueError on all ranks; names the participant that is not reached",
    group="Settings and arguments",
)
def test_a_topology_that_cannot_work() -> None:
    def work(world: World) -> None:
        offbeat.replicate(small(), offbeat.sgp(TOPOLOGY), mesh=world)

    assert "is not reachable from participant" in alike(work)


TOPOLOGY = Deaf()


# ---- who sits where -----------------------------------------------------------------------------


@pytest.mark.fault(
    "ranks describe the nodes differently",
    "ValueError on all ranks",
    group="Settings and arguments",
)
def test_nodes_that_differ_between_ranks() -> None:
    world = ThreadWorld(nodes=((0, 1), (2,)))

    def work(world: World) -> None:
        nodes = ((0,), (1, 2)) if world.rank == 1 else world.nodes
        odd = World(world.rank, nodes, world.store, world.opener)
        with pytest.raises(ValueError, match="nodes"):
            offbeat.replicate(small(), offbeat.ddp(), mesh=odd)

    world.run(work, timeout=SECONDS)


@pytest.fixture
def world_of_three() -> Iterator[None]:
    """``torch.distributed`` as rank 0 of 3, with torch's backend that only pretends to send."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers it

    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


BAD_NODES = {
    "omits the others": ((1, 2),),
    "omits rank 2": ((0, 1),),
    "repeats a rank": ((0, 1), (1, 2)),
    "repeats it in one node": ((0, 0), (1, 2)),
    "names a stranger": ((0, 1), (2, 3)),
    "has an empty node": ((0, 1, 2), ()),
    "is empty": (),
}


@pytest.mark.parametrize("what", BAD_NODES)
@pytest.mark.usefixtures("world_of_three")
@pytest.mark.fault(
    "the list of nodes omits or repeats a rank",
    "ValueError on every rank",
    group="Settings and arguments",
)
def test_nodes_that_do_not_place_every_rank_once(what: str) -> None:
    """A fault that every rank sees for itself, so that all of them raise."""
    with pytest.raises(ValueError, match="list every rank in one node"):
        World.of(BAD_NODES[what])


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.fault(
    "a mesh has axes other than node and local",
    "ValueError; names the axes",
    group="Settings and arguments",
)
def test_a_mesh_with_other_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    with pytest.raises(ValueError, match=r"\('data', 'model'\), expected \('node', 'local'\)"):
        offbeat.replicate(small(), offbeat.ddp(), mesh=mesh)
    flat = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match=r"expected \('node', 'local'\)"):
        offbeat.replicate(small(), offbeat.ddp(), mesh=flat)


@pytest.mark.parametrize(
    "mesh", ["node", 3, ((0, 1), (2,)), ThreadWorld(1)], ids=["name", "number", "ranks", "world"]
)
@pytest.mark.fault(
    "something other than a mesh is passed as the mesh",
    "ValueError; says what is expected",
    group="Settings and arguments",
)
def test_something_that_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a DeviceMesh .* or offbeat\.World"):
        offbeat.replicate(small(), offbeat.ddp(), mesh=mesh)


# ---- calls at the wrong moment ------------------------------------------------------------------


@pytest.mark.fault(
    "a replica is used after detach()",
    "ValueError; the model remains a plain module that can be trained",
    group="Leaving",
)
def test_nothing_works_after_detach() -> None:
    (replica,) = ThreadWorld(1).run(lambda g: offbeat.replicate(small(), offbeat.ddp(), mesh=g))
    replica.detach()
    saved: dict[str, Any] = {}
    calls: list[Callable[[], object]] = [
        replica.step,
        replica.finish,
        replica.state_dict,
        replica.consensus_distance,
        lambda: replica.load_state_dict(saved),
        lambda: replica.consensus().__enter__(),
        lambda: replica.install(SGD(replica.model.parameters(), lr=0.1)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"after detach\(\).*replicate\(\)"):
            call()
    run_alone = replica.model(torch.ones(2)).sum()
    run_alone.backward()  # plain again


def lay_out(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def move(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def tie(model: nn.Sequential) -> None:
    model[1].bias.data = model[2].bias.data


def unfreeze(model: nn.Sequential) -> None:
    model[2].requires_grad_(True)


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1))


def remove(model: nn.Sequential) -> None:
    model[0].bias = None


def replace(model: nn.Sequential) -> None:
    model[0] = copy.deepcopy(model[0])


def cast(model: nn.Sequential) -> None:
    model.double()


def partly_frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    model[2].requires_grad_(False)
    return model


CHANGES = {
    "unfrozen": [unfreeze],
    "added or removed": [add, remove],
    "replaced by others": [replace],
    "cast to another dtype": [cast],
    "given other strides, storage or aliases": [lay_out, move, tie],
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            change,
            marks=pytest.mark.fault(
                f"after replicate() parameters are {how}",
                "ValueError on all ranks at the next step(); says to call replicate() again",
            ),
        )
        for how, changes in CHANGES.items()
        for change in changes
    ],
)
@pytest.mark.parametrize(("text", "where"), [("ddp", "on all ranks"), ("sgp", "on rank 1")])
def test_parameters_that_change_after_replicate(
    change: Callable[[nn.Sequential], None], text: str, where: str
) -> None:
    """Found at the next ``step()``; every rank is told, for the others go on or wait."""

    def work(world: World) -> None:
        model = partly_frozen()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        run(model, 1, replica)
        if where == "on all ranks" or world.rank == 1:
            change(model)
        for _ in range(3):
            x = torch.ones(2, dtype=model[0].weight.dtype)
            model(x).sum().backward()
            replica.step()

    said = alike_or_each(work, where)
    assert all("since replicate()" in text and "replicate() again" in text for text in said)


@pytest.mark.fault(
    "a rank with bad input closes its connections at once",
    "ValueError on all ranks",
)
def test_the_last_rank_to_hear_of_a_fault_is_told_too() -> None:
    """It waits for the rank with the fault, when the third has closed its connections already."""

    def work(world: World) -> None:
        model = partly_frozen()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        run(model, 1, replica)
        if world.rank == 1:
            move(model)
        if world.rank == 2:
            slow_down(replica._connection.links.heartbeat)
        run(model, 3, replica)

    assert "rank 1:" in alike(work, size=3)


def slow_down(heartbeat: Any) -> None:
    beat = heartbeat._beat

    def late(stretch: float) -> None:
        time.sleep(0.5)
        beat(stretch)

    heartbeat._beat = late


def alike_or_each(work: Callable[[World], object], where: str) -> set[str]:
    """Where every rank has the fault, each may name itself; otherwise all name rank 1."""
    if where == "on rank 1":
        text = alike(work, size=3)
        assert "rank 1:" in text
        return {text}

    def each(world: World) -> str:
        with pytest.raises(ValueError, match="since replicate") as raised:
            work(world)
        return str(raised.value)

    return set(ThreadWorld(SIZE).run(each, timeout=SECONDS))


@every_slot
@pytest.mark.fault(
    "state_dict() is called between a backward and step()",
    "ValueError on all ranks; training can go on",
    group="Checkpoints",
)
def test_state_dict_between_backward_and_step(text: str) -> None:
    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        replica.state_dict()
        model(torch.ones(2)).sum().backward()
        try:
            replica.state_dict()
        finally:
            replica.step()
            replica.state_dict()
            replica.detach()

    assert "right after replica.step()" in alike(work)


@every_slot
@pytest.mark.fault(
    "a backward runs inside consensus()",
    "ValueError on all ranks; parameters are restored, training can go on",
    group="Calls that differ between ranks",
)
@pytest.mark.parametrize("accumulates", [False, True])
def test_backward_inside_consensus(text: str, accumulates: bool) -> None:
    """Refused, also in a step that has begun; the block gives the parameters back all the same."""

    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        run(model, 1, replica)
        if accumulates:
            replica.set_requires_sync(False)
            model(torch.ones(2)).sum().backward()
        before = copy.deepcopy(model.state_dict())
        try:
            with replica.consensus():
                model(torch.ones(2)).sum().backward()
        finally:
            assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
            model.zero_grad()
            replica.set_requires_sync(True)
            run(model, 1, replica)
            replica.detach()

    assert "inside consensus(): leave the block first" in alike(work)


@pytest.mark.fault(
    "step() or finish() is called inside consensus()",
    "ValueError on all ranks; training can go on",
    group="Calls that differ between ranks",
)
def test_calls_inside_consensus() -> None:
    def work(world: World) -> None:
        replica = offbeat.replicate(small(), offbeat.sgp(), mesh=world)
        with replica.consensus():
            for call in (replica.step, replica.finish):
                with pytest.raises(ValueError, match=r"inside consensus\(\)"):
                    call()
        replica.step()
        replica.detach()

    ThreadWorld(SIZE).run(work, timeout=SECONDS)


@pytest.mark.fault(
    "detach() is called inside consensus()",
    "the replica stays detached; later calls raise ValueError",
    group="Leaving",
)
def test_detach_inside_consensus_stays_detached() -> None:
    def work(world: World) -> None:
        replica = offbeat.replicate(small(), offbeat.sgp(), mesh=world)
        with replica.consensus():
            replica.detach()
        with pytest.raises(ValueError, match="after detach"):
            replica.step()

    ThreadWorld(SIZE).run(work, timeout=SECONDS)


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("ddp", "finish"),
        ("local_sgd(every=1)", "finish"),
        ("sgp", "consensus"),
        ("sgp", "consensus_distance"),
    ],
)
@pytest.mark.fault(
    "one rank calls step(), others finish() or consensus()",
    "ValueError on all ranks; names both calls",
    group="Calls that differ between ranks",
)
def test_step_on_one_rank_against_another_call_on_the_others(text: str, verb: str) -> None:
    """Rank 1 takes one step more and only then makes the call that the others wait in."""

    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        run(model, 2 + (world.rank == 1), replica)
        if verb == "consensus":
            with replica.consensus():
                pass
        else:
            getattr(replica, verb)()
        run(model, 1, replica)

    said = alike(work, size=3)
    assert verb in said
    assert "step" in said


@pytest.mark.fault(
    "a node steps without a backward, another calls finish()",
    "ValueError on all ranks; names both calls",
    group="Calls that differ between ranks",
)
def test_a_step_without_a_backward_against_finish() -> None:
    """Inside that step a whole node joins a backward it has not run, and then gossips."""

    def work(world: World) -> None:
        replica = offbeat.replicate(small(), offbeat.sgp("ring", within="local"), mesh=world)
        if world.node == 0:
            replica.step()
        else:
            replica.finish()

    with pytest.warns(RuntimeWarning, match="without a backward"):
        said = alike(work, nodes=((0, 1), (2, 3)))
    assert "finish" in said
    assert "step" in said


@pytest.mark.filterwarnings("ignore:rank .* gradients that were not exchanged:RuntimeWarning")
@pytest.mark.parametrize("text", ["ddp", "local_sgd(every=100)"])
@pytest.mark.fault(
    "ranks make different numbers of steps before finish()",
    "ValueError on all ranks; lists the numbers",
    group="Calls that differ between ranks",
)
def test_different_numbers_of_steps_before_finish(text: str) -> None:
    """Where steps do not wait for each other, ``finish`` is the first to notice."""

    def work(world: World) -> None:
        model = small()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        replica.set_requires_sync(False)
        run(model, 2 + world.rank, replica)
        replica.finish()

    assert "finish() was called after different numbers of steps: [2, 3]" in alike(work)


class Wrapped(torch.optim.Optimizer):
    """As frameworks wrap an optimizer: a subclass that never initializes its parent."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.scaler: torch.amp.GradScaler | None = None


@pytest.mark.fault(
    "install() gets an optimizer wrapped around a GradScaler",
    "ValueError; says to call step()",
    group="Settings and arguments",
)
def test_install_of_a_wrapped_optimizer() -> None:
    (replica,) = ThreadWorld(1).run(lambda g: offbeat.replicate(small(), offbeat.ddp(), mesh=g))
    optimizer = SGD(replica.model.parameters(), lr=0.1)
    wrapped = Wrapped(optimizer)
    wrapped.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"got Wrapped with a GradScaler.*call replica\.step\(\)"):
        replica.install(Wrapped(wrapped))
    wrapped.scaler = None
    replica.install(Wrapped(wrapped))
    optimizer.step()
    assert replica.stats()["step"] == 1


@pytest.mark.fault(
    "install() gets several optimizers, or is called twice",
    "ValueError",
    group="Settings and arguments",
)
def test_install_wants_one_optimizer_once() -> None:
    (replica,) = ThreadWorld(1).run(lambda g: offbeat.replicate(small(), offbeat.ddp(), mesh=g))
    optimizer = SGD(replica.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="list"):
        replica.install([optimizer])
    replica.install(optimizer)
    with pytest.raises(ValueError, match="once"):
        replica.install(optimizer)
    replica.detach()
