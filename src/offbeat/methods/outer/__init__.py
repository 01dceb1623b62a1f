"""DiLoCo (Douillard et al. 2023), Streaming DiLoCo (2025), SlowMo (Wang et al. 2020)."""
