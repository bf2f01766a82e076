"""Converts users' own files to the files that the benchmarks read."""
