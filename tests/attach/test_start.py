"""The start of a replica: whoever is missing or at fault, all ranks learn of it, by name."""

import os
import signal
import time
import warnings
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.attach import start
from offbeat.attach.slots import reduced
from offbeat.liveness.heartbeats import roll_call
from offbeat.liveness.store import client as store
from offbeat.platform.process_group import open_group
from offbeat.testing import ThreadWorld
from offbeat.transport.links import Links
from offbeat.transport.world import World
from outcomes import errors_of
from ranks import Spawned

SHORT = timedelta(seconds=1)
open_short = partial(
    open_group, backends={torch.device("cpu"): "gloo"}, host="127.0.0.1", timeout=SHORT
)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts in tenths of a second."""
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.BEAT", 0.1)
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.SILENT_AFTER", 1.0)


def attach(mesh: Any = None, model: Any = None, algorithm: Any = None) -> offbeat.Replica:
    return offbeat.replicate(
        model or nn.Linear(2, 2), algorithm or offbeat.local_sgd(every=1), mesh=mesh
    )


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        pytest.param(
            {"model": 3},
            "rank 1: the model is a int",
            marks=pytest.mark.fault(
                "replicate() gets no model on one rank",
                "ValueError on all ranks; names the rank and what it gave",
            ),
        ),
        pytest.param(
            {"algorithm": "sgp"},
            "rank 1: the algorithm is 'sgp'",
            marks=pytest.mark.fault(
                "replicate() gets no algorithm on one rank",
                "ValueError on all ranks; names the rank and what it gave",
            ),
        ),
    ],
)
def test_a_bad_argument_on_one_rank_is_an_error_on_all(bad: dict[str, Any], text: str) -> None:
    def work(world: World) -> None:
        attach(world, **(bad if world.rank == 1 else {}))

    errors = errors_of(work, 3, seconds=10)
    assert {type(error) for error in errors} == {ValueError}
    assert len({str(error) for error in errors}) == 1
    assert text in str(errors[0])


@pytest.mark.parametrize(("package", "other"), [("offbeat", "9.0.1"), ("torch", "9.0")])
@pytest.mark.fault(
    "two ranks run other versions of offbeat or torch",
    "ValueError on all ranks; names both; for patch releases of torch a warning",
)
def test_versions_that_differ(package: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models, taken = [nn.Linear(2, 2) for _ in range(3)], start.fingerprint
    monkeypatch.setattr(
        start,
        "fingerprint",
        lambda filler, nodes: (
            taken(filler, nodes) | ({package: other} if filler.model.module is models[2] else {})
        ),
    )
    errors = errors_of(lambda world: attach(world, models[world.rank]) and None, 3, seconds=10)
    assert {type(error) for error in errors} == {ValueError}
    (text,) = {str(error) for error in errors}
    ours = {"offbeat": offbeat.__version__, "torch": ".".join(torch.__version__.split(".")[:2])}
    assert f"the version of {package} is {ours[package]} here and {other} there" in text
    assert text.startswith("ranks 0 and 2 differ")


def test_builds_of_torch_that_differ_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        found = iter(["2.13.0", "2.13.1", "2.13.0"])
        __version__ = property(lambda self: next(self.found))

    monkeypatch.setattr(start, "torch", Torch())
    with pytest.warns(RuntimeWarning, match=r"torch \(2.13.\d on rank \d, 2.13.\d on rank \d\)"):
        ThreadWorld(3).run(lambda world: attach(world).detach())


class Calls:
    """Counts what each rank writes to the store and reads from it, in bytes and keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}
        call = store._Calls.__call__

        def counted(caller: Any, method: str, *args: Any) -> Any:
            if method == "multi_get":
                self.keys.setdefault(id(caller), []).append(len(args[0]))
            if method == "set":
                self.written[id(caller)] = self.written.get(id(caller), 0) + len(args[1])
            return call(caller, method, *args)

        monkeypatch.setattr(store._Calls, "__call__", counted)


