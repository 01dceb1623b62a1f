"""Where a Trainer is in the middle of a step, for ranks that join."""

import dataclasses
import json
from pathlib import Path
from typing import Any, final

from offbeat.extras import extra

with extra("transformers"):
    from transformers import Trainer
    from transformers.trainer import TRAINER_STATE_NAME


@final
class TrainState:
    """The counters and the schedule of a Trainer, handed over to ranks that join.

    A donor is asked for it in its optimizer step, when this step is not counted. A rank that joins
    resumes before it, exchanges nothing in it, and counts it together with the others: so it also
    takes part in the evaluation and the save that may follow.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Speak for ``trainer``."""
        self.trainer = trainer
        self._received: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        counters = json.dumps(dataclasses.asdict(self.trainer.state))
        return {"counters": counters, "scheduler": self.trainer.lr_scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it: Trainer reads counters from a file, and makes its schedule later."""
        self._received = state

    def write(self, folder: str) -> None:
        """Write the counters, as ``train(resume_from_checkpoint=folder)`` reads them."""
        Path(folder, TRAINER_STATE_NAME).write_text(self._received["counters"], "utf-8")

    def begin(self) -> None:
        """Load the schedule, which has set the learning rate to its first one."""
        scheduler = self.trainer.lr_scheduler
        scheduler.load_state_dict(self._received["scheduler"])
        groups = self.trainer.optimizer.param_groups
        for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
