"""Measures Everystop: benchmarks that print ratios taken in one run."""
