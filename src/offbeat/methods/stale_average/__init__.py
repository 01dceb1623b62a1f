"""DASO (Coquelin et al. 2021): asynchronous, hierarchical averages of models between nodes."""
