"""Benchmarks of runs between sites that are 100 to 150 ms apart, as over the internet."""
