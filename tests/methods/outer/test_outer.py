"""Outer optimizers: what they equal bit for bit, resumption in mid-flight, errors on all ranks."""

import copy
import io
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import offbeat
from offbeat.functional import Segment, blend, divide_layers, pseudo_gradient
from offbeat.functional.messages.narrowing import Narrow
from offbeat.methods import OuterStep, Sparse
from offbeat.methods.outer.narrow_mean import NarrowMean
from offbeat.methods.outer.optimizer import ELEMENTWISE
from offbeat.methods.outer.sparse_mean import SparseMean
from offbeat.testing import ThreadWorld, simulate
from offbeat.transport.links import Links
from offbeat.transport.world import World
from problems import Quadratic, flat, loss
from reference.participants import Array, Nodes

TWO_BY_TWO: Nodes = ((0, 1), (2, 3))
UNEQUAL: Nodes = ((0, 1, 2), (3, 4), (5, 6))  # rank 2 only receives


def run(text: str | offbeat.Algorithm, nodes: Nodes = ((0,), (1,), (2,)), steps: int = 12) -> Array:
    """The float32 parameters of every rank after every step."""
    runs = simulate(
        offbeat.algorithm(text),
        lambda: Quadratic(torch.float32),
        loss,
        steps=steps,
        nodes=nodes,
        optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    )
    return np.array([[flat(s) for s in run] for run in runs])


# ---- the equations ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_step_of_one_gives_the_mean_bit_for_bit(dtype: torch.dtype) -> None:
    """Whatever the ratio of the anchor to the mean: also where the difference rounds."""
    anchor = torch.randn(70_000, dtype=dtype) * 10 ** (4 * torch.randn(70_000, dtype=dtype))
    mean = torch.randn(70_000, dtype=dtype) * 10 ** (4 * torch.randn(70_000, dtype=dtype))
    expected = mean.clone()
    assert not torch.equal(anchor - (anchor - mean), mean)
    stepped = nn.Parameter(anchor.clone())
    stepped.grad = torch.empty_like(anchor)
    pseudo_gradient(anchor, mean, stepped.grad)
    SGD([stepped], lr=1.0).step()
    assert torch.equal(stepped + mean, expected)


def test_blends_are_exact_at_both_ends() -> None:
    anchor, own = torch.randn(2, 1000) * 10 ** torch.randn(2, 1000)
    for mixing, expected in ((0.0, anchor), (1.0, own)):
        blend(anchor, x := own.clone(), mixing)
        assert torch.equal(x, expected)
    blend(anchor, x := torch.full_like(own, torch.inf), 0.0)
    assert torch.equal(x, anchor), "what is discarded may be anything"


def test_layers_of_one_size_are_dealt_out_in_turn() -> None:
    sizes = {f"blocks.{block}.{name}": 8 for block in range(6) for name in ("w", "b")}
    first, second = divide_layers(sizes, 2)
    assert first == [f"blocks.{block}.{name}" for block in (0, 2, 4) for name in ("w", "b")]
    assert sorted((*first, *second)) == sorted(sizes)


# ---- what equals what ---------------------------------------------------------------------------


def test_diloco_without_momentum_at_a_rate_of_one_is_local_sgd() -> None:
    nodes: Nodes = ((0,), (1,), (2,))
    text = "diloco(every={}, lr=1, momentum=0, nesterov=False)"
    for every in (1, 3):
        ours, theirs = run(text.format(every), nodes), run(f"local_sgd(every={every})", nodes)
        np.testing.assert_array_equal(ours, theirs)


def test_so_it_is_between_nodes() -> None:
    ours = run("diloco(every=2, lr=1, momentum=0, nesterov=False, within='local')", UNEQUAL)
    np.testing.assert_array_equal(ours, run("local_sgd(every=2, within='local')", UNEQUAL))


def test_streaming_without_fragments_delay_and_mixing_is_diloco() -> None:
    streaming = run("diloco(every=3, fragments=1, delay=0, mixing=0.0)")
    np.testing.assert_array_equal(streaming, run("diloco(every=3)"))
    named = run("local_sgd(every=3, outer='SGD(lr=0.7, momentum=0.9, nesterov=True)')")
    np.testing.assert_array_equal(streaming, named)


