"""From users' own files to those that the benchmarks read."""
