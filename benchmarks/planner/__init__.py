"""How well the planner predicts and searches: `python -m benchmarks.planner --data DIR`."""
