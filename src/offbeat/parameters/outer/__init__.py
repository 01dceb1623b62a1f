"""DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025): outer optimizers of averages."""
