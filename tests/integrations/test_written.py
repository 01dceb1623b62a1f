"""A rank that is lost while it writes a checkpoint for all: threads."""

import warnings
from pathlib import Path

import pytest

import offbeat
from offbeat.integrations.replicas import written
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import Quadratic


@pytest.mark.usefixtures("impatient")
@pytest.mark.fault(
    "the rank that writes the model is lost while Lightning or Accelerate saves",
    "the next first rank writes it",
)
def test_the_next_first_rank_writes(tmp_path: Path) -> None:
    def work(world: World) -> bool | None:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world, elastic=True)

        def write() -> bool:
            if world.rank == 0:
                links = replica._connection.links
                assert links is not None
                links.heartbeat._end_thread()
                raise SystemExit
            if replica.world.ranks[0] == world.rank:
                (tmp_path / "model").write_text(str(world.rank))
            return True

        try:
            done = written(replica, lambda: replica.world.ranks[0] == world.rank, write)
        except SystemExit:
            return None
        replica.detach()
        return done

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ThreadWorld(3).run(work) == [None, True, True]
    assert (tmp_path / "model").read_text() == "1"


def test_an_error_of_the_rank_that_writes_ends_its_call_alone() -> None:
    """The others go on, to where they hear of it."""

    def work(world: World) -> str:
        replica = offbeat.replicate(Quadratic(), offbeat.ddp(), mesh=world)

        def write() -> str:
            if world.rank == 0:
                raise OSError("no space left")
            return "returned"

        try:
            return written(replica, lambda: world.rank == 0, write)
        except OSError as error:
            return str(error)
        finally:
            replica.detach()

    assert ThreadWorld(2).run(work) == ["no space left", "returned"]
