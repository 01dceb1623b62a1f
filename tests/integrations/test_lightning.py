"""Lightning on two ranks: one start for all cases, since imports take most of the time."""

from importlib.util import find_spec
from typing import Any

import pytest

import offbeat

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs the lightning extra"),
]

Ranks = list[dict[str, Any]]


def test_ddp_equals_lightnings_own(cases: dict[str, Ranks]) -> None:
    for rank in cases["equals_ddp"]:
        assert rank == {"equal": True, "steps": 20, "wrapped": False}


def test_callbacks_may_swap_weights_and_set_the_last(cases: dict[str, Ranks]) -> None:
    for rank in cases["swapped_last"]:
        assert rank == {"left": [0.5]}


def test_two_optimizers_equal_lightnings_own_ddp(cases: dict[str, Ranks]) -> None:
    for rank in cases["gan_equals_ddp"]:
        assert rank["equal"]
        assert rank["moved"] == 7  # the last bias of a critic has no gradient


def test_two_networks_gossip_and_agree_in_the_end(cases: dict[str, Ranks]) -> None:
    first, second = cases["gan_by_gossip"]
    assert first["own"] != second["own"]
    assert first["end"] == second["end"]
    assert 1 <= first["models"] < 1.2  # those of both networks, with their weights


def test_a_run_chooses_its_method(cases: dict[str, Ranks]) -> None:
    first, second = cases["chooses"]
    assert first == second
    assert first["decisions"][0] == 5


def test_methods_whose_ranks_are_apart_wait_for_nobody(cases: dict[str, Ranks]) -> None:
    """Lightning asks rank 0 before each batch whether it has got a SIGTERM."""
    for rank in cases["waits_for_rank_0[local_sgd(every=1000)]"]:
        assert rank["broadcasts"] < rank["batches"] == 10
    for rank in cases["waits_for_rank_0[ddp]"]:
        assert rank["broadcasts"] >= rank["batches"] == 10


def test_a_gan_resumes_with_gradients_that_no_step_used(cases: dict[str, Ranks]) -> None:
    for rank in cases["gan_resumed"]:
        assert rank == {"equal": True}


@pytest.mark.parametrize("text", ["sgp(overlap=1)", "local_sgd(every=4)"])
def test_a_resumed_run_equals_the_uninterrupted_one(cases: dict[str, Ranks], text: str) -> None:
    first, second = cases[f"resumed[{text}]"]
    for rank in (first, second):
        assert rank["equal"]
        assert rank["later"]
        assert rank["files"] == ["offbeat-save1-rank0-of-2.pt", "offbeat-save1-rank1-of-2.pt"]
    # Ranks of sgp differ until the end; those of local_sgd agree after 20 steps.
    assert (first["own"] != second["own"]) == text.startswith("sgp")


@pytest.mark.parametrize("until", ["step", "epoch"])
def test_an_elastic_sampler_resumes_in_an_epoch_and_at_its_end(
    cases: dict[str, Ranks], until: str
) -> None:
    for epoch in ("first", "second"):
        drawn = [sample for rank in cases[f"samples_resumed[{until}]"] for sample in rank[epoch]]
        assert sorted(drawn) == list(range(80))


@pytest.mark.parametrize("text", ["sgp(overlap=1)", "local_sgd(every=4)"])
def test_validation_and_checkpoints_see_the_average(cases: dict[str, Ranks], text: str) -> None:
    first, second = cases[f"resumed[{text}]"]
    assert first["shown"] == second["shown"] == first["saved"]


@pytest.mark.fault(
    "the GradScaler of one rank skips an optimizer step under a framework",
    "the others do not wait; each rank keeps its own scale",
    group="Settings and arguments",
)
def test_a_step_that_one_scaler_skips(cases: dict[str, Ranks]) -> None:
    first, second = cases["skipped_step"]
    assert (first["scale"], second["scale"]) == (16.0, 4.0)  # it skipped twice
    assert first["end"] == second["end"]


def test_progress_bars_show_stalls_and_bytes(cases: dict[str, Ranks]) -> None:
    for rank in cases["logged"]:
        assert rank["bars"] == ["mb_sent", "seconds_stalled"]
        assert rank["models"] == pytest.approx(1.0)  # 2 (n-1)/n of the model


def test_a_save_in_the_middle_of_an_accumulation(cases: dict[str, Ranks]) -> None:
    for rank in cases["saved_while_accumulating"]:
        assert rank == {"saved": 3, "steps": 18}


def test_a_link_to_the_last_checkpoint_and_what_is_removed(cases: dict[str, Ranks]) -> None:
    for rank in cases["last_is_a_link"]:
        best = next(name for name in rank["found"] if name.endswith(".offbeat"))
        assert rank["found"] == [best.removesuffix(".offbeat"), best, "last.ckpt"]
        assert rank["unknown"] == []
        assert rank["steps"] == 30


