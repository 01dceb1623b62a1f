"""Trainer with offbeat, in two processes. All cases run once, since imports take seconds."""

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs the transformers extra"),
]
Cases = dict[str, list[dict[str, Any]]]


def test_ddp_equals_the_ddp_of_trainer(cases: Cases) -> None:
    """Under an optimizer that evaluates other parameters than it trains, too."""
    for found in cases["ddp"]:
        assert found["equal"]
        assert found["evaluated"]


def test_logs_show_the_traffic_of_a_step(cases: Cases) -> None:
    for found in cases["ddp"]:
        # In the history and for other callbacks. Gradients are sent once per step.
        assert found["seen"] == [True] * 4
        *sent, with_an_average = found["models_sent_per_step"]
        assert all(1 <= each < 1.1 for each in sent)
        assert with_an_average > 1.1
        assert all(0 < stalled < 10 for stalled in found["stalled"])


def test_a_run_chooses_its_method(cases: Cases) -> None:
    first, second = cases["chooses"]
    assert first == second
    assert first["decisions"][0] == 5


@pytest.mark.parametrize("recipe", ["sgp", "local_sgd"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(cases: Cases, recipe: str) -> None:
    first, second = cases[f"resume {recipe}"]
    for found in (first, second):
        assert found["own"]
        assert found["end"]
        assert {"offbeat-save1-rank0-of-2.pt", "offbeat-save1-rank1-of-2.pt"} <= {*found["files"]}
    assert first["at_half"] != second["at_half"]  # there was something to keep apart


@pytest.mark.fault(
    "a rank cannot write its file of a checkpoint of the Trainer",
    "ValueError on all ranks; `resume_from_checkpoint=True` takes the one before",
    group="Checkpoints",
)
def test_an_interrupted_checkpoint_is_not_taken(cases: Cases) -> None:
    for found in cases["interrupted"]:
        assert "rank 1: cannot write its state to" in found["refused"]
        assert found["equal"]


@pytest.mark.parametrize(("recipe", "scales"), [("sgp", [65536, 32768]), ("ddp", [32768] * 2)])
def test_all_ranks_step_although_a_scaler_skips(
    cases: Cases, recipe: str, scales: list[int]
) -> None:
    first, second = cases[f"overflow {recipe}"]
    assert [first["scale"], second["scale"]] == scales
    assert first["steps"] == second["steps"] == 20
    assert first["end"] == second["end"]


def test_the_average_is_evaluated_and_saved(cases: Cases) -> None:
    first, second = cases["best"]
    assert first["own"] != second["own"]
    assert first["evaluated"] == second["evaluated"]
    for found in (first, second):
        assert found["saved_is_evaluated"]
        assert found["undisturbed"]


def test_all_ranks_hold_the_best_model_at_the_end(cases: Cases) -> None:
    for found in cases["best"]:
        assert found["step"] < 20
        assert found["best"]
        assert found["score_again"]


def test_losses_of_steps_and_evaluations_are_reported(cases: Cases) -> None:
    for found in cases["best"]:
        assert len(found["losses"]) == 20
        assert all(loss > 0 for loss in found["losses"])
        assert found["heldout"] == found["eval_losses"]
        assert len(found["heldout"]) == 4


def test_a_trainer_trains_again_after_an_exception(cases: Cases) -> None:
    first, second = cases["again"]
    for found in (first, second):
        assert found["interrupted"]
        assert found["plain"]
    assert first["end"] == second["end"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("twice", "attach() was called before for this trainer"),
        ("sharded", "configured for DEEPSPEED, and offbeat exchanges whole models"),
        ("unset", "OFFBEAT_ALGORITHM"),
        ("buffers", "offbeat.ddp(broadcast_buffers=False)"),
        ("wrapped", "the model is wrapped in DistributedDataParallel"),
        ("lost", "rank 1's file is missing"),
        ("none", "No valid checkpoint found"),
    ],
)
def test_errors_name_the_fix_on_all_ranks(cases: Cases, error: str, text: str) -> None:
    first, second = cases["errors"]
    assert text in first[error]
    assert text in second[error]


def test_the_page_trains(cases: Cases) -> None:
    assert all(found["loss"] < 1 for found in cases["page"])  # 4.2 without training


@pytest.mark.timeout(150)
@pytest.mark.fault(
    "rank 0 is killed under the Trainer, and another process joins",
    "the others train on and save; the new rank has their state",
    group="Losses that a run survives",
)
def test_a_killed_rank_and_one_that_joins(killed_and_joined: list[dict[str, Any]]) -> None:
    for rank in killed_and_joined:
        found = rank["alike"]
        assert found["epoch"] * 4 == found["global_step"] == rank["steps"]
        assert found["adam"] == found["scheduled"] == rank["steps"]
        assert f"checkpoint-{rank['steps'] // 5 * 5}" in rank["saved"]
    assert sum(rank["first"] for rank in killed_and_joined) == 1
