"""Parameters and buffers to ignore stay each rank's own, whatever the recipe exchanges."""

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import offbeat
from crowd import Crowd
from offbeat.exchange import Exchanged
from offbeat.integrations.replicas import Replicas
from offbeat.integrations.split_by_optimizer import parts_of
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from outcomes import SECONDS, alike
from ranks import Spawned

pytestmark = pytest.mark.usefixtures("fast_heartbeat")

IGNORED = ["head.weight", "head.bias", "norm.running_mean"]
RECIPES = [
    "ddp",
    "lags(density=0.5)",
    "sgp",
    "sgp(overlap=1)",
    "diloco(every=2)",
    "diloco(every=2, fragments=2)",
    "adasum",
    "adasum(within='local')",
    "daso(every=2)",
]
every_recipe = pytest.mark.parametrize("text", RECIPES)
mark_ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model


class Net(nn.Module):
    """Starts from other values on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.norm.running_mean.fill_(rank)
        draws = torch.Generator().manual_seed(rank)  # threads share that of torch
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=draws)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


def attach(world: World, text: str, **how: Any) -> offbeat.Replica:
    how.setdefault("ignore", IGNORED)
    return offbeat.replicate(Net(world.rank), offbeat.algorithm(text), mesh=world, **how)


def train(replica: offbeat.Replica, until: int) -> None:
    optimizer = SGD(replica.owned_parameters(), lr=0.1)
    while replica.steps < until:
        draws = torch.Generator().manual_seed(1000 * replica.world.rank + replica.steps)
        replica.model(torch.randn(5, 3, generator=draws)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of what is exchanged, and of what is ignored."""
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return values, {name: values.pop(name) for name in IGNORED}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@every_recipe
def test_what_is_ignored_stays_own(text: str) -> None:
    """From the start to finish(); the rest becomes equal."""

    def work(world: World) -> Any:
        own = Net(world.rank)
        replica = attach(world, text)
        start, alone = split(replica.model)
        assert equal(alone, split(own)[1])
        train(replica, 5)
        alone = split(replica.model)[1]
        with replica.consensus():
            shown, kept = split(replica.model)
            assert equal(kept, alone)
        replica.finish()
        finished, kept = split(replica.model)
        assert equal(kept, alone)
        assert equal(shown, finished)
        replica.detach()
        return start, finished, alone

    (start, finished, alone), *others = ThreadWorld(nodes=((0, 1), (2,))).run(work)
    for their_start, their_end, their_alone in others:
        assert equal(their_start, start)
        assert equal(their_end, finished)
        assert not any(torch.equal(their_alone[name], alone[name]) for name in IGNORED)


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.5)", "ddp(wire='bf16')"])
def test_a_gradient_of_an_ignored_parameter_is_this_rank_s(text: str) -> None:
    def work(world: World) -> None:
        replica = attach(world, text)
        x, head = torch.full((5, 3), float(world.rank)), replica.model.head
        twin = copy.deepcopy(replica.model)
        for model in (replica.model, twin):
            model(x).square().mean().backward()
        assert torch.equal(head.weight.grad, twin.head.weight.grad)
        norm = replica.clip_grad_norm_(1e-3)  # alike on all ranks: of what is exchanged only
        assert torch.equal(head.weight.grad, twin.head.weight.grad)
        assert len(set(replica.gather(str(norm.item())))) == 1
        replica.detach()

    ThreadWorld(2).run(work)


@pytest.mark.parametrize("text", ["ddp", "sgp"])
def test_what_torch_ignores_is_ignored(text: str) -> None:
    def work(world: World, ignore: Collection[str | nn.Module]) -> dict[str, Tensor]:
        model = Net(world.rank)
        if not ignore:
            mark_ignored(model, IGNORED)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, ignore=ignore)
        train(replica, 3)
        replica.finish()
        return model.state_dict()

    given, read = (ThreadWorld(2).run(lambda w, i=i: work(w, i)) for i in (IGNORED, ()))
    assert all(map(equal, given, read))


