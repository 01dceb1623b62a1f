"""DiLoCo (Douillard et al. 2023), Streaming DiLoCo (2025), SlowMo (Wang et al. 2020).

And NoLoCo (Kolehmainen et al. 2025).
"""