def test_fragments_take_turns() -> None:
    whole = run("diloco(every=4)", steps=9)
    parts = run("diloco(every=4, fragments=2)", steps=9)
    # `matrix` has the first turn, as in the whole model; `vector` has one of its own.
    np.testing.assert_array_equal(parts[:, :3, :6], whole[:, :3, :6])
    assert np.ptp(parts[:, 2, 6:], axis=0).max() == 0 < np.ptp(whole[:, 2, 6:], axis=0).max()
    assert np.ptp(parts[:, 4, :6], axis=0).max() == 0 < np.ptp(parts[:, 4, 6:], axis=0).max()


RANKS_AND_NODES = [pytest.param(((0,), (1,)), id="ranks"), pytest.param(UNEQUAL, id="nodes")]


WIRES: dict[str, Narrow | Sparse] = {"Adam": "int8", "AdamW": Sparse(density=0.4)}


@pytest.mark.parametrize(
    ("name", "over"),
    [*((name, "world") for name in ELEMENTWISE), *((name, "node") for name in ("SGD", *WIRES))],
)
def test_every_optimizer_resumes_in_mid_flight_and_shows_its_preview(
    name: str, over: Literal["world", "node"]
) -> None:
    """Nodes have nothing to do with the optimizer: for one without a wire, and each with one."""
    nodes: Nodes = UNEQUAL if over == "node" else ((0,), (1,))
    outer = f"{name}(lr=0.05)" if name not in ("SGD",) else "SGD(lr=0.7, momentum=0.9)"
    algorithm = offbeat.Algorithm(
        offbeat.local_sgd(within="local").gradients if over == "node" else None,
        OuterStep(every=3, outer=outer, fragments=2, delay=2, wire=WIRES.get(name), over=over),
    )

    def worker(world: World) -> None:
        model = Quadratic(torch.float32)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = Adam(model.parameters(), lr=0.1)
        train(model, replica, optimizer, range(7))
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (replica, model, optimizer)], file)
        train(model, replica, optimizer, range(7, 14))
        replica.consensus_distance()  # nobody leaves while others wait in their last step
        replica.detach()
        file.seek(0)
        saved, weights, moments = torch.load(file, weights_only=True)
        again = Quadratic(torch.float32)
        again.load_state_dict(weights)
        resumed = offbeat.replicate(again, algorithm, mesh=world)
        resumed.load_state_dict(saved)
        optimizer = Adam(again.parameters(), lr=0.1)
        optimizer.load_state_dict(moments)
        with resumed.consensus():  # a preview of the outer step must not change its state
            pass
        train(again, resumed, optimizer, range(7, 14))
        resumed.consensus_distance()
        resumed.detach()
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    ThreadWorld(nodes=nodes).run(worker)


def test_finish_counts_what_is_in_flight_and_starts_anew() -> None:
    """The mean in flight is stepped and blended; then anchor = parameters, no momentum."""
    text = "diloco(every=2, delay=2, lr=0.5, momentum=0.9, mixing=0.25)"

    def worker(world: World) -> list[Array]:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        seen = [values(model)]
        for k in range(3):
            train(model, replica, optimizer, range(k, k + 1))
            seen.append(values(model))
        replica.finish()
        seen.append(values(model))
        with torch.no_grad():
            model.matrix += world.rank
        replica.step()  # the fourth: the mean is sent
        replica.step()
        replica.step()  # and merged
        seen.append(values(model))
        return seen

    runs = np.array(ThreadWorld(nodes=((0,), (1,))).run(worker))
    start, _, sent, own, finished, after = runs.swapaxes(0, 1)
    # Nesterov's first step is lr (1 + momentum) of the pseudo-gradient.
    anchor = start[0] - 0.5 * 1.9 * (start[0] - sent.mean(0))
    expected = (0.25 * own + 0.75 * anchor).mean(0)
    np.testing.assert_allclose(finished, [expected, expected], rtol=0, atol=1e-14)
    moved = expected + np.array([[0.0] * 9, [1.0] * 6 + [0.0] * 3])
    anchor = expected - 0.5 * 1.9 * (expected - moved.mean(0))
    np.testing.assert_allclose(after, 0.25 * moved + 0.75 * anchor, rtol=0, atol=1e-14)


