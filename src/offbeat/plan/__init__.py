"""Planning: what each method would take on a cluster, from the profile of one rank.

A profile is measured on one machine or written by hand. A model of time plays each method's
exchanges on the clocks of all ranks. The command line is ``offbeat plan``.
"""

from offbeat.plan.by_hand import read_profile
from offbeat.plan.fabric import Fabric
from offbeat.plan.predict import Parts, Prediction, predict
from offbeat.plan.profile import Parameter, Profile
from offbeat.plan.speeds import Speeds
from offbeat.plan.stragglers import Stragglers

__all__ = [
    "Fabric",
    "Parameter",
    "Parts",
    "Prediction",
    "Profile",
    "Speeds",
    "Stragglers",
    "predict",
    "read_profile",
]
