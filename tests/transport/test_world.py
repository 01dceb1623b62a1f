"""Who meets whom: equal and unequal nodes, ranks in any order, and where layouts come from."""

import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import DeviceMesh, HashStore, PrefixStore, init_device_mesh

import offbeat
from offbeat.liveness.failure import PeerLost
from offbeat.methods import Average, Mean
from offbeat.platform.process_group import open_group, open_loopback
from offbeat.testing import ThreadWorld
from offbeat.transport.group import Group
from offbeat.transport.world import World
from ranks import Spawned
from reference.participants import Nodes

UNEQUAL: Nodes = ((0, 1, 2), (3,), (4, 5))
SCATTERED: Nodes = ((4, 0, 2), (1, 5), (3, 6, 7))  # ranks as some launcher dealt them
examples = settings(max_examples=60)


def world_of(nodes: Nodes, rank: int) -> World:
    return World(rank, nodes, HashStore(), None)


def test_members_of_unequal_nodes() -> None:
    """Written out: one slice, because the smallest node has one rank."""
    everyone = (0, 1, 2, 3, 4, 5)
    expected = {
        0: (0, 0, (0, 3, 4), (0, 1, 2)),
        1: (0, 1, (), (0, 1, 2)),
        2: (0, 2, (), (0, 1, 2)),
        3: (1, 0, (0, 3, 4), (3,)),
        4: (2, 0, (0, 3, 4), (4, 5)),
        5: (2, 1, (), (4, 5)),
    }
    for rank, (node, local_rank, between, inside) in expected.items():
        world = world_of(UNEQUAL, rank)
        assert (world.node, world.local_rank, world.slices) == (node, local_rank, 1)
        assert world.size == 6
        assert world.members("world", local_rank) == everyone
        assert world.members("node", local_rank) == between
        assert world.members("local", local_rank) == inside


def test_members_of_scattered_ranks() -> None:
    """The place in the node counts, not the rank: the order given is kept."""
    assert world_of(SCATTERED, 4).local_rank == 0
    assert world_of(SCATTERED, 0).members("node", 1) == (0, 5, 6)
    assert world_of(SCATTERED, 7).members("node", 2) == ()
    assert world_of(SCATTERED, 2).members("local", 2) == (4, 0, 2)
    assert world_of(SCATTERED, 3).members("world", 0) == tuple(range(8))


@st.composite
def layouts(draw: st.DrawFn) -> Nodes:
    """Any ranks on any nodes."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 12)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ranks) - 1)), max_size=4)))
    edges = [0, *[c for c in cuts if c < len(ranks)], len(ranks)]
    return tuple(tuple(ranks[a:b]) for a, b in pairwise(edges))


@examples
@given(nodes=layouts())
def test_all_members_of_a_group_agree_on_it(nodes: Nodes) -> None:
    worlds = [world_of(nodes, rank) for rank in range(sum(map(len, nodes)))]
    smallest = min(map(len, nodes))
    for world in worlds:
        assert world.slices == smallest
        assert nodes[world.node][world.local_rank] == world.rank
        for axis in ("world", "node", "local"):
            members = world.members(axis, world.local_rank)
            if axis == "node" and world.local_rank >= smallest:
                assert members == ()
                continue
            assert world.rank in members
            assert len(set(members)) == len(members)
            for other in members:
                assert worlds[other].members(axis, worlds[other].local_rank) == members
    # Every slice is exchanged between all nodes, by exactly one rank of each.
    for local_rank in range(smallest):
        members = worlds[0].members("node", local_rank)
        assert [worlds[rank].node for rank in members] == list(range(len(nodes)))


@pytest.mark.parametrize(
    "nodes",
    [UNEQUAL, SCATTERED, ((0, 1), (2,)), ((1,), (2, 0)), ((0, 1, 2),), ((2, 3), (0, 1))],
    ids=str,
)
def test_slices_come_together_on_every_layout(nodes: Nodes) -> None:
    """Nodes are averaged alike, whatever their size, and their ranks end with the same bits."""

    def worker(world: World) -> list[float]:
        model = nn.Linear(3, 2, bias=False)
        algorithm = offbeat.Algorithm(Mean(over="local"), Average(every=1, over="node"))
        replica = offbeat.replicate(model, algorithm, mesh=world)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6.0).view(2, 3) + 10 * world.node)
        model(torch.ones(3)).sum().backward()
        replica.step()
        replica.detach()
        flat: list[float] = model.weight.detach().view(-1).tolist()
        return flat

    expected = np.arange(6) + 10 * np.mean(range(len(nodes)))
    for found in ThreadWorld(nodes=nodes).run(worker):
        # Thirds of small whole numbers in float32.
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gradients_are_averaged_inside_each_node_alone() -> None:
    def worker(world: World) -> float:
        model = nn.Linear(1, 1, bias=False)
        replica = offbeat.replicate(
            model, offbeat.Algorithm(gradients=Mean(over="local")), mesh=world
        )
        (model(torch.ones(1)) * world.rank).sum().backward()
        replica.detach()
        return model.weight.grad.item()

    assert ThreadWorld(nodes=UNEQUAL).run(worker) == [1.0, 1.0, 1.0, 3.0, 4.5, 4.5]


def test_replicas_come_and_go_on_unequal_nodes() -> None:
    """Ranks without a part in some group must not lose count of the groups' names."""

    def worker(world: World) -> None:
        for text in ("sgp(within='local')", "ddp", "local_sgd(every=1, within='local')"):
            model = nn.Linear(2, 2)
            replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
            model(torch.ones(2)).sum().backward()
            replica.step()
            replica.finish()
            replica.detach()

    ThreadWorld(nodes=UNEQUAL).run(worker, timeout=20)