def test_after_finish_a_run_goes_on_as_a_new_one() -> None:
    """Neither momentum nor a mean in flight is left: averages of another moment."""
    algorithm = offbeat.diloco(every=2, delay=1)

    def worker(world: World, anew: bool) -> Array:
        model = Quadratic()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, replica, optimizer, range(6))
        replica.finish()
        if anew:
            replica.detach()
            replica = offbeat.replicate(model, algorithm, mesh=world)
        train(model, replica, optimizer, range(6))
        return values(model)

    world = ThreadWorld(size=2)
    expected = world.run(lambda world: worker(world, anew=True))
    np.testing.assert_array_equal(world.run(lambda world: worker(world, anew=False)), expected)


def test_16_bit_parameters_carry_what_rounding_takes() -> None:
    """Outer steps of an eighth of the spacing of bfloat16 add up."""

    def worker(world: World) -> float:
        model = Quadratic(torch.bfloat16)
        with torch.no_grad():
            model.vector.fill_(1.0)
        outer = OuterStep(every=1, outer="SGD(lr=0.5)")
        replica = offbeat.replicate(model, offbeat.Algorithm(None, outer), mesh=world)
        for _ in range(16):
            with torch.no_grad():
                model.vector += 2**-7 * (world.rank == 0)  # the spacing at 1, on one of four ranks
            replica.step()
        return float(model.vector.detach()[0])

    assert ThreadWorld(size=4).run(worker) == [1 + 2 * 2**-7] * 4


# ---- short messages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wire", ["bf16", "int8", Sparse(density=0.1, decay=1.0, bits=2)], ids=["bf16", "int8", "sparse"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_short_messages_lose_nothing(wire: Narrow | Sparse, size: int) -> None:
    """The sum of all means, and all errors, is the mean of all that was put in."""
    numel, rounds = 1000, 6  # not a multiple of a group of values, nor of the members
    given = torch.randn(size, rounds, numel, dtype=torch.float64) * 10 ** torch.randn(numel)

    def worker(world: World) -> tuple[Array, Array]:
        links = Links.connect(world)
        group = links.open("world")
        assert group is not None
        lossy: NarrowMean | SparseMean
        if isinstance(wire, Sparse):
            segments = [Segment(0, 0, 700), Segment(1, 700, numel)]
            lossy = SparseMean.of(given[0, 0], wire, segments, group)
        else:
            lossy = NarrowMean.of(given[0, 0], wire, group)
        total = torch.zeros(numel, dtype=torch.float64)
        for step in range(rounds):
            delta = given[world.rank, step].clone()
            lossy.launch(delta).wait()
            assert not torch.equal(delta, given[:, step].mean(0))
            total += delta
        errors = lossy.errors(numel)
        lossy.restore(errors)
        assert all(torch.equal(kept, errors[kind]) for kind, kept in lossy.errors(numel).items())
        links.close()
        kept = errors["sent"] + size * errors.get("means", torch.zeros(()))
        return total.numpy(), kept.numpy()

    totals, kept = map(np.array, zip(*ThreadWorld(size=size).run(worker), strict=True))
    assert (totals == totals[0]).all()
    expected = given.sum(1).mean(0).numpy()
    scale = np.abs(given.numpy()).max(axis=(0, 1))
    found = totals[0] + kept.mean(0)
    assert (np.abs(found - expected) / scale).max() < 1e-12
    assert (np.abs(totals[0] - expected) / scale).max() > 1e-4


@pytest.mark.parametrize(("wire", "bytes_of_one"), [("bf16", 2), ("int8", 1 + 1 / 64)])
def test_narrow_bytes(wire: str, bytes_of_one: float) -> None:
    def worker(world: World) -> float:
        model = nn.Linear(128, 96, bias=False)  # a multiple of 3 times 256
        replica = offbeat.replicate(model, offbeat.diloco(every=1, wire=wire), mesh=world)
        replica.step()
        sent: float = replica.stats()["last"]["bytes_sent"]
        return sent

    for sent in ThreadWorld(size=3).run(worker):
        # Besides, the first step compares the parameters of all ranks.
        assert 0 <= sent - 2 * 2 / 3 * 128 * 96 * bytes_of_one < 1000


def test_sparse_bytes() -> None:
    """12 + 4 bits for an entry in 64, and 8 bytes for each chunk of 4096."""

    def worker(world: World) -> float:
        model = nn.Linear(128, 96, bias=False)  # three chunks
        algorithm = offbeat.sparse_loco(every=1, bits=4)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        replica.step()
        sent: float = replica.stats()["last"]["bytes_sent"]
        return sent

    for sent in ThreadWorld(size=3).run(worker):
        # Besides, the first step compares the parameters of all ranks.
        assert 0 <= sent - 2 * 3 * (64 * 2 + 8) < 1000


