"""The handle of an exchange in flight, which every function that communicates returns.

Works and buffers must be kept until they were waited for: with Gloo, dropping the handle of a send
whose receiver has long received made the group's next collectives time out.
"""

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from offbeat.transport.group import Group
from offbeat.transport.patience import outlast, outlast_collectives, outlast_messages

Result = TypeVar("Result")


@dataclass(eq=False)
class Handle:
    """Represents an exchange in flight; :meth:`wait` blocks until its results have arrived.

    Attributes:
        group: the group over which it runs.
        works: works of torch to wait for.
        buffers: tensors in use until then.
        is_paired: whether the works are messages of Gloo between two members.
        after: called by the wait once all has arrived, for example to divide a sum.
        future: end of the part that runs on the group's own thread, if there is one.
        launched: when it was launched, in seconds of ``time.perf_counter()``.
        arrived: when its last work completed, while telemetry records.
        noted: completes once ``arrived`` is set.
    """

    group: Group
    works: list[Work] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    is_paired: bool = False
    after: Callable[[], object] | None = None
    future: "futures.Future[None] | None" = None
    launched: float = field(default_factory=time.perf_counter)
    arrived: float | None = None
    noted: "Future[None] | None" = None

    def __post_init__(self) -> None:
        """Note the works for the closing of the group."""
        self.group.in_flight.add(self)

    def then(self, function: Callable[[], object]) -> None:
        """Call ``function`` too once all has arrived, after what is called already."""
        first = self.after
        self.after = function if first is None else lambda: (first(), function())

    def is_complete(self) -> bool:
        """Return whether :meth:`wait` would not block."""
        return all(work.is_completed() for work in self.works) and (
            self.future is None or self.future.done()
        )

    def wait(self) -> None:
        """Block until the results have arrived; raise :class:`PeerLost` if a rank is lost.

        On CUDA with NCCL this orders the current stream after the exchange and blocks no thread.
        """
        started, meter = time.perf_counter(), self.group.meter
        with self.group.detector.watching():
            self._outlast()
            self._arrive()
        ended = time.perf_counter()
        meter.seconds_stalled += ended - started
        meter.span("stall", started, ended)

    def join(self) -> None:
        """Block without failure detection: on the group's own thread, whose submitter detects."""
        for work in self.works:
            work.wait()
        if self.future is not None:
            self.future.result()
        self._arrive()

    def _outlast(self) -> None:
        group = self.group
        if self.is_paired:
            outlast_messages(self.works, group)
        elif self.works and group.backend(self.buffers[0].device) == "gloo":
            outlast_collectives(self.works, group)
        else:
            for work in self.works:
                work.wait()
        if self.future is not None:
            outlast(self.future, group)

    def _arrive(self) -> None:
        if self.noted is not None:
            # A thread of Gloo that is still in our callback when Python ends aborts the process.
            self.noted.wait()
        if self.after is not None:
            self.after()
        arrived = self.arrived or time.perf_counter()
        self.group.meter.span(f"exchange:{self.group.axis}", self.launched, arrived)
        self.drop()

    def drop(self) -> None:
        """Drop works and buffers."""
        self.works, self.buffers = [], []
        self.after = self.future = self.noted = None

    def note_arrival(self, _: object) -> None:
        """Set ``arrived``, from a thread of the backend."""
        self.arrived = time.perf_counter()


def when_arrived(handles: Sequence[Handle], combine: Callable[[], Result]) -> Future[Result]:
    """Return a future of torch of ``combine()``, called once all ``handles`` have arrived.

    For hooks of torch that must return a future. ``combine`` runs on a thread of the backend. It
    must not launch anything: ranks would launch in different orders.
    """
    works = [work.get_future() for handle in handles for work in handle.works]
    detectors = [handle.group.detector for handle in handles for _ in handle.works]

    def arrived(done: Future[list[Future[object]]]) -> Result:
        for work, detector in zip(done.value(), detectors, strict=True):
            with detector.explaining():
                work.value()  # raises if a rank was lost
        return combine()

    return torch.futures.collect_all(works).then(arrived)
