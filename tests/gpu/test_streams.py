"""Ranks that compute on streams of their own, which kernels delay that do nothing but sleep."""

import numpy as np
import torch
from torch.optim import SGD

import offbeat
from offbeat.testing import ThreadWorld, snapshot
from offbeat.transport.world import World
from problems import START, Quadratic, flat, gradient
from recipe_cases import Case, every_repeatable_recipe

LR, STEPS, SLEEP = 0.1, 8, 2_000_000  # cycles: some milliseconds


@every_repeatable_recipe
def test_messages_carry_what_delayed_streams_compute(case: Case) -> None:
    nodes = case.nodes(4)

    def worker(world: World) -> list[np.ndarray]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model = Quadratic()
            replica = offbeat.replicate(model, case.algorithm, mesh=world)
            optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
            seen = [flat(snapshot(model))]
            for _ in range(STEPS):
                value = model(world.rank)
                torch.cuda._sleep(SLEEP)  # gradients are late
                value.backward()
                torch.cuda._sleep(SLEEP)  # and so are parameters
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
                seen.append(flat(snapshot(model)))
            replica.detach()
        return seen

    ours = np.array(ThreadWorld(nodes=nodes).run(worker)).swapaxes(0, 1)
    assert case.reference is not None
    theirs = case.reference(START, gradient, nodes=nodes, steps=STEPS, lr=LR, momentum=0.9)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=case.tolerance)