def test_all_entries_in_full_are_the_mean() -> None:
    sparse = run("sparse_loco(every=2, density=1.0, bits=None, lr=0.7)")
    mean = run("diloco(every=2, lr=0.7, momentum=0.0, nesterov=False)")
    np.testing.assert_allclose(sparse, mean, rtol=0, atol=2e-6)  # float32


def test_what_waits_is_sent_once() -> None:
    """An impulse in every entry, and no gradient: with a delay too the model moves by it, once."""

    def worker(world: World) -> Array:
        model = nn.Linear(64, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        algorithm = offbeat.sparse_loco(every=2, delay=1, density=0.125, decay=1.0, bits=None)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        with torch.no_grad():
            model.weight += 1
        for _ in range(40):
            replica.step()
        return values(model)

    for found in ThreadWorld(size=2).run(worker):
        np.testing.assert_array_equal(found, np.ones(64))


def test_a_model_is_loaded_in_mid_run_between_two_calls_of_finish() -> None:
    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.diloco(every=3, delay=2), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, replica, optimizer, range(4))  # a mean is in flight
        replica.finish()
        model.load_state_dict(Quadratic().state_dict())
        replica.finish()
        np.testing.assert_array_equal(values(model), values(Quadratic()))

    ThreadWorld(size=2).run(worker)


