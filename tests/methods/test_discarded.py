"""Gradients that the script discards: they train nothing, whatever an exchange remembers."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_compressed import INT8, LAYERWISE
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

State = list[Tensor]


def network(seed: int = 0) -> nn.Module:
    """The same at each call, from any thread: threads share torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return net


def batch(rank: int, count: int) -> Tensor:
    """Another batch on every rank at every backward."""
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1000 * rank + count))


def state_of(model: nn.Module, replica: offbeat.Replica) -> State:
    """Parameters, residuals and velocities."""
    saved = replica.gradients.save()
    kept = [*saved["residual"].values(), *saved.get("velocity", {}).values()]
    return [p.detach().clone() for p in model.parameters()] + kept


def by_hand(parameters: Any) -> Any:
    """Steps without an optimizer of torch: ``step`` changes parameters in place."""

    class ByHand:
        def __init__(self) -> None:
            self.parameters = list(parameters)

        def step(self) -> None:
            with torch.no_grad():
                for p in self.parameters:
                    p -= 0.05 * p.grad

    return ByHand()


class Loop:
    """A training loop, written as letters.

    B is a backward whose gradient will be discarded and b one that will be used, z clears all
    gradients, c clips them, p perturbs parameters and P takes that back, o is an optimizer's step,
    s is the replica's and f its ``finish()``.
    With ``hidden``, no B is exchanged.
    """

    def __init__(
        self,
        world: World,
        algorithm: offbeat.Algorithm,
        *,
        given: bool = False,
        hidden: bool = False,
        set_to_none: bool = True,
        dtype: torch.dtype = torch.float32,
        make: Callable[[Any], Any] = lambda parameters: SGD(parameters, lr=0.05),
    ) -> None:
        self.model, self.hidden, self.set_to_none = network().to(dtype), hidden, set_to_none
        self.optimizer = make(self.model.parameters())
        self.replica = offbeat.replicate(
            self.model, algorithm, mesh=world, optimizer=self.optimizer if given else None
        )
        self.rank, self.count = world.rank, 0

    def run(self, letters: str) -> State:
        for letter in letters:
            if letter in "Bb":
                if self.hidden:
                    self.replica.set_requires_sync(letter == "b")
                weight = -5.0 if letter == "B" else 1.0
                self.count += 1
                x = batch(self.rank, self.count).to(next(self.model.parameters()).dtype)
                (weight * self.model(x).square().mean()).backward()
            elif letter == "z":
                self.model.zero_grad(set_to_none=self.set_to_none)
            elif letter == "c":
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            elif letter in "pP":
                with torch.no_grad():
                    for p in self.model.parameters():
                        p += 0.01 if letter == "p" else -0.01
            elif letter == "f":
                self.replica.finish()
            else:
                {"o": self.optimizer, "s": self.replica}[letter].step()
        return state_of(self.model, self.replica)


def both(
    letters: str, algorithm: offbeat.Algorithm, size: int = 2, **settings: Any
) -> tuple[list[State], list[State]]:
    """The states of all ranks with the discarded backwards exchanged, and hidden."""

    def worker(world: World, hidden: bool) -> State:
        loop = Loop(world, algorithm, hidden=hidden, **settings)
        state = loop.run(letters + "zbozs")  # what becomes of the last gradient is known then
        loop.replica.detach()
        return state

    world = ThreadWorld(size)
    exchanged, hidden = (world.run(partial(worker, hidden=hidden)) for hidden in (False, True))
    return exchanged, hidden


def require_equal(runs: tuple[list[State], list[State]]) -> None:
    for ours, theirs in zip(*runs, strict=True):
        assert all(map(torch.equal, ours, theirs))