def test_a_checkpoint_of_another_strategy(cases: dict[str, Ranks]) -> None:
    first, second = cases["from_a_run_of_ddp"]
    assert (first["warned"], second["warned"]) == (1, 0)
    assert first["steps"] == second["steps"] == 20


def test_a_missing_file_is_an_error_on_all_ranks(cases: dict[str, Ranks]) -> None:
    first, second = cases["missing_file"]
    assert first == second
    assert "rank 1's file is missing" in first["error"]


@pytest.mark.fault(
    "a rank fails while a checkpoint of Lightning is overwritten",
    "an error on all ranks; the checkpoint before stays",
    group="Checkpoints",
)
@pytest.mark.parametrize("where", ["ranks", "host"])
def test_an_overwritten_checkpoint(cases: dict[str, Ranks], where: str) -> None:
    for rank in cases[f"overwritten[{where}]"]:
        assert rank["equal"]
        assert "full" in rank["error"]
        assert rank["files"] == (2 if where == "ranks" else 4)


def test_an_exception_saves_without_waiting(cases: dict[str, Ranks]) -> None:
    first, second = cases["an_exception_on_all_ranks"]
    assert first == second
    assert first["saved"] == 3


@pytest.mark.fault(
    "an exception under Lightning, and a callback saves",
    "it does not wait for the others; they raise PeerLost",
    group="Leaving",
)
def test_an_exception_on_one_rank(cases: dict[str, Ranks]) -> None:
    first, second = cases["an_exception_on_one_rank"]
    assert "PeerLost('rank 1 has left" in first["error"]
    assert "on purpose" in second["error"]


def test_the_strategy_by_name(cases: dict[str, Ranks]) -> None:
    for rank in cases["by_name"]:
        unset, option = rank["errors"]
        assert "OFFBEAT_ALGORITHM is not set" in unset
        assert "find_unused_parameters" in option
        assert "every=4" in rank["algorithm"]
        assert rank["steps"] == 10


def test_the_command_line_builds_the_strategy_from_yaml(cases: dict[str, Ranks]) -> None:
    for rank in cases["from_yaml"]:
        written, saved = rank["found"]
        assert written == saved == [repr(offbeat.local_sgd(every=4)), 10]
        assert rank["timeout"] == 600


def test_optimizers_that_share_parameters(cases: dict[str, Ranks]) -> None:
    for rank in cases["shared_parameters"]:
        assert "optimizers 0 and 1 share 'generator.0.weight'" in rank["error"]


def test_fabric(cases: dict[str, Ranks]) -> None:
    first, second = cases["fabric"]
    assert first == second
    assert first["steps"] == 10


def test_the_examples_in_docstrings(cases: dict[str, Ranks]) -> None:
    for rank in cases["doctests"]:
        assert rank == {"failed": 0, "attempted": 2}


def test_the_script_of_the_page(cases: dict[str, Ranks]) -> None:
    first, second = cases["page"]
    assert first == second
    assert first["steps"] == 300
    assert first["loss"] < 0.01  # 0.05 for a constant


@pytest.mark.timeout(150)
@pytest.mark.fault(
    "rank 0 is killed under Lightning, and another process joins",
    "the others train on and save; the new rank has their state",
    group="Losses that a run survives",
)
def test_a_killed_rank_and_one_that_joins(killed_and_joined: Ranks) -> None:
    for rank in killed_and_joined:
        found = rank["alike"]
        assert found["epoch"] * 8 == found["global_step"] == found["steps"] == found["adam"]
        assert found["batches"] == found["steps"] - 1
        assert found["logged"] == found["scheduled"] == found["steps"]
        assert found["lr"] == [pytest.approx(0.01 * 0.999 ** found["steps"])]
        best = found["best"].rpartition("/")[2]
        assert rank["saved"] == [best, f"{best}.offbeat"]
    first, second, third = (rank["scores"] for rank in killed_and_joined)
    assert first == second > third > 0


@pytest.mark.parametrize("more", [{"mesh": object()}, {"cluster_environment": object()}])
def test_an_elastic_strategy_finds_its_ranks_itself(more: dict[str, Any]) -> None:
    from offbeat.integrations.lightning import OffbeatStrategy

    with pytest.raises(ValueError, match="elastic=True finds its ranks by OFFBEAT_STORE"):
        OffbeatStrategy("ddp", elastic=True, **more)


@pytest.mark.fault(
    "ranks have different numbers of batches under a framework",
    "with uneven(), all end together",
    group="Settings and arguments",
)
@pytest.mark.parametrize("case", ["ddp][sized", "ddp][stream", "local_sgd(every=8)][stream"])
def test_ranks_run_out_of_data(uneven: dict[str, Ranks], case: str) -> None:
    found = uneven[f"uneven[{case}]"]
    assert [rank["steps"] for rank in found] == [200] * 3
    assert all(rank["seen"] for rank in found)
    assert len({rank["end"] for rank in found}) == 1