def test_a_slot_without_partners_is_replaced_by_a_note() -> None:
    """On a node of one rank; the others of the world exchange all the same."""

    def worker(world: World) -> list[str]:
        model = nn.Linear(1, 1)
        replica = offbeat.replicate(model, offbeat.sgp(within="local"), mesh=world)
        replica.detach()
        return list(replica.stats()["notes"])

    notes = ThreadWorld(nodes=UNEQUAL).run(worker)
    assert ["gradients slot" in "".join(note) for note in notes] == [rank == 3 for rank in range(6)]


@pytest.mark.parametrize("nodes", [((0, 1), (1,)), ((0, 0),), ((0,), ()), ((1,),), ()], ids=str)
@pytest.mark.fault(
    "the list of nodes omits or repeats a rank",
    "ValueError on every rank",
    group="Settings and arguments",
)
def test_a_layout_that_does_not_place_its_rank_once_is_refused(nodes: Nodes) -> None:
    """Also when the layout is made directly, as for a world of threads."""
    with pytest.raises(ValueError, match="rank"):
        World(0, nodes, HashStore(), None)


# ---- layouts of a running world -----------------------------------------------------------------


@pytest.fixture
def world_of_six(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.distributed`` as rank 2 of 6, with torch's backend that only pretends to send."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers it

    monkeypatch.delenv("GROUP_RANK", raising=False)
    dist.init_process_group("fake", store=HashStore(), rank=2, world_size=6)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_six")
def test_from_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("node", "local"))
    world = World.from_mesh(mesh)
    assert world.nodes == ((0, 1), (2, 3), (4, 5))
    assert (world.rank, world.node, world.local_rank, world.slices) == (2, 1, 0, 2)
    several = init_device_mesh("cpu", (1, 3, 2), mesh_dim_names=("node", "dp", "tp"))
    assert World.from_mesh(several).nodes == ((0, 1, 2, 3, 4, 5),)


@pytest.mark.usefixtures("world_of_six")
def test_from_a_part_of_a_mesh() -> None:
    """The ranks keep their numbers, and meet by themselves."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("node", "pp"))
    world, everyone = World.from_mesh(mesh["node"]), World.from_mesh(mesh)
    assert (world.nodes, world.is_part, everyone.is_part) == (((0,), (2,), (4,)), True, False)
    assert world.prefix != everyone.prefix


@pytest.mark.usefixtures("world_of_six")
def test_from_a_mesh_whose_ranks_are_turned() -> None:
    turned = torch.arange(6).view(3, 2).t().contiguous()
    world = World.from_mesh(DeviceMesh("cpu", turned, mesh_dim_names=("node", "local")))
    assert world.nodes == ((0, 2, 4), (1, 3, 5))
    assert (world.node, world.local_rank) == (0, 1)


@pytest.mark.usefixtures("world_of_six")
def test_of_keeps_the_order_given() -> None:
    world = World.of([[5, 2], [0, 1, 3], [4]])
    assert world.nodes == ((5, 2), (0, 1, 3), (4,))
    assert (world.node, world.local_rank, world.slices) == (0, 1, 1)


def others_say(turn: int, names: dict[int, str]) -> None:
    """What the other ranks' processes would have put into the store."""
    store = dist.distributed_c10d._get_default_group().get_group_store()
    here = PrefixStore(f"offbeat/discover/{turn}", store)
    for rank, name in names.items():
        here.set(str(rank), name)
        here.add("here", 1)

    def conclude() -> None:
        """What rank 0 does, once rank 2 has come."""
        words = [here.get(str(rank)).decode() for rank in range(6)]
        here.set("conclusion", json.dumps(words))

    threading.Thread(target=conclude, daemon=True).start()