FIRST = "Bzsbozs"  # before anything has been used
ORDERS = (
    "Bzbozs",  # before the step
    "bozBzs",  # between the optimizer and step()
    "bozsBz",  # after the step
    "BzBzBzbozsBz",  # several in a row
    "BBzbbozs",  # accumulated
    "Bczbcozs",  # clipped
    "bozsBzs",  # instead of a step
    "zbozsBs",  # cleared after the step
)
ALGORITHMS = {
    "lags(0.05)": {"given": True},
    "lags(0.05, units='gradient')": {},
    "lags(0.05, momentum=0.9)": {"given": True, "set_to_none": False},
    "lags(0.05, momentum=0.9, masking=True, wire='bf16')": {"given": True},
    "lags(1.0, momentum=0.9)": {"given": True},
    "lags(0.05, message_mb=1e-5)": {"given": True, "set_to_none": False},
    "slgs(0.05)": {"given": True},
}


@pytest.mark.parametrize("text", ALGORITHMS)
@pytest.mark.fault("a script discards a gradient (GAN)", "residuals as before that backward")
def test_trains_as_if_the_discarded_backward_had_not_been_exchanged(text: str) -> None:
    # In units of gradients nothing has been used yet at first: step() then says that it was.
    letters = FIRST * ("units" not in text) + "".join(3 * order for order in ORDERS)
    runs = both(letters, offbeat.algorithm(text), **ALGORITHMS[text])
    require_equal(runs)
    if "1.0" not in text:
        assert any(kept.any() for kept in runs[0][0][4:]), "nothing was kept: nothing is proved"


def test_a_perturbation_before_the_first_step_is_no_use() -> None:
    """As sharpness-aware minimization (SAM) makes it."""
    require_equal(both("BpzbPozs", offbeat.lags(0.05), given=True))


@pytest.mark.parametrize("algorithm", [INT8, LAYERWISE], ids=["whole", "layers"])
def test_the_same_for_a_compressor(algorithm: offbeat.Algorithm) -> None:
    require_equal(both("".join(4 * order for order in ORDERS), algorithm))


def test_a_warm_up_counts_steps_and_not_discarded_backwards() -> None:
    require_equal(both(8 * "BzbozsBz", offbeat.lags(0.02, warmup=6), given=True))


@pytest.mark.parametrize(
    "make",
    [by_hand, lambda parameters: SGD(parameters, lr=0.05, fused=True)],
    ids=["hand", "fused"],
)
def test_any_way_to_step_counts_as_use(make: Any) -> None:
    """Fused optimizers leave no sign in a tensor's version, loops by hand call no hook."""
    letters = "".join(4 * order for order in ("Bzbozs", "bozBzs", "bozsBz", "bozsBzs"))
    require_equal(both(letters, offbeat.lags(0.05), make=make))


def test_a_loop_that_writes_through_data_keeps_its_residuals() -> None:
    """It leaves no sign at all: only ``step()`` says that gradients were used."""

    class ThroughData:
        def __init__(self, parameters: Any) -> None:
            self.parameters = list(parameters)

        def step(self) -> None:
            for p in self.parameters:
                p.data -= 0.05 * p.grad

    def worker(world: World, make: Any) -> State:
        return Loop(world, offbeat.lags(0.05), make=make).run(4 * "bozs")

    world = ThreadWorld(2)
    hidden, seen = (world.run(partial(worker, make=make)) for make in (ThroughData, by_hand))
    require_equal((hidden, seen))
    assert all(any(kept.any() for kept in state[4:]) for state in hidden)


def test_a_residual_that_a_dense_message_takes_over_comes_back() -> None:
    """Density 1 after a sparse run: what was left is sent with the first gradient."""

    def worker(world: World, hidden: bool) -> tuple[State, bool]:
        loop = Loop(world, offbeat.lags(1.0), given=True, hidden=hidden)
        saved = loop.replica.gradients.save()
        for kept in saved["residual"].values():
            kept.fill_(0.01 * (1 + world.rank))
        loop.replica.gradients.load(saved)
        loop.run("Bz")
        left = any(kept.any() for kept in loop.run("")[4:])
        return loop.run("bozs" + "Bzbozs"), left

    world = ThreadWorld(2)
    ours, theirs = (world.run(partial(worker, hidden=hidden)) for hidden in (False, True))
    require_equal(([state for state, _ in ours], [state for state, _ in theirs]))
    assert not any(kept.any() for kept in ours[0][0][4:]), "all was sent in the end"
    assert not ours[0][1], "with the discarded backward, too"
    assert theirs[0][1], "the residuals were there"