def test_what_was_not_sent_waits_and_decays() -> None:
    """One of three entries in each exchange; the others go on with half of it."""

    def worker(world: World) -> list[Array]:
        model = nn.Linear(3, 1, bias=False).double()
        algorithm = offbeat.sparse_loco(every=1, density=0.4, decay=0.5, bits=None)
        nn.init.zeros_(model.weight)
        replica = offbeat.replicate(model, algorithm, mesh=world)
        seen = []
        for moved in ([8.0, 4.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
            with torch.no_grad():
                model.weight += torch.tensor(moved) * (1 + world.rank)
            replica.step()
            seen.append(values(model))
        return seen

    for seen in ThreadWorld(size=2).run(worker):
        expected = [[12, 0, 0], [12, 3, 0], [12, 3, 0.375], [12, 3, 0.375]]
        np.testing.assert_array_equal(seen, expected)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"outer": "Muon(lr=0.1)"}, "expected one of SGD, Adam, .* treat every element"),
        ({"outer": "SGD(lr="}, "cannot read the outer optimizer"),
        ({"outer": "SGD(lr=-1.0)"}, "Invalid learning rate: -1.0; give a text such as"),
        ({"outer": "SGD(rate=1.0)"}, "unexpected keyword argument 'rate'"),
        ({"outer": "SGD(momentum=0.0, nesterov=True)"}, "Nesterov momentum requires"),
        ({"outer": "Adam(betas=(0.9,))"}, "out of range; give a text such as"),
        ({"outer": "SGD(lr=1e400)"}, "a step by a gradient of 0 is not finite"),
        ({"outer": lambda parameters: None}, "has no attribute 'step'"),
        ({"outer": 3}, "outer=3, expected a str .* or a callable"),
        ({"every": 0}, "every=0, expected a whole number of steps, 1 or more"),
        ({"every": 2, "fragments": 3}, "fragments=3 with every=2: .* use fragments <= every"),
        ({"every": 2, "delay": 3}, "delay=3 with every=2: .* use delay <= every"),
        ({"wire": "fp8"}, "wire='fp8', expected None .*, 'bf16', 'int8' or a Sparse"),
        ({"wire": Sparse(), "mixing": 0.5}, "mixing=0.5 with Sparse.*count twice.*use mixing=0"),
        ({"wire": {"density": 0.1}}, "wire=.*, expected None .* or a Sparse"),
        ({"mixing": 1.0}, r"mixing=1.0, expected None .* or a number in \[0, 1\)"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        OuterStep(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"density": 0.0}, r"density=0.0, expected a number in \(0, 1\]"),
        ({"decay": 1.5}, r"decay=1.5, expected a number in \[0, 1\]"),
        ({"bits": 3}, "bits=3, expected .* 2, 4 or 8"),
        ({"lr": -1.0}, "lr=-1.0, expected a number, 0 or more"),
    ],
)
def test_settings_of_sparse_messages_are_checked(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        offbeat.sparse_loco(**settings)


def test_settings_of_the_outer_sgd_are_checked_by_their_names() -> None:
    with pytest.raises(ValueError, match="momentum=1, expected a number in"):
        offbeat.diloco(momentum=1)
    with pytest.raises(ValueError, match=r"momentum=0 with nesterov=True: .*use nesterov=False"):
        offbeat.diloco(momentum=0)


def test_settings_are_equal_and_read_alike_on_all_ranks() -> None:
    assert repr(OuterStep(outer=torch.optim.Adagrad)).startswith("OuterStep(every=100, outer=Ada")
    assert copy.copy(OuterStep()) == OuterStep()
    assert offbeat.algorithm("local_sgd(outer='Adam(lr=0.01)')") != offbeat.local_sgd()


@pytest.mark.fault(
    "diloco has more fragments than the model has layers",
    "ValueError on all ranks; with the number of layers",
    group="Settings and arguments",
)
def test_more_fragments_than_layers() -> None:
    def worker(world: World) -> None:
        with pytest.raises(ValueError, match="fragments=3 for a model of 2 layers"):
            offbeat.replicate(Quadratic(), offbeat.diloco(every=4, fragments=3), mesh=world)

    ThreadWorld(size=2).run(worker)


@pytest.mark.fault(
    "a model file is loaded after replicate() under diloco",
    "ValueError on all ranks in the first step, unless finish() came between",
    group="Models and algorithms",
)
def test_a_model_that_is_loaded_late_needs_finish() -> None:
    file = Quadratic().state_dict()
    file["vector"] += 1

    def worker(world: World, late: bool, finish: bool) -> Array:
        model = Quadratic()
        if not late:
            model.load_state_dict(file)
        replica = offbeat.replicate(model, offbeat.diloco(every=2), mesh=world)
        if late:
            model.load_state_dict(file)
        if finish:
            replica.finish()
        train(model, replica, SGD(model.parameters(), lr=0.1), range(5))
        return values(model)

    def refused(world: World) -> None:
        with pytest.raises(ValueError, match=r"written to after replicate.*call finish"):
            worker(world, late=True, finish=False)

    ThreadWorld(size=2).run(refused)
    world = ThreadWorld(size=2)
    expected = world.run(lambda world: worker(world, late=False, finish=False))
    found = world.run(lambda world: worker(world, late=True, finish=True))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("nodes", RANKS_AND_NODES)
@pytest.mark.fault(
    "a rank diverges under diloco",
    "ValueError on all ranks; names the parameter; the anchor keeps its value",
    group="Gradients",
)
@pytest.mark.parametrize("wire", [None, "bf16", "int8", Sparse()], ids=str)
def test_a_mean_that_is_not_finite_changes_nothing(
    wire: Narrow | Sparse | None, nodes: Nodes
) -> None:
    over = "node" if nodes == UNEQUAL else "world"
    inside = offbeat.local_sgd(within="local").gradients if over == "node" else None
    algorithm = offbeat.Algorithm(inside, OuterStep(every=2, wire=wire, over=over))

    def worker(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, algorithm, mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, replica, optimizer, range(1))
        loss(model, world.rank, 1).backward()
        optimizer.step()
        if world.node == 0:
            with torch.no_grad():
                model.vector[1] = torch.nan
        own = values(model)
        # With 8 bits all values that share a scale are lost, those of `matrix` among them.
        name = "matrix" if wire == "int8" else "vector"
        with pytest.raises(ValueError, match=f"the mean of parameter '{name}' is not finite"):
            replica.step()
        np.testing.assert_array_equal(values(model), own)
        # The script goes on from a file: nothing of the mean is left.
        model.load_state_dict(Quadratic().state_dict())
        replica.finish()
        np.testing.assert_allclose(values(model), values(Quadratic()), rtol=0, atol=1e-14)
        train(model, replica, optimizer, range(2))
        assert np.isfinite(values(model)).all()

    ThreadWorld(nodes=nodes).run(worker)


def train(
    model: nn.Module, replica: offbeat.Replica, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for step in steps:
        loss(model, replica.world.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()


def values(model: nn.Module) -> Array:
    return torch.cat(
        [p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]
    ).numpy()
