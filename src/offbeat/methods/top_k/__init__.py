"""LAGS-SGD (Shi et al. 2020): layer-wise adaptive top-k gradients, overlapped with backward."""
