"""Steps of optimizers are told to the replicas of this process, which come and go meanwhile."""

import gc
import threading

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import offbeat
from offbeat.replica.backward import optimizer_steps
from offbeat.testing import ThreadWorld


class Counter:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.started = self.stepped = 0

    def optimizer_starts(self, optimizer: Optimizer) -> None:
        self.started += 1

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        self.stepped += 1


def test_a_watch_is_told_until_it_is_forgotten_or_dropped() -> None:
    optimizer, kept, dropped = SGD([nn.Parameter()], lr=0.1), Counter(), Counter()
    for counter in (kept, dropped):
        optimizer_steps.watch(counter)
    optimizer.step()
    del dropped
    gc.collect()
    optimizer.step()
    optimizer_steps.forget(kept)
    optimizer.step()
    assert (kept.started, kept.stepped) == (2, 2)


def test_replicas_may_come_and_go_in_the_middle_of_a_step() -> None:
    """Another thread attaches, or the collector removes a replica, while torch calls its hooks."""
    optimizer, replicas = SGD([nn.Parameter()], lr=0.1), []

    def in_a_thread() -> None:
        algorithm = offbeat.lags(0.05)
        thread = threading.Thread(
            target=lambda: ThreadWorld(2).run(
                lambda world: replicas.append(
                    offbeat.replicate(nn.Linear(2, 2), algorithm, mesh=world)
                )
            )
        )
        thread.start()
        thread.join()

    def let_go() -> None:
        replicas.clear()
        gc.collect()

    for action in (in_a_thread, let_go):
        # Before and after the hook of the package, whichever comes first.
        hooks = [register_optimizer_step_post_hook(lambda *_, a=action: a()) for _ in range(2)]
        optimizer.step()
        for hook in hooks:
            hook.remove()
    assert not replicas
