"""Several connections between two ranks: the same results, and all of them are used."""

import os
import random
import time
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import offbeat
from crowd import Crowd
from offbeat.testing import ThreadWorld, simulate
from offbeat.transport import collectives
from offbeat.transport.group import Group
from offbeat.transport.links import CONNECTIONS, Links
from offbeat.transport.messages import SHARE, _pieces, exchange
from offbeat.transport.world import World

WIDTH = 3
# Elements of float32: one piece, pieces of unequal lengths, and more than one round of pieces.
SIZES = (1, SHARE // 4, WIDTH * SHARE // 4 + 5, 2 * WIDTH * SHARE // 4 + 1)


def sockets() -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += "socket" in os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
    return found


@pytest.mark.parametrize("size", SIZES[2:])
def test_pieces_use_all_connections_alike(size: int) -> None:
    group = cast(Group, SimpleNamespace(connections=WIDTH))
    pieces = _pieces([(1, torch.empty(size))], group)
    used = Counter[int]()
    for (piece,), _, tag in pieces:
        used[tag % WIDTH] += piece.nbytes
    assert len(used) == WIDTH
    assert max(used.values()) - min(used.values()) < 64


@pytest.mark.parametrize("size", SIZES)
def test_collectives_and_messages_are_the_same(size: int, draws: random.Random) -> None:
    inputs = torch.randn(3, size, generator=torch.Generator().manual_seed(draws.getrandbits(32)))

    def work(world: World) -> list[Tensor]:
        links, rank = Links.connect(replace(world, connections=WIDTH)), world.rank
        group = links.open("world")
        assert group is not None
        assert group.connections == WIDTH
        mine = inputs[rank].clone()
        total, first, gathered = mine.clone(), mine.clone(), mine.new_empty(3 * size)
        arrived, reduced = torch.empty_like(mine), mine.clone()
        handles = [
            collectives.all_reduce(total, group),
            collectives.broadcast(first, 1, group),
            collectives.all_gather(gathered, mine, group),
            collectives.reduce(reduced, 0, group),
            exchange([((rank + 1) % 3, mine)], [((rank - 1) % 3, arrived)], group),
        ]
        for handle in handles:
            is_divided = size * 4 > WIDTH * SHARE
            assert not is_divided or len(handle.works) % WIDTH == 0
            handle.wait()
        links.close()
        return [total, first, gathered, arrived, reduced]

    for rank, found in enumerate(ThreadWorld(3).run(work)):
        total, first, gathered, arrived, reduced = found
        torch.testing.assert_close(total, inputs.sum(0))
        assert torch.equal(first, inputs[1])
        assert torch.equal(gathered, inputs.flatten())
        assert torch.equal(arrived, inputs[rank - 1])
        if rank == 0:
            torch.testing.assert_close(reduced, inputs.sum(0))


@pytest.mark.parametrize(
    "recipe", ["ddp", "sgp(overlap=1)", "lags(density=0.1)", "adasum", "diloco(every=2)"]
)
def test_training_is_the_same(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    def loss(model: torch.nn.Module, rank: int, step: int) -> Tensor:
        batch = torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(batch).square().mean()

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 200)
        rows = simulate(offbeat.algorithm(recipe), lambda: deepcopy(model), loss, steps=4, size=3)
        return [row[-1]["weight"] for row in rows]

    before = sockets()
    one = trained()
    monkeypatch.setenv(CONNECTIONS, str(WIDTH))
    for a, b in zip(one, trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # sums in another order
    until = time.monotonic() + 10
    while sockets() > before + 3:  # all are closed, on a busy machine a moment later
        assert time.monotonic() < until
        time.sleep(0.05)


def widths(replica: offbeat.Replica) -> dict[str, set[int]]:
    """Return how many connections the groups of each axis have."""
    links, found = replica._connection.links, dict[str, set[int]]()
    assert links is not None
    for group in links.opened:
        found.setdefault(group.axis, set()).add(group.connections)
    return found


def test_the_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between nodes, not inside one."""
    monkeypatch.setenv(CONNECTIONS, "8")

    def work(world: World) -> dict[str, set[int]]:
        model, recipe = torch.nn.Linear(2, 1), offbeat.sgp(within="local")
        replica = offbeat.replicate(model, recipe, mesh=world, connections=WIDTH)
        found = widths(replica)
        replica.detach()
        return found

    for found in ThreadWorld(nodes=[[0, 1], [2, 3]]).run(work):
        assert found == {"world": {WIDTH}, "node": {WIDTH}, "local": {1}}


def test_a_rank_that_joins_has_as_many() -> None:
    def work(world: World) -> dict[str, set[int]]:
        model, recipe = torch.nn.Linear(2, 1), offbeat.sgp()
        replica = offbeat.replicate(model, recipe, mesh=world, elastic=True, connections=WIDTH)
        while not replica.joined:
            replica.step()
        found = widths(replica)
        replica.finish()
        replica.detach()
        return found

    crowd = Crowd(2, work)
    crowd.come(crowd.world.newcomer())
    with pytest.warns(RuntimeWarning, match="has joined"):
        assert crowd.all() == 3 * [{"world": {WIDTH}}]


@pytest.mark.fault(
    "the number of connections is no number, or differs between ranks", "ValueError on all ranks"
)
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((1, 8), "ranks 0 and 1 differ: the number of connections is 1 here and 8 there"),
        *(
            ((2, wrong), f"rank 1: connections is '{wrong}', expected a number of connections from")
            for wrong in (0, 65, -1, 1.0, True)
        ),
    ],
)
def test_wrong_arguments_are_told(numbers: tuple[int, int], told: str, elastic: bool) -> None:
    def work(world: World) -> str:
        given: dict[str, Any] = {"connections": numbers[world.rank], "elastic": elastic}
        with pytest.raises(ValueError, match="connections is") as raised:
            offbeat.replicate(torch.nn.Linear(2, 1), offbeat.ddp(), mesh=world, **given)
        return str(raised.value)

    first, second = ThreadWorld(2).run(work)
    assert first == second
    assert first.startswith(told)


@pytest.mark.parametrize("wrong", ["0", "many", ""])
def test_wrong_variables_are_told(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(CONNECTIONS, wrong)
    with pytest.raises(ValueError, match=f"rank 0: OFFBEAT_CONNECTIONS is '{wrong}', expected"):
        ThreadWorld(2).run(
            lambda world: offbeat.replicate(torch.nn.Linear(2, 1), offbeat.ddp(), mesh=world)
        )
