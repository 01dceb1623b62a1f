"""Two of three sites go on while all ranks of the third are killed, and it joins again."""

import os
import signal
import sys
import tempfile
import threading
import time
from math import inf
from pathlib import Path

from torch.distributed import TCPStore

from bench.elastic.runs import RESOLVER
from bench.elastic.score import read, score
from bench.elastic.worker import Log, work
from bench.harness import GOAL, Bench, Claim, Result, command, ranks
from bench.internet.sites import FAR, NEAR, SITES

TEXT = "diloco(every=10,delay=5)"
PAUSE, LAST, KILL, AWAY = 1.0, 60, 15.0, 15.0  # seconds of a step, steps, and seconds
FAILS = range(SITES[0], SITES[0] + SITES[1])
HEADINGS = ("ranks", "useful", "longest gap", "back after its imports")
BENCH = Bench(name="internet/outage", minutes=3)


def live(folder: Path) -> None:
    """One life of a rank: train to the last step, or until the site fails."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    store, is_first = TCPStore(host, int(port), is_master=False), not [*folder.glob(f"{rank}.*")]
    path = folder / f"{rank}.{time.monotonic_ns()}"
    store.set("last", str(LAST))
    store.set(f"started {rank}", "")

    def fail() -> None:
        """With all of the site, some time after all ranks have started."""
        store.wait([f"started {each}" for each in range(size)])
        time.sleep(KILL)
        Log(path)("killed")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank in FAILS and is_first:
        threading.Thread(target=fail, daemon=True).start()
    work(f"{host}:{port}", size, rank, TEXT, PAUSE, path)


@command(BENCH)
def app() -> Result:
    """Let the second site fail in the middle of a run; it starts again after 15 s."""
    os.environ |= RESOLVER
    with tempfile.TemporaryDirectory() as name:
        once = f"{sys.executable} -m bench.internet.outage {name}"
        with ranks.nodes(sum(SITES), 1, NEAR, sites=SITES, between=FAR) as runner:
            ranks.run(runner, ["sh", "-c", f"until {once}; do sleep {AWAY}; done"])
        lives = read(Path(name))
    for life in lives:
        life.death = life.steps[-1].end if life.death == inf else life.death
    ended = max(life.death for life in lives)
    began = max(life.steps[0].begin for life in lives if life.is_killed or life.rank not in FAILS)
    stays, fails = (
        score([life for life in lives if (life.rank in FAILS) == is_away], PAUSE, began, ended)
        for is_away in (False, True)
    )
    alike = len({life.digest for life in lives if not life.is_killed}) == 1
    back = f"{max(fails.back):.1f} s" if fails.back else "never"
    rows = [
        ("sites that stay", f"{stays.useful / stays.living:.1%}", f"{stays.gap:.1f} s", ""),
        ("the site that fails", f"{fails.useful / fails.living:.1%}", "", back),
    ]
    claims = [
        Claim("all ranks end with one model", "yes", "yes" if alike else "no", alike, GOAL),
        Claim("the site trains again", "yes", back, bool(fails.back), GOAL),
    ]
    title = f"14 ranks on three sites, {TEXT}; the second site is away for {AWAY:g} s"
    return Result(title, HEADINGS, rows, claims, {"stay": stays, "fail": fails})


if __name__ == "__main__":
    live(Path(sys.argv[1]))
