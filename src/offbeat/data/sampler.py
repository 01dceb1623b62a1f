"""The sampler of a data loader whose run loses ranks and gains others."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, final

from torch.utils.data import Sampler

from offbeat.data.arguments import require_alike, require_enough, require_same, require_weights
from offbeat.data.balance import Pace, rebalanced, repaced
from offbeat.data.generation import Layout
from offbeat.data.in_step import require_due, require_near, require_not_made
from offbeat.data.intervals import Intervals, count
from offbeat.data.log import LIVES, Log, Training
from offbeat.data.order import Order
from offbeat.data.passes import Pass
from offbeat.data.plan import Plan, Start


@final
class ElasticSampler(Sampler[list[int]]):
    r"""Yields the batches of this rank, so that all ranks use each sample once an epoch.

    For ``DataLoader(data, batch_sampler=sampler)``, after :func:`offbeat.replicate`. When ranks are
    lost or join, the others divide what is left of the epoch anew, without communication: which
    samples a step takes is a function of the seed and of the changes, on which all ranks agree
    (:mod:`offbeat.data.plan`). Samples of a lost rank whose steps did not commit are given out
    again; :meth:`stats` counts them. All ranks make the same number of steps. The last ones of an
    epoch may be smaller; with fewer samples than batches left, some are repeated, and counted.

    ``set_epoch`` begins an epoch; the position is ``replica.steps``, saved with the replica.

    With ``most`` the batches of ranks that compute faster become larger, and those of slower ones
    smaller; with ``window`` slower ranks train on fewer batches: :meth:`balance`.

    >>> from types import SimpleNamespace as Stub  # for offbeat.replicate(...), a world of two
    >>> replica = Stub(steps=0, lost=[], joined=[], world=Stub(rank=0, ranks=[0, 1]))
    >>> replica.is_new = False
    >>> replica.gather, replica.register = lambda text: [text, text], lambda *_, **__: None
    >>> sampler = ElasticSampler(10, 2, replica, shuffle=False)
    >>> for batch in sampler:
    ...     print(batch)
    ...     if replica.steps == 0:
    ...         replica.lost.append({"rank": 1, "step": 0})
    ...     replica.steps += 1
    [0, 1]
    [2, 3]
    [4, 5]
    [6, 7]
    [8, 9]

    Extra memory: none for the permutation, which is computed for each batch; some bytes for each
    step of a lost rank that did not commit. Time: about 0.5 ms a batch. Bytes sent: some hundred
    when it is made, to compare the arguments; then none, but some ten in :meth:`balance`.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        replica: Training,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulate: int = 1,
        prefetch: int = 0,
        most: int | None = None,
        window: int | None = None,
    ) -> None:
        """Begin epoch 0, or where the others are on a rank that has joined a run; all ranks call.

        Args:
            length: the number of samples, at most 2^62.
            batch_size: the number of samples of a batch; with ``most`` their mean over ranks.
            replica: the :class:`offbeat.Replica` that is trained on the batches.
            seed: of the order; samplers of equal length need different seeds.
            shuffle: False for the samples in their own order.
            drop_last: leave out less than a whole step of all ranks at the end of an epoch.
            accumulate: the number of batches for each ``replica.step()``.
            prefetch: how many batches the loader draws ahead: ``num_workers * prefetch_factor``,
                and 1 more under frameworks that ask for the next batch early. A change of the
                ranks takes effect after as many batches: those that were drawn stay valid.
            most: the largest batch that fits into the memory of each rank, where sizes are to
                follow the speeds of ranks, with ``replicate(..., weighted=True)``; call
                ``replica.set_weight(len(batch))`` for each batch. None for equal sizes.
            window: the steps of which a slower rank leaves out as many as it has no time for, with
                ``replicate(..., weighted=True)`` and a method that exchanges parameters, such as
                ``every`` of ``local_sgd``. ``replica.step()`` makes those steps, too.

        Raises:
            ValueError: the same on all ranks, for a wrong argument of one of them or if they
                differ between ranks.
        """
        self._replica, self._asked, self._is_told, self._is_resumed = replica, 0, False, False
        self._loaded: tuple[Pass, int] | None = None
        arguments: dict[str, Any] = {"length": length, "batch_size": batch_size, "seed": seed}
        arguments |= {"shuffle": shuffle, "drop_last": drop_last, "accumulate": accumulate}
        arguments |= {"prefetch": prefetch, "most": most, "window": window}
        self._most, self._pace = most, Pace()
        self._resized: list[dict[str, Any]] = []
        fault = ""
        try:
            self._order = Order(length, seed, shuffle)
            self._layout = Layout(batch_size, accumulate, drop_last, prefetch, window or 0)
            require_enough(length, len(replica.world.ranks), self._layout)
            if (most, window) != (None, None):
                require_weights(most, window, self._layout, replica)
        except ValueError as error:
            fault = str(error)
        self._is_newcomer = replica.is_new  # the others have compared theirs before
        if not self._is_newcomer:
            require_alike(replica, arguments, fault)
        elif fault:
            raise ValueError(fault)
        self._pass = self._begin(0, (self._order.epoch(0),))
        self._due: int | None = replica.steps  # the step of the next batch of this pass, if known
        self._planned: tuple[Pass, tuple[int, ...], Plan] | None = None
        if window is not None:
            replica.weighting.follow(self.rests)
        order = "" if shuffle else ", in order"
        replica.register(f"sampler of {length} with seed {seed}{order}", self, is_saved=True)
        if self._is_told and window and replica.steps % window == 0:
            self.balance()  # as the others at the end of the step in which this rank has joined

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of one batch after the other, from ``replica.steps`` on."""
        step, _ = self._replica.steps, self._current()
        if not self._layout.window:  # with which a rank makes steps without batches
            require_due(self._due, step)
        while (batches := self._draw(step)) or self._rests(step):
            yield from batches
            step += 1

    def __len__(self) -> int:
        """The number of batches of this rank in this epoch, from its start, if ranks stay the same.

        Raises ``TypeError`` with ``window``, as for a stream: it follows the speeds.
        """
        if self._layout.window:
            raise TypeError(
                f"window={self._layout.window}: how many batches a rank has follows from its "
                "speed; iterate to the end"
            )
        current = self._current()
        steps = current.made + self._plan(current).end - current.start.step
        return steps * self._layout.accumulate

    def rests(self, step: int) -> bool:
        """Return whether this rank makes the next step without a batch, after ``step`` steps.

        With ``window``; all ranks ask in ``replica.step()``. Calls :meth:`balance` as windows end.
        """
        current = self._current()
        if step > current.start.step:
            self._note(self._plan(current), step - 1)
        if step % self._layout.window == 0:
            self.balance()
        return self._rests(step)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, on all ranks after the same step.

        The present one begins anew if no batch of it was drawn, and else goes on. Samples that
        returned too late for the epoch before come first. What is left of an epoch that was not
        trained to its end is dropped. With ``most`` it calls :meth:`balance`. With ``window`` ranks
        have made the same number of steps at the end of an epoch, and whenever it is a multiple of
        ``window``. A rank that joins, or resumes, begins at ``stats()["epoch"]``: an earlier epoch,
        whose samples would be used twice, is a ``ValueError``.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch={epoch!r}, expected a whole number, 0 or more")
        current = self._current()
        if epoch < current.epoch:
            raise ValueError(
                f"epoch={epoch}, but the run is in epoch {current.epoch}; where ranks join or a "
                "run resumes, begin the loop at sampler.stats()['epoch']"
            )
        self._asked = epoch
        if epoch != current.epoch:
            if self._most is not None:
                self.balance()
            self._pass = self._next(current, epoch)
        elif self._due == current.start.step:  # steps since then had no batches
            self._pass = current.begun_at(self._replica.steps, self._replica.world.ranks)
        else:
            return
        self._due = self._replica.steps

    def balance(self) -> dict[int, int]:
        """Let the sizes of batches follow the speeds of ranks; return them, by rank.

        All ranks call after the same step, such as every hundredth of a long epoch. The speed is
        the median over the steps since the last call of their time without waits for others. The
        sum of a step stays that of equal batches; sizes change where the step gains 2 % by it, in
        the step after the batches that loaders have drawn ahead. One small gather.

        With ``window`` it returns the steps of a window in which ranks have a batch: all, and for
        slower ranks those for which the others need the same time, an eighth at least. They change
        with the next window. Nobody needs to call it.
        """
        if not self._is_balanced:
            raise ValueError("balance() needs ElasticSampler(..., most=...), the largest batch")
        found: list[int] | None = None
        replica, step, layout = self._replica, self._replica.steps, self._layout
        told = replica.gather(json.dumps([self._member, self._pace.take()]))
        members, seconds = zip(*map(json.loads, told), strict=True)
        latest = self._plan(self._current()).latest
        before = dict(zip(latest.ranks, latest.sizes, strict=bool(latest.sizes)))
        sizes = [before.get(member, layout.usual) for member in members]
        if layout.window:
            found = repaced(sizes, seconds, layout.window)
            step += -(step + 1 + layout.lookahead) % layout.window
        elif self._most is not None:
            found = rebalanced(sizes, seconds, layout.usual * len(members), self._most)
        if found is not None:
            sizes = found
            pairs = [[member, size] for member, size in zip(members, sizes, strict=True)]
            self._resized.append({"step": step, "sizes": pairs})
        return {member % LIVES: size for member, size in zip(members, sizes, strict=True)}

    def begin_rest(self) -> bool:
        """Begin a pass over samples that returned too late for the epoch; return whether there are.

        For the end of the last epoch: a rank may be lost in its last steps. All ranks call; before
        it, ``finish()`` finds a loss that no step has found.
        """
        current, step = self._current(), self._replica.steps
        ended = current.ended(step)
        if left := current.carried(ended):
            start = ended.start._replace(left=left)
            begun = ended._replace(start=start, layout=self._layout, late=(), made=0)
            self._pass, self._due = begun, step
        return bool(left)

    def stats(self) -> dict[str, int]:
        """Return the epoch, and numbers of samples.

        "epoch": the next one if the end of one was loaded; "left": of this pass, at this step;
        "returned": given out again since lost ranks did not commit them; "repeated": used twice,
        as fewer than batches were left. The last two since the first epoch.
        """
        now = self._current().ended(self._replica.steps)
        left, is_over = count(now.start.left), self._is_resumed and self._due is None
        counts = {"returned": now.returned, "repeated": now.repeated}
        return {"epoch": now.epoch + (is_over and not left), "left": left, **counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks: plain values, a few for each change.

        It holds the replica's own lists of losses and joins: save or copy it before the next step.
        """
        steps = self._replica.steps
        if self._loaded is not None and steps < self._loaded[1]:  # the replica loads after it
            current, steps = self._loaded
        else:
            current = self._current()
        return {**current.saved(self._order, steps), "most": self._most}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``replica.steps`` steps, with any number of ranks; all ranks call.

        ``batch_size``, ``accumulate``, ``drop_last`` and ``prefetch`` may be others than before.

        Raises ``ValueError`` for the state of another order of samples.
        """
        loaded, step = Pass.read(state, self._order)
        if self._is_newcomer and not self._is_told:
            theirs = {**asdict(loaded.layout), "most": state["most"]}
            require_same({**asdict(self._layout), "most": self._most}, theirs)
            self._resized[:] = loaded.log.resized
            self._pass, self._is_told = loaded._replace(log=self._log()), True
            self._due = None
        else:
            self._loaded = loaded, step

    @property
    def _is_balanced(self) -> bool:
        return self._most is not None or self._layout.window > 0

    def _rests(self, step: int) -> bool:
        return self._plan(self._current()).rests(step, self._member)

    @property
    def _member(self) -> int:
        return self._log().member(self._replica.world.rank)

    def _log(self, known: tuple[int, int] = (0, 0)) -> Log:
        return Log(self._replica.lost, self._replica.joined, known, self._resized)

    def _begin(self, epoch: int, left: Intervals) -> Pass:
        """Return a pass of the present members; a loss that not all know of yet comes later."""
        step, replica = self._replica.steps, self._replica
        log = self._log((len(replica.lost), len(replica.joined)))
        start = Start(step, log.members(replica.world.ranks, step), left)
        return Pass(epoch, start, log, self._layout)

    def _current(self) -> Pass:
        """Return the present pass; a loaded one begins when it is first used, at that step."""
        if self._loaded is not None:
            self._pass, self._loaded, self._due = self._resumed(*self._loaded), None, None
        return self._pass

    def _resumed(self, loaded: Pass, step: int) -> Pass:
        if (steps := self._replica.steps) < step:
            raise ValueError(
                f"the state of the sampler is of step {step}, but the replica has made {steps} "
                "steps; load the state of the replica, too, before the first batch"
            )
        self._resized, self._is_resumed = [], True
        ours, theirs = ((each.batch_size, each.window) for each in (self._layout, loaded.layout))
        begun = self._begin(loaded.epoch, ())
        resumed = loaded.resumed(begun, keeps_sizes=self._is_balanced and ours == theirs)
        if self._asked > resumed.epoch:  # a loader loads it after the next epoch was asked for
            return self._next(resumed, self._asked)
        return resumed

    def _next(self, current: Pass, epoch: int) -> Pass:
        found = current.then(epoch, self._replica.steps, (self._order.epoch(epoch),))
        return found._replace(layout=self._layout)

    def _plan(self, current: Pass) -> Plan:
        sizes = tuple(map(len, (current.log.lost, current.log.joined, self._resized)))
        if self._planned is None or self._planned[0] is not current or self._planned[1] != sizes:
            self._planned = current, sizes, current.plan()
        return self._planned[2]

    def _draw(self, step: int) -> list[list[int]]:
        """Return the samples of the batches of this rank in a step."""
        current, steps = self._current(), self._replica.steps
        if self._is_newcomer and not self._is_told:
            raise ValueError(
                "this rank has joined a run and does not know which samples are used: the others "
                "have no sampler of this length and seed; make the same one on all ranks"
            )
        self._asked = 0
        require_near(step, steps, self._layout)
        plan = self._plan(current)
        batches = plan.batches(step, self._member)
        require_not_made(batches, step, steps, self._layout)
        self._due = step + 1
        if self._most is not None and steps > current.start.step:
            self._note(plan, steps - 1)
        return [self._order.samples(batch.positions) for batch in batches]

    def _note(self, plan: Plan, step: int) -> None:
        samples = sum(count(each.positions) for each in plan.batches(step, self._member))
        self._pace.note(step, samples, self._replica.stats()["last"])
