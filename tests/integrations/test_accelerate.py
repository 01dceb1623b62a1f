"""Accelerate with offbeat, in two processes. All cases run once, since imports take seconds."""

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the accelerate extra"),
]
Cases = dict[str, list[dict[str, Any]]]


def test_ddp_equals_the_ddp_of_accelerate(cases: Cases) -> None:
    for found in cases["ddp"]:
        assert found["equal"]
        assert 1 <= found["models_sent_per_step"] < 1.2  # once per step, not per backward


@pytest.mark.parametrize("recipe", ["sgp", "local_sgd"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(cases: Cases, recipe: str) -> None:
    first, second = cases[f"resume {recipe}"]
    for found in (first, second):
        assert found["own"]
        assert found["end"]
        assert {"offbeat-save1-rank0-of-2.pt", "offbeat-save1-rank1-of-2.pt"} <= {*found["files"]}
    assert first["at_half"] != second["at_half"]  # there was something to keep apart


@pytest.mark.parametrize("recipe", ["sgp", "local_sgd"])
def test_the_saved_model_is_the_average(cases: Cases, recipe: str) -> None:
    for found in cases[f"resume {recipe}"]:
        assert found["average_is_saved"]
        assert found["average_is_hooked"]  # by a save hook of the user


@pytest.mark.parametrize(("recipe", "skips"), [("sgp", [0, 1]), ("ddp", [1, 1])])
def test_all_ranks_step_although_a_scaler_skips(
    cases: Cases, recipe: str, skips: list[int]
) -> None:
    first, second = cases[f"overflow {recipe}"]
    assert [first["skips"], second["skips"]] == skips
    assert first["steps"] == second["steps"] == 20
    assert first["end"] == second["end"]


def test_a_run_chooses_its_method(cases: Cases) -> None:
    first, second = cases["chooses"]
    assert first == second
    assert first["decisions"][0] == 5


def test_two_models_train_in_turns(cases: Cases) -> None:
    first, second = cases["gan"]
    assert first["ddp"]
    assert second["ddp"]
    assert first["resumed"]
    assert second["resumed"]
    assert first["differ"] != second["differ"]


def test_a_copy_of_the_model_is_plain(cases: Cases) -> None:
    assert all(found["plain"] == [True, True] for found in cases["copies"])


def test_an_accelerator_trains_again(cases: Cases) -> None:
    assert all(found["same_files"] for found in cases["again"])


@pytest.mark.fault(
    "a rank cannot write its file of a checkpoint of Accelerate",
    "ValueError on all ranks; `newest_checkpoint` returns the one before",
    group="Checkpoints",
)
def test_the_newest_checkpoint_is_one_of_all_ranks(cases: Cases) -> None:
    first, second = cases["interrupted"]
    for found in (first, second):
        assert found["before"] is None
        assert "rank 1: cannot write its state to" in found["refused"]
        assert found["host"]
        assert found["newest"] == "v1.0_10"
        assert found["resumed"]
    assert (first["incomplete"], second["incomplete"]) == (1, 0)
    assert (first["overwrites"], second["overwrites"]) == (1, 0)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("several", "got 2 models with trainable parameters and 2 optimizers; call it once"),
        ("sharded", "configured for FSDP, and offbeat exchanges whole models"),
        ("wrapped", "offbeat.ddp(broadcast_buffers=False)"),
        ("unset", "OFFBEAT_ALGORITHM"),
        ("unwritten", "rank 0: cannot write the checkpoint: no space left"),
        ("registered", "remove register_for_checkpointing(replica)"),
        ("loaded", "every rank saves and loads its own"),
        ("lost", "rank 1's file is missing"),
    ],
)
def test_errors_name_the_fix_on_all_ranks(cases: Cases, error: str, text: str) -> None:
    first, second = cases["errors"]
    assert text in first[error]
    assert text in second[error]


def test_the_environment_names_the_algorithm(cases: Cases) -> None:
    assert all("every=3" in found["from_environment"] for found in cases["errors"])


def test_the_page_trains(cases: Cases) -> None:
    assert all(found["loss"] < 0.01 for found in cases["page"])


@pytest.mark.timeout(150)
@pytest.mark.fault(
    "rank 0 is killed under Accelerate, and another process joins",
    "the others train on and save; the new rank has their state",
    group="Losses that a run survives",
)
def test_a_killed_rank_and_one_that_joins(killed_and_joined: list[dict[str, Any]]) -> None:
    for rank in killed_and_joined:
        found = rank["alike"]
        assert found["lr"] == [found["rate"]] == [pytest.approx(0.01 * 0.999 ** found["steps"])]
        assert "model.safetensors" in rank["saved"]
        assert rank["sent in no_sync"] == 0
    assert sum(rank["first"] for rank in killed_and_joined) == 1
    mine = [row for rank in killed_and_joined for row in rank["mine"]]
    assert sorted(mine) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd"])
def test_ranks_run_out_of_data(uneven: Cases, recipe: str) -> None:
    found = uneven[recipe]
    assert all(rank == found[0] for rank in found)
    assert found[0]["batches"] == found[0]["steps"] == 100
