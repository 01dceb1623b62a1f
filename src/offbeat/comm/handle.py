"""An exchange in flight: what every function that communicates returns.

Works and buffers must live until they were waited for: with Gloo, dropping the handle of a send
whose receiver has long received made the group's next collectives time out.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work

from offbeat.comm.group import Group


@dataclass(eq=False)
class Handle:
    """An exchange in flight, and the buffers it uses until it was waited for."""

    group: Group
    works: list[Work] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    after: Callable[[], object] | None = None
    future: "Future[None] | None" = None
    launched: float = field(default_factory=time.perf_counter)
    arrived: float | None = None
    noted: "torch.futures.Future[None] | None" = None

    def wait(self) -> None:
        """Block until the results are there; raise the ranks' verdict if a peer is lost.

        On CUDA with NCCL this orders the current stream after the exchange instead.
        """
        started, meter = time.perf_counter(), self.group.meter
        with self.group.heartbeat.watching():
            self.join()
        ended = time.perf_counter()
        meter.seconds_stalled += ended - started
        meter.span("stall", started, ended)

    def join(self) -> None:
        """Wait without watching: for the group's own lane, whose submitter watches."""
        for work in self.works:
            work.wait()
        if self.future is not None:
            self.future.result()
        if self.noted is not None:
            # A thread of Gloo's that is still in our callback when Python ends aborts the process.
            self.noted.wait()
        if self.after is not None:
            self.after()
        arrived = self.arrived or time.perf_counter()
        self.group.meter.span(f"exchange:{self.group.axis}", self.launched, arrived)
        self.works, self.buffers = [], []
        self.after = self.future = self.noted = None

    def note_arrival(self, _: object) -> None:
        """The exchange is over, though nobody has waited for it yet."""
        self.arrived = time.perf_counter()
