"""Emulated networks: the nodes of a cluster on one machine, with slow links and injected faults.

:class:`Lab` runs a command on nodes in network namespaces, behind links of limited rate and with
latency.
:class:`Loopback` runs it over the loopback interface, without root and without limits. Faults slow
nodes down, take links down and kill ranks. The command line is ``offbeat lab``.
"""

from offbeat.lab.emulated import Lab
from offbeat.lab.faults import Cut, Fault, Kill, Straggler
from offbeat.lab.network.iproute import Unavailable
from offbeat.lab.runner import Loopback, Runner

__all__ = ["Cut", "Fault", "Kill", "Lab", "Loopback", "Runner", "Straggler", "Unavailable"]
