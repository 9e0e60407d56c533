"""Other tools, each run in an environment of its own: nothing here is imported by the benchmarks."""
