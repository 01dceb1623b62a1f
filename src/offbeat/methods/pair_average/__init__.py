"""AD-PSGD (Lian et al. 2018): asynchronous averages of pairs of models."""