@pytest.mark.parametrize("text", ["lags(0.05, momentum=0.9)", "slgs(0.05)"])
def test_one_rank_alone_may_discard(text: str) -> None:
    """Its own residual goes back; what the others have used stays used."""

    def worker(world: World) -> tuple[State, State]:
        loop = Loop(world, offbeat.algorithm(text), given=True)
        before = loop.run("bozs")
        after = loop.run("bzs" if world.rank == 0 else "bozs")
        loop.replica.detach()
        return before[4:], after[4:]

    kept, moved = ThreadWorld(2).run(worker)
    assert all(map(torch.equal, *kept))
    assert not all(map(torch.equal, *moved))


@pytest.mark.parametrize("letters", ["zbozsBs", "bozsBzs", "bozsBzf"])
def test_a_save_after_a_discarded_gradient_continues_bit_for_bit(letters: str) -> None:
    """Also where it is still in .grad at that time, and cleared when the next batch begins."""

    def worker(world: World, letters: str) -> None:
        def start() -> Loop:
            return Loop(world, offbeat.lags(0.05, momentum=0.9), given=True)

        loop = start()
        loop.run(letters)
        parts = loop.model, loop.optimizer, loop.replica
        saved = [{**part.state_dict()} for part in parts]
        saved[0] = {name: tensor.clone() for name, tensor in saved[0].items()}
        count = loop.count
        expected = loop.run("zbozsbozs")
        loop.replica.detach()
        again = start()
        for part, state in zip((again.model, again.optimizer, again.replica), saved, strict=True):
            part.load_state_dict(state)
        again.count = count
        assert all(map(torch.equal, again.run("zbozsbozs"), expected))
        again.replica.detach()

    ThreadWorld(2).run(partial(worker, letters=letters))


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        ("bb", "lags(0.05)"),
        ("bnb", "lags(0.05)"),
        ("bnsb", "lags(0.05)"),
        ("nb", "lags(0.05)"),
        ("bsbsnb", "lags(0.05)"),
        ("bsbsnb", "slgs(0.05)"),
    ],
)
def test_a_gradient_that_stays_in_grad_loses_nothing(letters: str, text: str) -> None:
    """What is in ``.grad`` and what is left add up to all gradients; n is not exchanged."""

    def worker(world: World) -> State:
        loop = Loop(world, offbeat.algorithm(text), dtype=torch.float64)
        replica = loop.replica
        before = [kept.clone() for kept in loop.run("bozs")[4:]]
        bare = copy.deepcopy(loop.model)
        for letter in letters:
            if letter == "s":
                replica.step()
                continue
            replica.set_requires_sync(letter == "b")
            loop.count += 1
            for net in (loop.model, bare):
                net(batch(world.rank, loop.count).double()).square().mean().backward()
        after = loop.run("")[4:]
        replica.detach()
        ours, theirs = ([p.grad for p in net.parameters()] for net in (loop.model, bare))
        return [g + a - b - t for g, a, b, t in zip(ours, after, before, theirs, strict=True)]

    for parts in zip(*ThreadWorld(2).run(worker), strict=True):
        torch.testing.assert_close(sum(parts), torch.zeros_like(parts[0]))


@pytest.mark.filterwarnings("ignore:rank 1. a step.. without a backward")
def test_a_rank_without_a_backward_does_not_send_its_residual_twice() -> None:
    """It misses the others' update, and they have used what it sent."""

    def worker(world: World) -> tuple[State, State]:
        loop = Loop(world, offbeat.lags(0.05), given=True)
        before = loop.run("bozs")
        after = loop.run("s" if world.rank == 1 else "bozs")
        loop.replica.detach()
        return before[4:], after[4:]

    for before, after in zip(*ThreadWorld(2).run(worker)[1], strict=True):
        sent = before != after
        assert sent.any()
        assert not after[sent].any()


