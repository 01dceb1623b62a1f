"""Invariant 6: ``.grad`` holds the mean when ``backward()`` returns, whatever the model does."""

import copy
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from test_compiled import in_parts_by_aot_eager

SIZE, STEPS = 3, 4
Gradients = dict[str, Tensor | None]
Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int, int], Tensor]  # (model, rank, step)


@dataclass(frozen=True)
class Case:
    """A model, and a loss for each rank and step."""

    name: str
    build: Build
    loss: Loss


def batch(rank: int, step: int, shape: tuple[int, ...] = (5, 4)) -> Tensor:
    """Another batch on every rank and step; drawn apart, since threads share torch's generator."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=generator)


def seeded(build: Build) -> Build:
    """The same model at each call, from any thread."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        template = build()
    return lambda: copy.deepcopy(template)


def layers(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])


def plain(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    x = batch(rank, step)
    for layer in model:
        x = torch.tanh(layer(x))
    return x.square().sum()


class Odd(nn.Module):
    """Parameters of unusual sizes: 0-dim, one element, none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.single = nn.Parameter(torch.tensor([[3.0]]))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scalar * x.sum() + (self.single * x).square().sum() + self.empty.sum()


class Convolutions(nn.Sequential):
    """Weights in channels_last, so that gradients have other strides than shapes say."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        self.to(memory_format=torch.channels_last)


class Tied(nn.Module):
    """The output layer is the embedding, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(self.embedding(tokens)))), tokens)


def convolve(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step, (2, 3, 7, 7))).square().sum()


def embed(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.tensor([rank, (rank + step) % 6, 5]))


def two_dtypes() -> nn.ModuleList:
    first, second, third = layers()
    return nn.ModuleList([first, second.bfloat16(), third])


def through_two_dtypes(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    x = batch(rank, step)
    for layer in model:
        x = torch.tanh(layer(x.to(layer.weight.dtype)))
    return x.square().sum()


def skipping(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    """Layer 0 is used by all, 1 by a changing rank alone, 2 by all but that one, 3 by none."""
    x = model[0](batch(rank, step))
    chosen = model[1] if rank == step % SIZE else model[2]
    return chosen(torch.tanh(x)).square().sum()


def sometimes(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    """Every layer at even steps, only the first at odd ones: what an old view holds must go."""
    return plain(model if step % 2 == 0 else model[:1], rank, step)


def checkpointed(model: nn.ModuleList, rank: int, step: int, reentrant: bool) -> Tensor:
    """Every block is checkpointed, the outermost too."""
    x = batch(rank, step).requires_grad_()
    for layer in model:
        x = checkpoint(lambda x, own: torch.tanh(own(x)), x, layer, use_reentrant=reentrant)
    return x.square().sum()


def nested(model: nn.ModuleList, rank: int, step: int, reentrant: bool) -> Tensor:
    """A checkpointed block in a checkpointed block, between two blocks that are not."""
    first, second, third, fourth = model

    def inner(x: Tensor) -> Tensor:
        return torch.tanh(third(x))

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, torch.tanh(second(x)), use_reentrant=reentrant)

    x = checkpoint(outer, first(batch(rank, step)), use_reentrant=reentrant)
    return fourth(x).square().sum()


def sandwiched(model: nn.ModuleList, rank: int, step: int, reentrant: bool) -> Tensor:
    """Layer 1 before, inside and after a checkpointed block; reentrant, it is ready twice."""
    first, shared, third = model

    def block(x: Tensor) -> Tensor:
        return torch.tanh(third(shared(x)))

    x = shared(first(batch(rank, step)))
    return shared(checkpoint(block, x, use_reentrant=reentrant)).square().sum()


def repeated(model: nn.ModuleList, rank: int, step: int, reentrant: bool) -> Tensor:
    """Layer 1 in two checkpointed blocks."""
    x = torch.tanh(model[0](batch(rank, step)))
    for _ in range(2):
        x = torch.tanh(checkpoint(model[1], x, use_reentrant=reentrant))
    return x.square().sum()


def branches(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    """Independent branches in an order of each rank's own: gradients become ready in any order."""
    order = random.Random(10 * rank + step).sample(range(len(model)), len(model))
    total = batch(rank, step).sum() * 0
    for index in order:
        total = total + model[index](batch(rank, step)).square().sum()
    return total


def cases() -> list[Case]:
    four, six = partial(layers, 4), partial(layers, 6)
    return [
        Case("plain", seeded(layers), plain),
        Case("odd sizes", seeded(Odd), lambda model, rank, step: model(batch(rank, step))),
        Case("channels last", seeded(Convolutions), convolve),
        Case("tied", seeded(Tied), embed),
        Case("two dtypes", seeded(two_dtypes), through_two_dtypes),
        Case("unused on some ranks and on all", seeded(four), skipping),
        Case("unused at some steps", seeded(layers), sometimes),
        Case("checkpointed", seeded(layers), partial(checkpointed, reentrant=False)),
        Case("checkpointed, reentrant", seeded(layers), partial(checkpointed, reentrant=True)),
        Case("nested", seeded(four), partial(nested, reentrant=False)),
        Case("nested, reentrant", seeded(four), partial(nested, reentrant=True)),
        Case("sandwiched", seeded(layers), partial(sandwiched, reentrant=False)),
        Case("any order", seeded(six), branches),
    ]


ONE_EACH = ["ddp(bucket_mb=1e-5)", "ddp(wire='bf16', bucket_mb=1e-5)"]  # parameters a bucket
either_wire = pytest.mark.parametrize("text", ONE_EACH)
either_zero = pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
either_wire_and_zero = pytest.mark.parametrize(
    ("text", "set_to_none"), [(ONE_EACH[0], False), (ONE_EACH[1], True)], ids=["zero", "none"]
)


@pytest.fixture(autouse=True)
def small_first_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few hundred bytes: the first bucket must not swallow them."""
    monkeypatch.setattr("offbeat.exchange.engine.bucket.FIRST_BUCKET", 8)


# torch's own: the outer block's first forward runs without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("case", "text"),
    [*((case, "ddp()") for case in cases()), *((case, ONE_EACH[1]) for case in cases()[::2])],
    ids=lambda part: getattr(part, "name", part),
)
def test_grad_is_the_mean_when_backward_returns(case: Case, text: str) -> None:
    """Some steps with ``set_to_none``, then some without."""

    def worker(world: World) -> list[Gradients]:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        seen = []
        for step in range(2 * STEPS):
            case.loss(model, world.rank, step).backward()
            seen.append(gradients(model))
            model.zero_grad(set_to_none=step < STEPS)
            replica.step()
        replica.detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    for step in range(2 * STEPS):
        zeros = names_used(case, range(STEPS, step))
        check_means([run[step] for run in runs], local_gradients(case, step), "bf16" in text, zeros)


def gradients(model: nn.Module) -> Gradients:
    """Copies of all gradients: the originals are views that the next step overwrites."""
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


@cache
def local_gradients(case: Case, step: int) -> list[Gradients]:
    """What each rank's own backward makes, without any replica."""
    models = [case.build() for _ in range(SIZE)]
    for rank, model in enumerate(models):
        case.loss(model, rank, step).backward()
    return [gradients(model) for model in models]


def names_used(case: Case, steps: Iterable[int]) -> set[str]:
    """Parameters with a gradient on any rank at these steps: zero, not None, from then on."""
    everyone = [rank for step in steps for rank in local_gradients(case, step)]
    return {name for rank in everyone for name, grad in rank.items() if grad is not None}


def check_means(
    ours: list[Gradients], locals_: list[Gradients], bf16: bool, used_before: set[str]
) -> None:
    """Compare with the mean in float64; equal on all ranks bit for bit."""
    for name, mine in ours[0].items():
        parts = [rank[name] for rank in locals_ if rank[name] is not None]
        assert all((rank[name] is None) == (mine is None) for rank in ours), name
        if mine is None:
            assert not parts, name
            assert name not in used_before, name
            continue
        assert parts or name in used_before, name
        assert all(torch.equal(rank[name], mine) for rank in ours), name
        wide = torch.stack([part.double() for part in parts] or [torch.zeros_like(mine).double()])
        # 16 bits: every term is cast once and their mean once, half a unit each (and nothing is
        # lost in between). In full precision one rounding for each operation. Relative to the
        # sum of magnitudes: terms may cancel.
        coarse = bf16 or mine.dtype == torch.bfloat16
        unit = 1.01 * torch.finfo(torch.bfloat16).eps if coarse else 4 * torch.finfo(mine.dtype).eps
        allowed = unit * wide.abs().sum(0) / SIZE
        error = (mine.double() - wide.sum(0) / SIZE).abs()
        assert (error <= allowed).all(), (name, error.max())


@pytest.mark.parametrize(
    ("text", "loss"),
    [("ddp(wire='bf16')", sandwiched), (ONE_EACH[0], sandwiched), (ONE_EACH[1], repeated)],
)
@pytest.mark.fault(
    "a parameter is used several times, with reentrant checkpoints",
    "the exact mean, or ValueError on all ranks",
)
def test_a_gradient_that_is_ready_twice_is_right_or_an_error_on_all_ranks(
    text: str, loss: Callable[..., Tensor]
) -> None:
    """Each reentrant block accumulates its own gradient; DDP refuses it altogether."""
    case = Case("", seeded(layers), partial(loss, reentrant=True))

    def worker(world: World) -> str:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        for step in range(2 * STEPS):
            try:
                case.loss(model, world.rank, step).backward()
            except ValueError as error:
                return str(error)
            mean = sum(rank["1.weight"] for rank in local_gradients(case, step)) / SIZE
            # Units of 2^-8 for the 16-bit wire, of entries below 100.
            torch.testing.assert_close(model[1].weight.grad, mean, rtol=2**-6, atol=0.4)
            model.zero_grad(set_to_none=False)  # so that the next one is scaled in its bucket
            replica.step()
        replica.detach()
        return "right"

    said = set(ThreadWorld(SIZE).run(worker))
    assert len(said) == 1
    if said != {"right"}:
        assert "it is used more than once, at least once in a block checkpointed" in said.pop()


@pytest.mark.fault(
    "one rank does not use a parameter, with reentrant checkpoints",
    "ValueError on all ranks; names use_reentrant=False",
)
def test_reentrant_blocks_with_an_unused_parameter_are_an_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When a backward ends inside a nested one, this rank cannot know that nothing will follow."""
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.BEAT", 0.1)
    build = seeded(layers)

    def worker(world: World) -> str:
        model = build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        mine = model[:-1] if world.rank == 1 else model

        def train() -> None:
            for step in range(2):
                checkpointed(mine, world.rank, step, reentrant=True).backward()
                replica.step()

        with pytest.raises(ValueError, match="use_reentrant=False") as raised:
            train()
        return str(raised.value)

    assert len(set(ThreadWorld(SIZE).run(worker))) == 1


class Late(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return grad, None


@pytest.mark.fault(
    "gradients of two dtypes are ready in another order",
    "the exact mean, equal on all ranks",
)
def test_dtypes_do_not_overtake_each_other_on_a_slow_rank() -> None:
    """16-bit and 32-bit buckets take different ways to the wire: one order on every rank."""
    build = seeded(lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()]))

    def worker(world: World) -> None:
        model = build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        # Rank 0 starts late and pauses between its layers: the others' 16-bit bucket still waits
        # for it when their 32-bit bucket is ready, and its own does not.
        pause = 0.05 if world.rank == 0 else 0.0
        for _ in range(3):
            x = Late.apply(model[0](torch.ones(4)), 2 * pause)
            Late.apply(model[1](x.bfloat16()), pause).sum().backward()
            model.zero_grad()
            replica.step()
        replica.detach()

    ThreadWorld(SIZE).run(worker)


def test_local_sgd_of_two_dtypes_keeps_one_order_on_a_slow_rank() -> None:
    build = seeded(lambda: nn.ModuleList([nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)]))

    def worker(world: World) -> None:
        replica = offbeat.replicate(build(), offbeat.local_sgd(every=1), mesh=world)
        for step in range(40):
            time.sleep(0.002 * (step % SIZE == world.rank))
            replica.step()
        replica.detach()

    ThreadWorld(SIZE).run(worker)


@either_wire
@pytest.mark.fault(
    "a rank leaves (detach) while the others wait in backward",
    "PeerLost on every other rank; names the rank",
    group="Lost ranks and connections",
)
def test_a_peer_that_leaves_ends_the_wait_in_backward(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.BEAT", 0.1)
    build = seeded(layers)

    def worker(world: World) -> None:
        model = build()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        if world.rank == 1:
            replica.detach()
            return
        with pytest.raises(offbeat.PeerLost, match="rank 1 has left"):
            plain(model, world.rank, 0).backward()
        replica.detach()

    ThreadWorld(SIZE).run(worker)


@either_wire_and_zero
@pytest.mark.fault(
    "a second backward runs before step()", "the sum of both means, equal on all ranks"
)
def test_two_synced_backwards_before_a_step(text: str, set_to_none: bool) -> None:
    """The second exchanges what was added since, so the sum of means results."""
    first, second = Case("", seeded(layers), plain), Case("", seeded(layers), skip_last)

    def worker(world: World) -> Gradients:
        model = first.build()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        for _ in range(3):  # from the second step on, buckets have their final order
            model.zero_grad(set_to_none)
            first.loss(model, world.rank, 0).backward()
            second.loss(model, world.rank, 1).backward()
            result = gradients(model)
            replica.step()
        replica.detach()
        return result

    runs = ThreadWorld(SIZE).run(worker)
    check_sums(runs, local_gradients(first, 0) + local_gradients(second, 1), "bf16" in text)


def skip_last(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    return plain(model[:-1], rank, step)


def check_sums(ours: list[Gradients], parts: list[Gradients], bf16: bool) -> None:
    """Compare with the sum of all parts over the number of ranks."""
    for name, mine in ours[0].items():
        assert mine is not None
        assert all(torch.equal(rank[name], mine) for rank in ours), name
        wide = torch.stack([p[name].double() for p in parts if p[name] is not None])
        # Each of the two exchanges rounds as in check_means, the first one's result again.
        unit = 2 * torch.finfo(torch.bfloat16).eps if bf16 else 8 * torch.finfo(mine.dtype).eps
        allowed = unit * wide.abs().sum(0) / SIZE
        assert ((mine.double() - wide.sum(0) / SIZE).abs() <= allowed).all(), name


@either_wire_and_zero
@pytest.mark.fault(
    "one rank uses a parameter only in its first micro-batch",
    "its gradient is in the mean of all ranks",
)
def test_a_parameter_used_only_in_the_first_micro_batch(text: str, set_to_none: bool) -> None:
    """On rank 0 alone, and not in the backward that exchanges."""
    first, second = Case("", seeded(layers), only_rank_0), Case("", seeded(layers), skip_last)

    def worker(world: World) -> Gradients:
        model = first.build()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        for _ in range(3):
            replica.set_requires_sync(False)
            first.loss(model, world.rank, 0).backward()
            replica.set_requires_sync(True)
            second.loss(model, world.rank, 1).backward()
            result = gradients(model)
            model.zero_grad(set_to_none)
            replica.step()
        replica.detach()
        return result

    runs = ThreadWorld(SIZE).run(worker)
    check_sums(runs, local_gradients(first, 0) + local_gradients(second, 1), "bf16" in text)


def only_rank_0(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    return plain(model if rank == 0 else model[:-1], rank, step)


def test_a_16_bit_mean_is_summed_wide() -> None:
    """256 + 2 + 3 = 261 has no 16-bit form, its third 87 has: only the mean may be rounded."""

    def worker(world: World) -> float:
        model = nn.Linear(1, 1, bias=False)
        replica = offbeat.replicate(model, offbeat.ddp(wire="bf16"), mesh=world)
        (model(torch.ones(1)) * (256.0, 2.0, 3.0)[world.rank]).sum().backward()
        replica.detach()
        return model.weight.grad.item()

    assert ThreadWorld(3).run(worker) == [87.0, 87.0, 87.0]


@pytest.mark.parametrize("text", ["ddp", "lags(density=1.0)", "lags(density=0.2)"])
def test_gradients_of_another_dtype_than_their_parameter(text: str) -> None:
    """As torch allows since 2.10."""
    if not hasattr(nn.Parameter, "grad_dtype"):
        pytest.skip("needs grad_dtype, of torch 2.10")

    def work(world: World) -> tuple[torch.dtype, float]:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32
        model = nn.ParameterList([weight])
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        (weight[0] * (1.0 + world.rank)).backward()
        assert weight.grad is not None
        replica.detach()
        return weight.grad.dtype, weight.grad[0].item()

    assert ThreadWorld(2).run(work) == [(torch.float32, 1.5)] * 2


def test_without_sync_gradients_stay_local() -> None:
    case = Case("", seeded(layers), plain)

    def worker(world: World) -> Gradients:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        replica.set_requires_sync(False)
        case.loss(model, world.rank, 0).backward()
        replica.step()
        replica.detach()
        return gradients(model)

    for ours, own in zip(ThreadWorld(SIZE).run(worker), local_gradients(case, 0), strict=True):
        assert all(torch.equal(ours[name], own[name]) for name in own)


ZERO_AT_THE_TOP, ZERO_AT_THE_END, NONE_AT_THE_END = "zero_grad first", "zeros last", "None last"


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        (ONE_EACH[0], ZERO_AT_THE_TOP),
        (ONE_EACH[1], ZERO_AT_THE_END),
        (ONE_EACH[0], NONE_AT_THE_END),
    ],
)
@pytest.mark.fault(
    "a rank has no batch and calls step() without a backward",
    "a warning; it counts as zero",
)
def test_a_rank_without_a_backward_gives_zeros(text: str, habit: str) -> None:
    """It has no batch in step 2: the others count it as zero, and step 3 is as if nothing was."""

    def worker(world: World) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        seen = []
        for step in range(4):
            if world.rank == 1 and step == 2:
                seen.append(0.0)
                replica.step()
                continue
            if habit == ZERO_AT_THE_TOP:
                model.zero_grad()
            (model(torch.ones(2)) * (world.rank + 1)).sum().backward()
            seen.append(float(model.weight.grad[0, 0]))
            if habit != ZERO_AT_THE_TOP:
                model.zero_grad(set_to_none=habit == NONE_AT_THE_END)
            replica.step()
        replica.detach()
        return seen

    with pytest.warns(RuntimeWarning, match="rank 1: a step\\(\\) without a backward"):
        runs = ThreadWorld(2).run(worker)
    # Whole and half numbers are exact on a 16-bit wire too.
    assert runs == [[1.5, 1.5, 0.5, 1.5], [1.5, 1.5, 0.0, 1.5]]


@either_wire
@pytest.mark.fault(
    "a rank lacks the last micro-batch of a step",
    "a warning; what it has is in the mean",
)
def test_a_rank_that_lacks_only_the_last_micro_batch(text: str) -> None:
    """What it has accumulated counts, and is still there for its own optimizer."""

    def worker(world: World) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        seen = []
        for step in range(4):
            replica.set_requires_sync(False)
            (model(torch.ones(1)) * (world.rank + 1)).sum().backward()
            replica.set_requires_sync(True)
            if not (world.rank == 1 and step == 2):
                (model(torch.ones(1)) * 4).sum().backward()
            seen.append(model.weight.grad.item())
            replica.step()
            model.zero_grad(set_to_none=False)
        replica.detach()
        return seen

    with pytest.warns(RuntimeWarning, match="without a backward"):
        runs = ThreadWorld(2).run(worker)
    assert runs == [[5.5, 5.5, 3.5, 5.5], [5.5, 5.5, 2.0, 5.5]]


def test_nobody_runs_a_backward() -> None:
    def worker(world: World) -> None:
        model = layers()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        replica.step()
        assert all(p.grad is None for p in model.parameters())
        replica.detach()

    with pytest.warns(RuntimeWarning, match="without a backward"):
        ThreadWorld(SIZE).run(worker)


@either_wire
@pytest.mark.fault(
    "a gradient overflows on one rank under GradScaler",
    "all ranks skip the step and lower the scale",
)
def test_an_overflow_on_one_rank_makes_all_scalers_skip(text: str) -> None:
    def worker(world: World) -> tuple[list[float], list[Tensor]]:
        model = seeded_linear()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        scales, weights = [], []
        for step in range(4):
            factor = torch.inf if (world.rank, step) == (1, 1) else 1.0
            scaler.scale(model(batch(world.rank, step)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            replica.step()
            scales.append(scaler.get_scale())
            weights.append(model.weight.detach().clone())
        replica.detach()
        return scales, weights

    first, *others = ThreadWorld(SIZE).run(worker)
    # Halved at the overflow, doubled after two good steps in a row.
    assert first[0] == [4.0, 2.0, 2.0, 4.0]
    assert torch.equal(first[1][0], first[1][1])
    assert not torch.equal(first[1][1], first[1][2])
    for other in others:
        assert other[0] == first[0]
        assert all(torch.equal(a, b) for a, b in zip(other[1], first[1], strict=True))


seeded_linear = seeded(lambda: nn.Linear(4, 2))


@pytest.mark.parametrize(("text", "value"), [(ONE_EACH[0], torch.nan), (ONE_EACH[1], -torch.inf)])
@pytest.mark.fault("a gradient is NaN or infinite on one rank", "the mean is so on all ranks")
def test_a_gradient_that_is_not_finite_arrives_everywhere(text: str, value: float) -> None:
    def worker(world: World) -> Tensor:
        model = nn.Linear(2, 3, bias=False)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        row = torch.tensor([1.0, value if world.rank == 1 else 1.0])
        model(row).sum().backward()
        replica.detach()
        return model.weight.grad

    for grad in ThreadWorld(SIZE).run(worker):
        assert torch.equal(grad[:, 0], torch.ones(3))
        torch.testing.assert_close(grad[:, 1], torch.full((3,), value), equal_nan=True)


def test_clipping_sees_the_mean() -> None:
    """Gradients of 3, 4 and 5 have a mean of norm 4; clipping each first would give 1."""

    def worker(world: World) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        (model(torch.ones(1)) * (3.0 + world.rank)).sum().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 2.0))
        grad = float(model.weight.grad)
        replica.detach()
        return norm, grad

    for norm, grad in ThreadWorld(SIZE).run(worker):
        assert norm == pytest.approx(4.0)
        assert grad == pytest.approx(2.0)


def test_lbfgs_calls_backward_several_times_in_one_step() -> None:
    """Every evaluation is exchanged: the optimizer sees the mean loss's gradient each time."""
    build = seeded(lambda: nn.Linear(4, 1, dtype=torch.float64))

    def minimize(model: nn.Module, ranks: list[int]) -> int:
        optimizer = LBFGS(model.parameters(), max_iter=6, tolerance_change=0.0)
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            parts = [(model(batch(r, 0).double()) - r).square().mean() for r in ranks]
            loss = sum(parts) / len(parts)
            loss.backward()
            # Only gradients are averaged. A constant in place of the loss keeps the number of
            # evaluations, which LBFGS derives from both, equal on all ranks.
            return torch.zeros(())

        optimizer.step(closure)
        return calls

    def worker(world: World) -> tuple[int, Tensor]:
        model = build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        calls = minimize(model, [world.rank])
        replica.step()
        replica.detach()
        return calls, model.weight.detach()

    alone = build()
    expected = minimize(alone, list(range(SIZE)))
    assert expected > 2
    for calls, weight in ThreadWorld(SIZE).run(worker):
        assert calls == expected
        # Six steps of a quasi-Newton method amplify the roundings of float64 sums.
        torch.testing.assert_close(weight, alone.weight.detach(), rtol=1e-9, atol=1e-9)


def test_two_replicas_of_two_models_share_a_backward() -> None:
    """As a generator and a critic do, with different algorithms and one optimizer each."""
    build = seeded(lambda: layers(2))

    def worker(world: World) -> list[Gradients]:
        one, two = build(), build()
        replicas = [
            offbeat.replicate(one, offbeat.ddp(), mesh=world),
            offbeat.replicate(two, offbeat.ddp(wire="bf16"), mesh=world),
        ]
        for _ in range(3):
            (plain(one, world.rank, 0) + plain(two, world.rank, 0)).backward()
            seen = [gradients(one), gradients(two)]
            one.zero_grad()
            two.zero_grad()
            for replica in replicas:
                replica.step()
        replicas[0].detach()
        plain(two, world.rank, 0).backward()  # the other goes on
        seen.append(gradients(two))
        replicas[1].detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    parts = local_gradients(Case("", build, plain), 0)
    for index, bf16 in enumerate([False, True, True]):
        check_means([run[index] for run in runs], parts, bf16, set())


@either_zero
@pytest.mark.fault("an optimizer or clipping overwrites .grad", "the next mean is exact")
def test_what_an_optimizer_does_to_grad_in_place_does_not_come_back(set_to_none: bool) -> None:
    """Scaling, clipping and decay write into ``.grad``, which is a view of a bucket."""
    case = Case("", seeded(layers), sometimes)

    def worker(world: World) -> list[Gradients]:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        seen = []
        for step in range(6):
            case.loss(model, world.rank, step).backward()
            seen.append(gradients(model))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(-1e6).add_(7.0)
            model.zero_grad(set_to_none)
            replica.step()
        replica.detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    for step in range(6):
        used = set() if set_to_none else names_used(case, range(step))
        check_means([run[step] for run in runs], local_gradients(case, step), False, used)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="dynamo fails in several threads")
