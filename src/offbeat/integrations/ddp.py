"""LAGS-SGD as a communication hook of torch's DistributedDataParallel."""

from offbeat.methods.top_k.ddp_hook import LagsState, lags_hook

__all__ = ["LagsState", "lags_hook"]