@pytest.mark.usefixtures("world_of_six")
def test_discover_groups_ranks_by_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal nodes, not in order; asked twice with another answer."""
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    others_say(1, {0: "a", 1: "b", 3: "a", 4: "c", 5: "b"})
    assert World.discover().nodes == ((0, 3), (1, 2, 5), (4,))
    others_say(2, dict.fromkeys([0, 1, 3, 4, 5], "b"))
    assert World.discover().nodes == ((0, 1, 2, 3, 4, 5),)


@pytest.mark.usefixtures("world_of_six")
def test_discover_believes_the_launcher_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers on one host are two nodes."""
    monkeypatch.setitem(os.environ, "GROUP_RANK", "1")
    others_say(1, {0: "0", 1: "0", 3: "1", 4: "1", 5: "2"})
    assert World.discover().nodes == ((0, 1), (2, 3, 4), (5,))


@pytest.mark.usefixtures("world_of_six")
def test_discover_believes_the_user_before_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines of a site are one node."""
    monkeypatch.setitem(os.environ, "GROUP_RANK", "2")
    monkeypatch.setitem(os.environ, "OFFBEAT_NODE", "paris")
    others_say(1, {0: "0", 1: "paris", 3: "paris", 4: "rome", 5: "rome"})
    assert World.discover().nodes == ((0,), (1, 2, 3), (4, 5))


@pytest.mark.parametrize("make", [World.discover, lambda: World.of(((0,),))])
def test_no_running_world(make: object) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        make()  # type: ignore[operator]


def _gossip_on_unequal_nodes(rank: int, results: Any) -> None:
    """Attach twice: names of groups must not come back, and ranks count them differently."""
    found = []
    for text in ("sgp(within='local')", "local_sgd(every=1, within='local')"):
        model = nn.Linear(1, 1, bias=False)
        layout = World.of(((0, 1), (2,)))
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=layout)
        with torch.no_grad():
            model.weight.fill_(layout.node)
        model(torch.zeros(1)).sum().backward()
        replica.step()
        replica.finish()
        found.append(model.weight.item())
        replica.detach()
    results.put((rank, found))


@pytest.mark.processes
def test_unequal_nodes_in_real_processes() -> None:
    said = Spawned(_gossip_on_unequal_nodes, 3).join(timeout=60)
    assert sorted(said) == [(rank, [0.5, 0.5]) for rank in range(3)]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Gloo's threads have no names")
def test_a_world_of_threads_lets_go_of_detached_groups_and_of_no_others() -> None:
    """Gloo's own threads show it, which Python does not count."""

    def attach(world: World) -> offbeat.Replica:
        return offbeat.replicate(nn.Linear(2, 2), offbeat.local_sgd(), mesh=world)

    def threads() -> int:
        count = 0
        for path in Path("/proc/self/task").glob("*/comm"):
            with suppress(OSError):  # it ends meanwhile
                count += path.read_text().startswith("gloo")
        return count

    gc.collect()  # of earlier tests
    world, before = ThreadWorld(3), threads()
    replicas = world.run(attach)
    assert threads() >= before + 3
    world.run(lambda world: replicas[world.rank].step())  # they still reach each other
    world.run(lambda world: replicas[world.rank].detach())
    assert threads() <= before


# ---- groups of another owner --------------------------------------------------------------------


def test_a_process_group_is_adapted_once_and_not_kept_alive() -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    process_group = open_loopback(HashStore(), 0, 1)
    group = Group.of(process_group)
    assert Group.of(process_group) is group
    assert (group.rank, group.size, group.ranks) == (0, 1, (0,))
    group.lane.submit(lambda: None).result(10)
    lane = group.lane._thread
    alive = weakref.ref(process_group)
    del process_group
    gc.collect()
    assert alive() is None
    assert not lane.is_alive(), "nothing runs on a group that is gone"


@pytest.mark.usefixtures("world_of_six")
def test_an_adapted_group_knows_its_ranks_in_the_world() -> None:
    process_group = dist.new_group([4, 2, 5])
    group = Group.of(process_group)
    assert (group.ranks, group.ranks[group.rank]) == ((2, 4, 5), 2)


@pytest.mark.fault(
    "a rank makes no call on a process group of the user",
    "PeerLost at the timeout of the group",
)
def test_a_wait_on_an_adapted_group_ends_by_its_timeout() -> None:
    groups: list[dist.ProcessGroup] = []

    def worker(world: World) -> str | None:
        backends = {torch.device("cpu"): "gloo"}
        timeout = timedelta(seconds=0.5)
        own = open_group(
            world.store,
            world.rank,
            world.size,
            backends=backends,
            host="127.0.0.1",
            timeout=timeout,
        )
        groups.append(own)  # until both ranks are done
        if world.rank == 1:
            return None
        with pytest.raises(PeerLost, match="rank 0: an exchange between the ranks") as error:
            offbeat.adasum_all_reduce([torch.ones(3)], own)
        return str(error.value)

    said = ThreadWorld(2).run(worker)
    assert "within the timeout of the process group" in str(said[0])