# torch's own: dynamo looks at .grad of a compiled block's input (2.13).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("backend", "whole", "passed"),
    [
        ("aot_eager", False, False),
        ("aot_eager", True, False),
        ("eager", True, False),
        ("aot_eager", True, True),
        ("offbeat", True, False),
    ],
    ids=["each block", "whole model", "whole, eager", "whole, passed to replicate", "in buckets"],
)
def test_compiled_models(
    backend: str, whole: bool, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("", seeded(lambda: nn.Sequential(*layers())), through)
    in_parts_by_aot_eager(monkeypatch)

    def worker(world: World) -> list[Gradients]:
        model = case.build()
        parts = [torch.compile(layer, backend=backend) for layer in model]
        compiled = torch.compile(model, backend=backend) if whole else nn.Sequential(*parts)
        given = compiled if passed else model
        replica = offbeat.replicate(given, offbeat.ddp(bucket_mb=1e-5), mesh=world)
        seen = []
        for step in range(3):
            case.loss(compiled, world.rank, step).backward()
            seen.append(gradients(model))
            model.zero_grad()
            replica.step()
        replica.detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    for step in range(3):
        check_means([run[step] for run in runs], local_gradients(case, step), False, set())


def test_a_compiled_model_hands_out_gradients_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts_by_aot_eager(monkeypatch)
    model, parts = nn.Sequential(*layers(6)), dict[str, int]()
    for backend in ("aot_eager", "offbeat"):
        output = torch.compile(model, backend=backend)(batch(0, 0)).sum()  # keeps the graph
        nodes = [output.grad_fn]
        parts[backend] = 0
        while nodes:
            node = nodes.pop()
            parts[backend] += "CompiledFunction" in type(node).__name__
            nodes += [before for before, _ in node.next_functions if before is not None]
    assert parts["aot_eager"] == 1 < parts["offbeat"]


def through(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().sum()


@pytest.mark.fault("gradients are ready in another order", "the exact mean, equal on all ranks")
def test_a_random_order_on_every_rank_with_pauses(draws: random.Random) -> None:
    """Buckets leave in one order although gradients come in another, at another pace."""
    late = partial(late_branches, seed=draws.randrange(1000))
    case = Case("", seeded(partial(layers, 6)), late)

    def worker(world: World) -> list[Gradients]:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.ddp(bucket_mb=1e-5), mesh=world)
        seen = []
        for step in range(4):
            case.loss(model, world.rank, step).backward()
            seen.append(gradients(model))
            model.zero_grad()
            replica.step()
        replica.detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    for step in range(4):
        check_means([run[step] for run in runs], local_gradients(case, step), False, set())


def late_branches(model: nn.ModuleList, rank: int, step: int, seed: int) -> Tensor:
    pauses = random.Random(f"{seed} {rank} {step}")
    order = pauses.sample(range(len(model)), len(model))
    total = batch(rank, step).sum() * 0
    for index in order:
        out = Late.apply(model[index](batch(rank, step)), pauses.choice([0.0, 0.0, 0.005]))
        total = total + out.square().sum()
    return total


def test_buckets_are_cut_as_asked_and_in_the_order_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # with the first bucket's real size
    case = Case("", seeded(partial(layers, 4)), plain)

    def worker(world: World) -> list[list[str]]:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.ddp(bucket_mb=1e-5), mesh=world)
        case.loss(model, world.rank, 0).backward()
        sent = replica.stats()["total"]["messages"]
        model.zero_grad()
        case.loss(model, world.rank, 0).backward()
        assert replica.stats()["total"]["messages"] - sent == 8
        buckets = [list(bucket.views) for bucket in replica.gradients.messages]
        replica.detach()
        return buckets

    runs = ThreadWorld(SIZE).run(worker)
    assert all(run == runs[0] for run in runs)
    assert all(len(bucket) == 1 for bucket in runs[0]), "a bucket holds at most bucket_mb"
    names = [name for bucket in runs[0] for name in bucket]
    assert sorted(names) == sorted(f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias"))
    places = [int(name[0]) for name in names]
    assert all(a >= b for a, b in pairwise(places)), "the last layer's gradients come first"


def test_nested_backwards_are_exchanged_once() -> None:
    """A reentrant block's own backward ends first, and must not send what is not complete."""
    build = seeded(partial(layers, 4))

    def worker(world: World) -> float:
        model = build()
        replica = offbeat.replicate(model, offbeat.ddp(bucket_mb=1e-5), mesh=world)
        for step in range(3):
            sent = replica.stats()["total"]["messages"]
            checkpointed(model, world.rank, step, reentrant=True).backward()
            replica.step()
            model.zero_grad()
        sent = replica.stats()["total"]["messages"] - sent
        replica.detach()
        return sent

    assert ThreadWorld(SIZE).run(worker) == [8] * SIZE  # four layers of two parameters


@pytest.mark.fault(
    "a backward raises and is run again", "the exact mean, or ValueError on all ranks"
)
def test_a_backward_that_fails_can_be_tried_again() -> None:
    """As after running out of memory: it is right, or an error that says what happened."""
    case = Case("", seeded(layers), plain)

    def worker(world: World) -> Gradients | str:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(MemoryError):
            case.loss(model, world.rank, 0).backward()
        handle.remove()
        model.zero_grad()
        try:
            case.loss(model, world.rank, 0).backward()
        except ValueError as error:
            return str(error)
        seen = gradients(model)
        replica.step()
        replica.detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    if isinstance(runs[0], str):
        assert len(set(map(str, runs))) == 1
        assert "reentrant" not in runs[0]
    else:
        check_means(runs, local_gradients(case, 0), False, set())


def fail(grad: Tensor) -> Tensor:
    raise MemoryError("no memory in the middle of backward")


# torch's own, at every backward with create_graph.
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.fault(
    "a backward keeps its graph (create_graph=True)",
    "the exact mean, or ValueError on all ranks",
)
def test_create_graph_is_averaged_or_refused_alike() -> None:
    """Second-order optimizers call ``backward(create_graph=True)``."""
    case = Case("", seeded(layers), plain)

    def worker(world: World) -> Gradients | str:
        model = case.build()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        try:
            case.loss(model, world.rank, 0).backward(create_graph=True)
        except ValueError as error:
            return str(error)
        seen = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
        model.zero_grad()
        replica.step()
        replica.detach()
        return seen

    runs = ThreadWorld(SIZE).run(worker)
    if isinstance(runs[0], str):
        assert len(set(map(str, runs))) == 1
    else:
        check_means(runs, local_gradients(case, 0), False, set())


@pytest.mark.parametrize("source", ["autograd.grad", "torch.func"])
@pytest.mark.fault(
    "gradients come from torch.autograd.grad or torch.func",
    "RuntimeWarning; each rank keeps its own gradient",
)
def test_gradients_that_no_backward_accumulated(source: str) -> None:
    """They run no hook: such a step counts as one without a backward."""

    def worker(world: World) -> tuple[float, list[str]]:
        model = nn.Linear(1, 1, bias=False)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        if source == "autograd.grad":
            (grad,) = torch.autograd.grad(model(torch.ones(1)).sum(), model.parameters())
        else:
            call = partial(torch.func.functional_call, model, args=(torch.ones(1),))
            grads = torch.func.grad(lambda weights: call(weights).sum())
            grad = grads(dict(model.named_parameters()))["weight"]
        model.weight.grad = grad.detach() * (world.rank + 1)
        SGD(model.parameters(), lr=0.1).step()
        replica.step()
        notes: list[str] = replica.stats()["notes"]
        replica.detach()
        return float(model.weight.grad), notes

    with pytest.warns(RuntimeWarning, match="torch.autograd.grad"):
        done = ThreadWorld(SIZE).run(worker)
    assert [grad for grad, _ in done] == [1.0, 2.0, 3.0]
    assert all("although an optimizer stepped" in notes[-1] for _, notes in done)


@pytest.mark.parametrize(
    ("text", "when", "clear"),
    [
        ("ddp", "before replicate", True),
        ("lags(density=0.5)", "after replicate", True),
        ("lags(density=0.5)", "before replicate", False),
        ("ddp(bucket_mb=1e-5)", "after replicate", False),
    ],
)
@pytest.mark.fault(
    "an optimizer steps in hooks of backward",
    "ValueError on all ranks; names the parameter",
)
def test_an_optimizer_that_steps_inside_backward(text: str, when: str, clear: bool) -> None:
    def worker(world: World) -> str:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            if clear:
                optimizers[parameter].zero_grad()

        def register() -> None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)

        if when == "before replicate":
            register()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        if when == "after replicate":
            register()
        try:
            model(torch.ones(2)).sum().backward()
            replica.step()
        except ValueError as error:
            return str(error)
        return "trained"

    (said,) = set(ThreadWorld(2).run(worker))
    assert "used, or cleared, inside of backward" in said


