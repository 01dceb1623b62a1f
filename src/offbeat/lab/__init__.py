"""Emulated nodes on one machine: what a method buys on a slow network, and what it survives.

:class:`Lab` runs a command on nodes in network namespaces, behind links of limited rate;
:class:`Loopback` runs it without root and without limits. Faults make nodes slow, cut their links
and kill ranks. The command line is ``offbeat lab``.
"""

from offbeat.lab.emulated import Lab
from offbeat.lab.fault import Fault
from offbeat.lab.faults import Cut, Kill, Straggler
from offbeat.lab.iproute import Unavailable
from offbeat.lab.loopback import Loopback
from offbeat.lab.runner import Runner

__all__ = ["Cut", "Fault", "Kill", "Lab", "Loopback", "Runner", "Straggler", "Unavailable"]