@pytest.mark.parametrize("size", [4, 24])
def test_one_rank_reads_the_words_of_all(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others read its conclusion: what a rank does is the same in every world."""
    calls = Calls(monkeypatch)
    ThreadWorld(size).run(lambda world: attach(world).detach())
    largest = sorted(max(counts) for counts in calls.keys.values())
    assert largest[-1] == size
    assert all(count <= 10 for count in largest[:-1])  # heartbeats


def test_two_ranks_of_all_send_details_of_a_model_that_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, wide = 12, 5_000  # so many layers that digests are small beside their names
    calls = Calls(monkeypatch)

    def work(world: World) -> None:
        model = nn.ParameterList(torch.zeros(1) for _ in range(wide + (world.rank >= 7)))
        attach(world, model=model)

    (said,) = {str(error) for error in errors_of(work, size, seconds=30)}
    assert "ranks 0 and 7 differ: '5000' exists on only one of them" in said
    assert sum(written > 10 * wide for written in calls.written.values()) == 1


def test_all_ranks_attach_again_after_such_an_error() -> None:
    """The numbers of replicas, which all ranks count for themselves, still agree."""

    def work(world: World) -> None:
        with pytest.raises(ValueError, match="rank 1"):
            attach(world, model=3 if world.rank == 1 else None)
        replica = attach(world)
        replica.step()
        replica.detach()

    assert errors_of(work, 3, seconds=10) == [None] * 3


@pytest.mark.fault(
    "a rank is late for replicate()",
    "the others wait, with a warning after 15 s",
)
def test_a_late_rank_is_waited_for_and_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "SEARCH_AFTER", 0.1)
    monkeypatch.setattr(roll_call, "WARN_AFTER", 0.2)

    def work(world: World) -> None:
        if world.rank == 2:
            time.sleep(1.0)
        attach(world).detach()

    with pytest.warns(RuntimeWarning, match=r"ranks \[2\] have not called replicate") as warned:
        assert errors_of(work, 3, seconds=10) == [None] * 3
    assert len(warned) == 1


@pytest.mark.fault(
    "a rank ends after replicate()",
    "PeerLost on all others; names it",
)
def test_a_rank_that_ends_in_the_roll_call_is_named() -> None:
    def work(world: World) -> None:
        if world.rank == 2:  # as if killed: the others see nothing but the end of its heartbeat
            Links.connect(world).heartbeat._end_thread()
            return
        attach(world)

    errors = errors_of(work, 3, seconds=10)
    assert {type(error) for error in errors[:2]} == {offbeat.PeerLost}
    assert str(errors[0]) == str(errors[1])
    assert "rank 2 is lost" in str(errors[0])


@pytest.mark.fault(
    "a rank comes to replicate() after the timeout",
    "PeerLost on all ranks; names it, also on the late one",
)
def test_a_rank_that_comes_after_the_timeout_is_named_on_all() -> None:
    def work(world: World) -> None:
        # What init_process_group() would have opened.
        own = open_short(dist.PrefixStore("own", world.store), world.rank, world.size)
        if world.rank == 0:
            time.sleep(2.5)
        attach(World(world.rank, world.nodes, world.store, world.opener, owner=weakref.ref(own)))

    errors = errors_of(work, 3, seconds=10)
    assert {type(error) for error in errors} == {offbeat.PeerLost}
    assert len({str(error) for error in errors}) == 1
    assert "ranks [0] have not called replicate() within 1 s" in str(errors[0])


@pytest.mark.fault(
    "a rank pauses for longer than the timeout",
    "PeerLost on all ranks; names the rank, its call and the timeout",
)
def test_a_pause_longer_than_the_timeout_is_named_on_all() -> None:
    def work(world: World) -> None:
        replica = attach(World(world.rank, world.nodes, world.store, open_short))
        replica.step()
        if world.rank == 2:
            time.sleep(3.0)
        replica.step()

    errors = errors_of(work, 3, seconds=10)
    assert {type(error) for error in errors} == {offbeat.PeerLost}
    assert len({str(error) for error in errors}) == 1
    assert "rank 2 was in its own code (call 1)" in str(errors[0])
    assert "the timeout of 1 s that init_process_group() was given" in str(errors[0])


@pytest.mark.fault(
    "an exchange takes longer than the timeout",
    "a warning at half of the timeout, then PeerLost on all ranks that names it and its argument",
    group="Lost ranks and connections",
)
def test_an_exchange_longer_than_the_timeout_is_named_on_all() -> None:
    def work(world: World) -> None:
        replica: Any = attach(World(world.rank, world.nodes, world.store, open_short))
        replica.step()
        if world.rank == 2:
            exchange = replica.parameters.step
            replica.parameters.step = lambda step: (time.sleep(3.0), exchange(step))
        replica.step()

    with pytest.warns(RuntimeWarning, match=r"rank [01] has waited for .* in step") as warned:
        errors = errors_of(work, 3, seconds=10)
    assert len(warned) == 1
    assert {type(error) for error in errors} == {offbeat.PeerLost}
    assert len({str(error) for error in errors}) == 1
    for said in (str(errors[0]), str(warned[0].message)):
        assert "longer than the timeout of 1 s that init_process_group() was given" in said
        assert "torch.distributed.init_process_group(timeout=" in said
    assert "an exchange in step (call 1)" in str(errors[0])


# ---- in a running world --------------------------------------------------------------------------


def _start(rank: int, results: Any, case: str) -> None:
    roll_call.SEARCH_AFTER = 0.3
    mesh: Any = "a mesh" if case == "bad mesh" and rank == 1 else None
    if case == "mixed" and rank == 1:
        mesh = World.of(((0, 1), (2,)))
    if case == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "late" and rank == 1:
        time.sleep(2.0)
    said = ""
    try:
        replica = attach(mesh)
        replica.step()
        replica.detach()
    except (ValueError, offbeat.PeerLost) as error:
        said = f"{type(error).__name__}: {error}"
    if case != "killed":
        both = torch.ones(1)
        dist.all_reduce(both)  # the default group is as it was
        said += f" {both.item():.0f} ranks"
    results.put(said)
    results.close()
    results.join_thread()
    if case == "killed":
        time.sleep(1.0)  # the end of a survivor must not be what ends the other's wait
        os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "text"),
    [
        pytest.param(
            "bad mesh",
            "ValueError: rank 1: mesh='a mesh'",
            marks=pytest.mark.fault(
                "replicate() gets no mesh on one rank",
                "ValueError on all ranks; names the rank and what it gave",
            ),
        ),
        pytest.param(
            "mixed",
            "ValueError: ranks 0 and 1 differ: the mesh has the nodes None here",
            marks=pytest.mark.fault(
                "only some ranks give replicate() a mesh",
                "ValueError on all ranks; names both meshes",
            ),
        ),
        pytest.param(
            "killed",
            "PeerLost: rank 1 is lost: it ended",
            marks=pytest.mark.fault(
                "a rank ends before replicate()",
                "PeerLost on all others; names it, within 10 s",
            ),
        ),
        ("late", ""),
    ],
)
def test_start_in_a_running_world(case: str, text: str) -> None:
    said = Spawned(_start, 3, case).join(timeout=60)
    assert len(said) == (2 if case == "killed" else 3)
    assert len(set(said)) == 1
    assert said[0].startswith(text)
    assert case == "killed" or said[0].endswith("3 ranks")


@pytest.mark.parametrize(
    ("text", "nodes", "said"),
    [
        ("daso", ((0, 1),), r"all 2 ranks are on one node, so that daso\(\) exchanges gradients"),
        ("sgp(within='local')", ((0, 1),), "gradients inside it only"),
        ("adasum(partition=True)", ((0, 1),), "gradients inside it only"),
        ("Average(over='node')", ((0, 1),), "exchanges nothing; pass other nodes as mesh="),
        ("daso", ((0,), (1,)), "every node has one rank, so that .* parameters between nodes only"),
        ("daso", ((0,), (1,)), "start several ranks on each node, or pass other nodes as mesh="),
    ],
)
@pytest.mark.fault(
    "a method for several nodes on one, or the reverse",
    "RuntimeWarning; says what is exchanged",
    group="Settings and arguments",
)
def test_a_method_that_these_nodes_reduce_warns_once(
    text: str, nodes: tuple[tuple[int, ...], ...], said: str
) -> None:
    with pytest.warns(RuntimeWarning, match=said) as caught:
        ThreadWorld(nodes=nodes).run(lambda w: attach(w, None, offbeat.algorithm(text)).detach())
    assert ["mesh=offbeat.World.of" in str(warning.message) for warning in caught] == [True]


def test_without_a_mesh_the_nodes_are_to_be_passed() -> None:
    said = reduced(offbeat.daso(), ThreadWorld(nodes=((0, 1),)).world(0))
    assert "pass the nodes as mesh=" in str(said)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("daso", ((0,),)), ("daso", ((0,), (1, 2))), ("sgp", ((0, 1),)), ("ddp", ((0,), (1,)))],
)
def test_other_methods_and_nodes_are_quiet(text: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ThreadWorld(nodes=nodes).run(lambda w: attach(w, None, offbeat.algorithm(text)).detach())