def test_a_hook_that_clears_gradients_by_hand() -> None:
    """No optimizer tells of it; the gradient is missing."""

    def worker(world: World) -> str:
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        with pytest.raises(ValueError, match="used, or cleared, inside of backward") as said:
            model(torch.ones(2)).sum().backward()
        replica.detach()
        return str(said.value)

    assert len(set(ThreadWorld(2).run(worker))) == 1


@either_wire
def test_training_with_adam_follows_one_process_with_the_whole_batch(text: str) -> None:
    """All of it together: ten steps, in-place optimizer, accumulation, set_to_none."""
    build = seeded(lambda: layers(3).double())

    def loss(model: nn.ModuleList, rank: int, step: int) -> Tensor:
        x = batch(rank, step).double()
        for layer in model:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def worker(world: World) -> Tensor:
        model = build()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = Adam(model.parameters(), lr=0.01)
        for step in range(10):
            for part in range(2):
                replica.set_requires_sync(part == 1)
                loss(model, world.rank, 2 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.detach()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    alone = build()
    optimizer = Adam(alone.parameters(), lr=0.01)
    for step in range(10):
        for part in range(2):
            (sum(loss(alone, r, 2 * step + part) for r in range(SIZE)) / SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = nn.utils.parameters_to_vector(alone.parameters()).detach()
    # Adam's steps are of size lr whatever the gradient's; a gradient that is wrong by 2^-8 turns
    # at most a few of ten steps around.
    tolerance = 5e-3 if "bf16" in text else 1e-9
    for ours in ThreadWorld(SIZE).run(worker):
        torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("last_syncs", [True, False])
@either_wire
@pytest.mark.fault(
    "an optimizer steps after set_requires_sync(False) alone",
    "RuntimeWarning and note in stats()",
)
def test_an_optimizer_that_uses_gradients_which_were_not_exchanged(
    text: str, last_syncs: bool
) -> None:
    def worker(world: World) -> list[str]:
        model = nn.Linear(2, 1)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for requires_sync in (False, True) if last_syncs or step == 0 else (True, False):
                replica.set_requires_sync(requires_sync)
                (model(torch.ones(2)) * (world.rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        return replica.stats()["notes"]

    if last_syncs:
        assert ThreadWorld(2).run(worker) == [[], []]
        return
    with pytest.warns(RuntimeWarning, match="were not exchanged"):
        notes = ThreadWorld(2).run(worker)
    assert all("set_requires_sync(True)" in note for (note,) in notes)
