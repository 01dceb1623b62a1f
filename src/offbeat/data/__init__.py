"""Which samples a rank trains on, so that each is used once an epoch, whoever comes and goes."""

from offbeat.data.balance import balanced_sizes
from offbeat.data.generation import Batch, Layout
from offbeat.data.plan import Change, Plan, Start
from offbeat.data.sampler import ElasticSampler

__all__ = ["Batch", "Change", "ElasticSampler", "Layout", "Plan", "Start", "balanced_sizes"]