@every_recipe
def test_a_run_resumes_with_what_it_ignored(text: str) -> None:
    def work(world: World) -> None:
        replica = attach(world, text)
        train(replica, 3)
        saved, model = replica.state_dict(), copy.deepcopy(replica.model.state_dict())
        train(replica, 6)
        through = replica.model.state_dict()
        replica.detach()

        again = attach(world, text)
        if text in ("ddp", "lags(density=0.5)"):  # their state has no parameters
            again.model.load_state_dict(model)
            again.model.head.weight.data.zero_()  # but those to ignore
        again.load_state_dict(saved)
        train(again, 6)
        assert equal(again.model.state_dict(), through)
        again.detach()

    ThreadWorld(nodes=((0, 1), (2,))).run(work)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_joins_keeps_its_own() -> None:
    def work(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        replica = attach(world, "sgp()", elastic=True)
        before = split(replica.model)[1]
        if replica.steps:  # it has joined
            assert torch.equal(before["head.weight"], Net(replica.world.rank).head.weight)
        while not replica.joined or replica.steps < replica.joined[0]["step"] + 10:
            train(replica, replica.steps + 1)
        replica.finish()
        found = split(replica.model)
        replica.detach()
        return found

    crowd = Crowd(2, work)
    crowd.come(crowd.world.newcomer(), after=0.1)
    (first, alone), *others = crowd.all()
    for exchanged, own in others:
        assert equal(exchanged, first)
        assert not torch.equal(own["head.weight"], alone["head.weight"])


def test_nodes_that_take_part_as_one_ignore_too() -> None:
    def work(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        replica = attach(world, "sgp(within='local')", elastic=True)
        train(replica, 3)
        replica.finish()
        return split(replica.model)

    (first, alone), *others = ThreadWorld(nodes=((0, 1), (2, 3))).run(work)
    for exchanged, own in others:
        assert equal(exchanged, first)
        assert not torch.equal(own["head.weight"], alone["head.weight"])


def test_names_of_modules_modules_and_tied_parameters() -> None:
    def work(world: World) -> None:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": Net(world.rank)})
        model["b"].weight = model["a"].weight
        replica = offbeat.replicate(
            model, offbeat.ddp(), mesh=world, ignore=["b.weight", "c.norm", model["c"].head]
        )
        assert [*replica._trained] == ["a.bias", "b.bias", "c.body.weight", "c.body.bias"]
        assert len(replica.owned_parameters()) == 9
        replica.detach()

    ThreadWorld(2).run(work)


def test_what_cannot_be_exchanged_can_be_ignored() -> None:
    def work(world: World) -> None:
        model = Net(world.rank)
        model.table = nn.Embedding(4, 2 + world.rank, sparse=True)
        model.phases = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        model.register_buffer("mask", torch.eye(2).to_sparse())
        names = ["table", "phases", "mask"]
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world, ignore=names)
        train(replica, 2)
        saved = replica.state_dict()
        model.table.weight.data.zero_()
        replica.load_state_dict(saved)
        assert model.table.weight.abs().sum() > 0
        replica.finish()
        replica.detach()

    ThreadWorld(2).run(work)


def test_each_part_of_several_optimizers_ignores_its_own() -> None:
    model = nn.ModuleDict({"g": nn.Linear(1, 2), "d": nn.Linear(2, 1)})
    mark_ignored(model, ["g.bias", "d.weight"])
    optimizers = [SGD(model[name].parameters(), lr=0.1) for name in "gd"]
    parts = parts_of(model, optimizers)
    assert [part._ddp_params_and_buffers_to_ignore for part in parts] == [["g.bias"], ["d.weight"]]


def test_an_optimizer_of_ignored_parameters_alone_has_no_replica() -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        model = nn.ModuleDict({"g": nn.Linear(1, 2), "d": nn.Linear(2, 1)})
        nn.init.constant_(model["g"].weight, world.rank)
        mark_ignored(model, ["g.weight", "g.bias"])
        optimizers = [SGD(model[name].parameters(), lr=0.1) for name in "gd"]
        replicas = Replicas(offbeat.ddp(), world)
        replicas.attach(model, optimizers)
        for _ in range(2):
            model["d"](model["g"](torch.ones(1))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                replicas.step(optimizer)
        assert [replica.steps for replica in replicas.each] == [2]
        replicas.detach()
        return model["g"].weight, model["d"].weight

    (own, trained), (other, also) = ThreadWorld(2).run(work)
    assert torch.equal(trained, also)
    assert not torch.equal(own, other)


def test_names_that_torch_would_not_find_are_skipped() -> None:
    """DDP matches names of tensors; a compiled model shows what its inner one was given."""
    inner = Net(0)
    mark_ignored(inner, ["head", "body.wight", "body.bias"])
    for model in (inner, torch.compile(inner)):
        assert Exchanged(model).fault() is None
    assert [*Exchanged(inner).ignored] == ["body.bias"]
    root = nn.Linear(1, 1)
    mark_ignored(root, [".bias"])  # as the recipe in torch's docstring names it
    assert [*Exchanged(root).ignored] == ["bias"]


def test_a_replaced_ignored_parameter_does_not_slow_down_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = attach(ThreadWorld(1).world(0), "sgp", ignore=["body.weight", "head"])
    replica.model.body.weight = nn.Parameter(torch.ones(4, 3))
    with monkeypatch.context() as patch:
        patch.setattr("offbeat.attach.checks._traits", None)  # compares names, which is slow
        replica.step()
    replica.model.body.bias = None
    with pytest.raises(ValueError, match=r"\['body.bias'\] were replaced"):
        replica.step()


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        pytest.param(
            shared,
            "'0.weight' and '1.weight' share memory .* '1.weight' would not stay its own",
            marks=pytest.mark.fault(
                "an ignored parameter shares memory with an exchanged one",
                "ValueError on all ranks; names the rank and the fault",
                group="Models and algorithms",
            ),
        ),
        pytest.param(
            lazy,
            "'1.weight' is not initialized yet; run one forward pass first",
            marks=pytest.mark.fault(
                "a lazy parameter is not initialized",
                "ValueError on all ranks; names the rank and the fault",
                group="Models and algorithms",
            ),
        ),
    ],
)
def test_what_cannot_be_ignored(build: Callable[[], nn.Module], match: str) -> None:
    def work(world: World) -> None:
        offbeat.replicate(build(), offbeat.ddp(), mesh=world, ignore=["1", "2"])

    with pytest.raises(ValueError, match=match):
        raise ValueError(alike(work))


