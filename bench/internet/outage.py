"""A whole site fails in the middle of a run and returns: the others go on.

Fourteen ranks on sites of 4, 4 and 6, as in internet/sites. All ranks of the second site are killed
at one moment, and started again after 15 s.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.elastic.score import Life, Score, score
from bench.harness import GOAL, Bench, Claim, Result, command, console
from bench.harness.environment import environment
from bench.harness.ranks import nodes
from bench.internet.sites import FAR, NEAR, SITES

TEXT = "diloco(every=10,delay=5)"
PAUSE, LAST, KILL, AWAY = 1.0, 60, 15.0, 15.0  # seconds of a step, steps, and seconds
FAILS = range(SITES[0], SITES[0] + SITES[1])
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
BENCH = Bench(
    name="internet/outage",
    claim="Two sites go on while the third fails, and it joins again",
    minutes=3,
)


class Watch:
    """Knows the process of every rank, and kills those of a site once all have started."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.killed: dict[int, int] = {}
        self.when = 0.0

    def on_line(self, rank: int | None, line: str) -> None:
        """Note a process; the last one to start is followed by the failure."""
        if rank is None or not line.startswith("pid "):
            console.print(f"{rank}: {line}", style="dim", markup=False)
            return
        self.pids[rank] = int(line.split()[1])
        if len(self.pids) == sum(SITES) and not self.killed:
            self.killed = dict.fromkeys(FAILS, 0)
            threading.Timer(KILL, self.fail).start()

    def fail(self) -> None:
        """End the processes of the site."""
        self.when = time.monotonic()
        self.killed = {rank: self.pids[rank] for rank in FAILS}
        for pid in self.killed.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def train(folder: Path) -> tuple[Score, Score, list[Life]]:
    """Run it, and return the scores of the sites that stay and of the one that fails."""
    watch, began = Watch(), time.monotonic()
    settings = f"{folder} '{TEXT}' {LAST} {PAUSE}"
    again = f"until {sys.executable} -m bench.internet.worker {settings}; do sleep {AWAY}; done"
    with nodes(sum(SITES), 1, NEAR, sites=SITES, between=FAR) as runner:
        env = environment() | RESOLVER
        if runner.run(["sh", "-c", again], env=env, on_line=watch.on_line):
            raise RuntimeError("a rank failed")
    lives = []
    for rank in range(sum(SITES)):
        files = sorted(folder.glob(f"{rank}.*"))
        for path in files:
            is_killed = path != files[-1]
            lives.append(Life.read(path, rank, watch.when if is_killed else 0.0, is_killed))
    for life in lives:
        life.death = life.death or life.steps[-1].end
    ended = max(life.death for life in lives)
    began = max(life.steps[0].begin for life in lives if life.is_killed or life.rank not in FAILS)
    stays = [life for life in lives if life.rank not in FAILS]
    fails = [life for life in lives if life.rank in FAILS]
    return score(stays, PAUSE, began, ended), score(fails, PAUSE, began, ended), lives


@command(BENCH)
def app() -> Result:
    """Let the second site fail."""
    with tempfile.TemporaryDirectory() as name:
        stays, fails, lives = train(Path(name))
    share = stays.useful / stays.living
    alike = len({life.digest for life in lives if not life.is_killed}) == 1
    back = f"{max(fails.back):.1f} s" if fails.back else "never"
    rows = [
        ("sites that stay", f"{share:.1%}", f"{stays.gap:.1f} s", ""),
        ("the site that fails", f"{fails.useful / fails.living:.1%}", "", back),
    ]
    claims = [
        Claim("all ranks end with one model", "yes", "yes" if alike else "no", alike, GOAL),
        Claim("the site trains again", "yes", back, bool(fails.back), GOAL),
    ]
    title = f"14 ranks on three sites, {TEXT}; the second site is away for {AWAY:g} s"
    headings = ("ranks", "useful", "longest gap", "back after its imports")
    return Result(title, headings, rows, claims, {"stay": stays, "fail": fails})