class Gan(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = network(1), network(2)

    def errors(self, rank: int, count: int) -> tuple[Tensor, Callable[[], Tensor]]:
        fake = self.g(batch(rank, count)).repeat(1, 2)
        real = batch(rank, 500 + count) + 1.0
        d = self.d(fake.detach()).exp().mean() + (-self.d(real)).exp().mean()
        return d, lambda: (-self.d(fake)).exp().mean()


@pytest.mark.parametrize(
    ("given", "clear", "momentum"),
    [(True, "first", 0.9), (True, "last", 0.0), (False, "first", 0.0)],
    ids=["zero_grad first", "zero_grad last", "not given"],
)
def test_one_replica_of_a_gan_with_two_optimizers(given: bool, clear: str, momentum: float) -> None:
    """errG.backward() runs through the discriminator; with ``inputs`` it leaves that alone."""

    def worker(world: World, through: bool) -> State:
        gan = Gan()
        make = partial(Adam, lr=0.01) if not given else partial(SGD, lr=0.05)
        d, g = make(gan.d.parameters()), make(list(gan.g.parameters()))
        optimizers: list[Optimizer] = [d, g] if given else []
        algorithm = offbeat.lags(0.05, momentum=momentum)
        replica = offbeat.replicate(gan, algorithm, mesh=world, optimizer=optimizers)
        for count in range(6):
            if clear == "first":
                gan.d.zero_grad()
            error, generated = gan.errors(world.rank, count)
            error.backward()
            d.step()
            if clear == "last":
                gan.d.zero_grad()
            g.zero_grad()
            generated().backward(inputs=None if through else list(gan.g.parameters()))
            g.step()
            if clear == "last":
                gan.d.zero_grad()
            replica.step()
        state = state_of(gan, replica)
        replica.detach()
        return state

    world = ThreadWorld(2)
    ours, theirs = (world.run(partial(worker, through=through)) for through in (True, False))
    require_equal((ours, theirs))


def test_a_replica_for_each_network_of_a_gan() -> None:
    """As torch's DCGAN example is written; equal to ``set_requires_sync(False)``."""

    def worker(world: World, hidden: bool) -> State:
        gan = Gan()
        nets = gan.d, gan.g
        optimizers = [Adam(net.parameters(), lr=0.01) for net in nets]
        replicas = [offbeat.replicate(net, offbeat.lags(0.05), mesh=world) for net in nets]
        for count in range(8):
            gan.d.zero_grad()
            error, generated = gan.errors(world.rank, count)
            error.backward()
            optimizers[0].step()
            replicas[0].step()
            gan.g.zero_grad()
            replicas[0].set_requires_sync(not hidden)
            generated().backward()
            replicas[0].set_requires_sync(True)
            optimizers[1].step()
            replicas[1].step()
        gan.d.zero_grad()
        gan.errors(world.rank, 8)[0].backward()
        optimizers[0].step()
        replicas[0].step()
        state = [t for net, r in zip(nets, replicas, strict=True) for t in state_of(net, r)]
        for replica in replicas:
            replica.detach()
        return state

    world = ThreadWorld(2)
    ours, theirs = (world.run(partial(worker, hidden=hidden)) for hidden in (False, True))
    require_equal((ours, theirs))


def test_an_evaluation_between_a_discarded_backward_and_the_next_is_no_use() -> None:
    """consensus(), finish() and averages that are swapped in write the parameters, too."""

    def worker(world: World, hidden: bool) -> State:
        loop = Loop(world, offbeat.lags(0.05), given=True, hidden=hidden)
        for _ in range(3):
            loop.run("bozsBz")
            with loop.replica.consensus():
                pass
            with torch.no_grad():
                for p in loop.model.parameters():
                    p.copy_(p.clone())
            loop.replica.finish()
        state = loop.run("bozs")
        loop.replica.detach()
        return state

    world = ThreadWorld(2)
    ours, theirs = (world.run(partial(worker, hidden=hidden)) for hidden in (False, True))
    require_equal((ours, theirs))
