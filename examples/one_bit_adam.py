"""1-bit Adam: a compressor of gradients that remembers the momentum, and Adam with fixed moments.

After a warm-up under ``ddp()`` and Adam, with ``replica.detach()``:

optimizer = frozen(optimizer)
algorithm = offbeat.Algorithm(offbeat.methods.Compressed(compressor=OneBit))
replica = offbeat.replicate(model, algorithm, optimizer=optimizer)
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import SGD, Adam

from offbeat.methods import Compressor
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device
from offbeat.transport.messages import exchange

BETA = 0.9  # of Adam's momentum


class OneBit(Compressor):
    """The momentum as one bit for each entry, from each member and back from their mean.

    c_i = b m + (1 - b) acc_i, s = (1/P) sum_i C(c_i) + e, m = C(s), e = s - m with
    C(x) = mean |x| sign(x). Each member finds m of a part. Sends 2 (P-1)/P (n/8 + 8 P) bytes.
    """

    def __init__(self, like: Tensor, group: Group) -> None:
        super().__init__(like, group)
        self.padding = -len(like) % (8 * group.size)
        self.m = torch.zeros_like(like)
        self.error = like.new_zeros((len(like) + self.padding) // group.size)

    def launch(self, acc: Tensor) -> Tensor:
        """Send each member its part of the signs."""
        momentum = torch.lerp(acc, self.m, BETA)
        rows = signs(momentum, self.group.size, self.padding)
        mine = rows.to(message_device(self.group, rows.device))
        self.rows = mine.clone()
        peers = [rank for rank in range(self.group.size) if rank != self.group.rank]
        sends, receives = ([(rank, part[rank]) for rank in peers] for part in (mine, self.rows))
        self.handle = exchange(sends, receives, self.group)
        sent = values(rows, acc).flatten()[: len(acc)]
        return acc - (momentum - sent) / (1 - BETA)

    def wait(self) -> Tensor:
        """Average and compress this member's part, and gather those of all."""
        self.handle.wait()
        total = values(self.rows.to(self.error.device), self.error).mean(0) + self.error
        row = signs(total, 1, 0)
        all_gather(self.rows.view(-1), row[0].to(self.rows.device), self.group).wait()
        m = values(self.rows.to(self.m.device), self.m).flatten()[: len(self.m)]
        mean = (m - BETA * self.m) / (1 - BETA)
        if mean.isfinite().all():  # else none of it is, on any member
            self.m, self.error = m, total - values(row, total)[0]
        return mean


def signs(x: Tensor, parts: int, padding: int) -> Tensor:
    """Return mean |x|, as 8 bytes, and the signs of a part of x in each row."""
    scale = x.abs().mean().double().view(1).view(torch.uint8).expand(parts, 8)
    bits = pad((x >= 0).byte(), (0, padding)).view(parts, -1, 8)
    return torch.cat([scale, (bits << torch.arange(8).to(bits)).sum(2).byte()], 1)


def values(rows: Tensor, like: Tensor) -> Tensor:
    """Return what rows of signs stand for, in the dtype of ``like``."""
    bits = rows[:, 8:, None] >> torch.arange(8).to(rows) & 1
    scales = rows[:, :8].flatten().view(torch.float64).to(like.dtype)
    return scales[:, None] * (2 * bits.flatten(1).to(like.dtype) - 1)


def frozen(adam: Adam) -> SGD:
    """Return Adam whose second moments stay: SGD of gradients divided by their roots."""
    (group,) = adam.param_groups
    scales, sgd = {}, SGD(group["params"], group["lr"], momentum=BETA, dampening=BETA)
    for p, state in adam.state.items():
        v = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"].item())
        # Where there was no gradient signs are noise: no step, instead of one divided by eps.
        scales[p] = (v.sqrt() + group["eps"]).masked_fill(v == 0, torch.inf)
        sgd.state[p]["momentum_buffer"] = state["exp_avg"] / scales[p]

    def divide(*_: object) -> None:
        for p, scale in scales.items():
            p.grad.div_(scale)

    sgd.register_step_pre_hook(divide)
    return sgd
