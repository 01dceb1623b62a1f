"""What all benchmarks share: declaration, measurement, report, tables, execution."""