def test_ignored_parameters_may_share_memory() -> None:
    model = shared()
    replica = offbeat.replicate(
        nn.ModuleList([nn.Linear(1, 1), model]),
        offbeat.ddp(),
        mesh=ThreadWorld(1).world(0),
        ignore=["1"],
    )
    replica.detach()


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown name": (["head.wight"], "'head.wight' is to be ignored.*'head.weight'"),
    "no list": ("head", "ignore is a str, expected a list of names and modules"),
    "a module of another model": ([nn.Linear(1, 1)], "has a Linear that is no module of the model"),
    "all": (["body", "norm", "head"], "no trainable parameters"),
    "no name": ([3], "ignore has a int that is no module of the model; give modules, or names"),
    "another list": (["head"], "ranks 0 and 1 differ: the kind of 'norm.running_mean' is ignored"),
    "another list of torch": (["head.bias"], "the kind of 'head.weight' is ignored here"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.fault(
    "parameters to ignore are unknown, or differ between ranks",
    "ValueError on all ranks; names the parameter",
)
def test_bad_lists_are_refused_on_all_ranks(case: str) -> None:
    given, match = REFUSED[case]
    by_torch = case.endswith("of torch")

    def work(world: World) -> None:
        ignore = given if world.rank == 1 else IGNORED
        model = Net(world.rank)
        if by_torch:
            mark_ignored(model, ignore)
        offbeat.replicate(model, offbeat.sgp(), mesh=world, ignore=() if by_torch else ignore)

    with pytest.raises(ValueError, match=match):
        raise ValueError(alike(work))


def _with_torch_ddp(rank: int, results: Any) -> None:
    model = Net(rank)
    for recipe in (offbeat.torch_ddp(), offbeat.torch_ddp(), offbeat.ddp()):
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks), type(model)
        replica = offbeat.replicate(model, recipe, ignore=IGNORED)
        train(replica, 3)
        replica.detach()
        assert (len(model._forward_hooks), len(model._forward_pre_hooks), type(model)) == hooks
    model(torch.full((5, 3), float(rank))).square().mean().backward()
    found = (model.body.weight, model.head.weight, model.body.weight.grad)
    results.put([rank, *(tensor.tolist() for tensor in found)])


@pytest.mark.processes
@pytest.mark.fault(
    "replicate() is called again after detach() of torch_ddp()",
    "the model trains with either; no hook of torch is left",
    group="Leaving",
)
def test_torch_ddp_ignores_and_detaches() -> None:
    results = sorted(Spawned(_with_torch_ddp, 2).join(SECONDS * 5))
    (_, body, head, gradient), (_, *others) = results
    assert body == others[0]
    assert head != others[1]
    assert gradient != others[2], "gradients are still averaged"
