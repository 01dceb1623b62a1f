"""Every recipe trains an embedding with sparse gradients as one with dense gradients."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam

import offbeat
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from outcomes import alike
from problems import Lookup, lookup_gradient, lookup_loss
from recipe_cases import CASES, Case, of_each_recipe
from test_contract import check_against_the_reference

LR = 0.1


WHOLE = [case for case in CASES if "partition" not in case.text]


@pytest.mark.parametrize(
    "case",
    [case for case in WHOLE if case.of_rows or case in of_each_recipe(WHOLE)],
    ids=lambda case: case.text,
)
def test_follows_the_reference(case: Case) -> None:
    """With momentum, whose sparse form is the dense one: rows that are not read decay too."""
    reference = case.of_rows or case.reference
    check_against_the_reference(case, 3, reference, Lookup, lookup_loss, lookup_gradient)


def loop(model: Lookup, replica: offbeat.Replica, world: World) -> list[Tensor]:
    """Gradients of a loop that does all that may be done with them."""
    optimizer, seen = SGD(model.parameters(), lr=LR), []
    for step in range(6):
        runs = not (world.rank == 1 and step == 4)  # as out of data
        for part in range(3):
            replica.set_requires_sync(part != 1 if step != 4 else part == 2)  # up to two exchanges
            if runs:
                lookup_loss(model, world.rank, 3 * step + part).backward()
        norm = replica.clip_grad_norm_(0.5)
        seen += [norm, *(p.grad.to_dense().clone() for p in model.parameters() if runs)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        replica.step()
    replica.detach()
    return [*seen, *snapshot(model).values()]


@pytest.mark.parametrize("text", ["ddp", "lags(density=1.0)", "local_sgd(every=2)"])
@pytest.mark.filterwarnings("ignore:rank 1. a step:RuntimeWarning")
def test_a_loop_sees_the_gradients_of_a_dense_embedding(text: str) -> None:
    def work(world: World, sparse: bool) -> list[Tensor]:
        model = Lookup(sparse=sparse)
        return loop(model, offbeat.replicate(model, offbeat.algorithm(text), mesh=world), world)

    ours, theirs = (ThreadWorld(3).run(lambda w, s=s: work(w, s)) for s in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.2, clip_norm=0.5)", "sgp(overlap=1)"])
def test_a_run_with_two_optimizers_resumes_bit_for_bit(text: str) -> None:
    def optimizers(model: Lookup) -> list[Any]:
        return [SparseAdam(model.matrix.parameters(), lr=LR), SGD(model.vector, lr=LR)]

    def train(model: Lookup, replica: offbeat.Replica, inner: list[Any], rank: int) -> None:
        for step in range(5):
            lookup_loss(model, rank, replica.steps + step).backward()
            for optimizer in inner:
                optimizer.step()
                optimizer.zero_grad()
            replica.step()

    def work(world: World) -> None:
        model, again = Lookup(), Lookup()
        inner, later = optimizers(model), optimizers(again)
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, optimizer=inner)
        train(model, replica, inner, world.rank)
        file = io.BytesIO()
        torch.save([each.state_dict() for each in (replica, model, *inner)], file)
        train(model, replica, inner, world.rank)
        replica.detach()
        file.seek(0)
        saved, parameters, *states = torch.load(file, weights_only=True)
        assert "matrix.weight" not in saved[f"rank{world.rank}"]["gradients"].get("residual", {})
        again.load_state_dict(parameters)
        resumed = offbeat.replicate(again, offbeat.algorithm(text), mesh=world, optimizer=later)
        resumed.load_state_dict(saved)
        for optimizer, state in zip(later, states, strict=True):
            optimizer.load_state_dict(state)
        train(again, resumed, later, world.rank)
        resumed.detach()
        assert all(map(torch.equal, snapshot(again).values(), snapshot(model).values()))

    ThreadWorld(3).run(work)


@pytest.mark.parametrize("text", ["ddp", "lags(density=0.2)", "slgs"])
@pytest.mark.fault(
    "a sparse gradient is not finite on one rank",
    "all gradients are not finite in the same rows, or NaN",
    group="Gradients",
)
def test_a_nan_on_one_rank_reaches_all(text: str) -> None:
    def work(world: World) -> Tensor:
        model = Lookup()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        loss = model([world.rank, 2], world.rank) * (torch.nan if world.rank == 1 else 1.0)
        loss.backward()
        replica.step()
        replica.detach()
        return torch.cat(
            [p.grad.to_dense().view(-1) for p in model.parameters() if p.grad is not None]
        )

    first, *others = ThreadWorld(3).run(work)
    assert first.isnan().tolist() == [text != "ddp"] * 2 + [True] * 7
    assert all(torch.equal(first.isnan(), other.isnan()) for other in others)


@pytest.mark.parametrize(
    "text", ["adasum(partition=True)", "lags(momentum=0.5)", "lags('adaptive')", "torch_ddp"]
)
@pytest.mark.fault(
    "an embedding has sparse gradients under a recipe for dense ones",
    "ValueError on all ranks; names the parameter",
    group="Models and algorithms",
)
def test_what_needs_whole_layers_refuses_sparse_gradients(text: str) -> None:
    def work(world: World) -> None:
        offbeat.replicate(Lookup(), offbeat.algorithm(text), mesh=world)

    text = alike(work)
    assert "'matrix.weight' has sparse gradients" in text
    assert "sparse=False" in text


def test_embeddings_that_are_sparse_on_one_rank_only_are_refused() -> None:
    def work(world: World) -> None:
        offbeat.replicate(Lookup(sparse=world.rank == 1), offbeat.ddp(), mesh=world)

    assert "'matrix.weight' is trainable here and trainable by sparse" in alike(work)


class Tied(nn.Module):
    """The embedding is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        return (self.table(rows) @ self.table.weight.T).sum()


def test_a_dense_use_of_a_sparse_embedding_is_refused() -> None:
    def work(world: World) -> None:
        model = Tied()
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        model(torch.tensor([world.rank])).backward()
        replica.step()

    text = alike(work)
    assert "'table.weight' has a gradient of layout torch.strided" in text
    assert "tied" in text
