"""Floor 3: how an Adasum travels, one algorithm a file; all give the same result."""

from offbeat.adasum_wire.all_reduce import adasum_all_reduce
from offbeat.adasum_wire.choose import METHODS, Method, choose
from offbeat.adasum_wire.cut import Cut
from offbeat.adasum_wire.gather import Gather
from offbeat.adasum_wire.gram import Gram
from offbeat.adasum_wire.narrow import Narrow
from offbeat.adasum_wire.peers import Peers
from offbeat.adasum_wire.rvhdd import Rvhdd
from offbeat.adasum_wire.wire import Verdict, Wire

__all__ = [
    "METHODS",
    "Cut",
    "Gather",
    "Gram",
    "Method",
    "Narrow",
    "Peers",
    "Rvhdd",
    "Verdict",
    "Wire",
    "adasum_all_reduce",
    "choose",
]
