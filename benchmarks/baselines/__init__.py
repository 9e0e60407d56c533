"""Other tools, each run in an environment of its own that `make baselines` makes: no benchmark imports them itself.

What changes a layout beside ours, in `benchmarks.transitions`, and what was needed to run it without a GPU:

- torch's distributed checkpoint: nothing (`benchmarks/transitions/checkpoint.py`).
- Megatron-core 0.16.1, in-memory refit: a service that copies on the CPU, through its own extension point.
- Megatron-core 0.16.1, distributed checkpoint: three uses of CUDA replaced.
- DeepSpeed 0.19.8, universal checkpoint: its CPU accelerator. Data parallelism stands for the pipeline in the source.
- torchft 0.2.0, in-place transport: nothing. It copies shards; it does not change layouts.
- Tenplex, state transformer: built from source with Go 1.19 (`make build/tenplex/mlfsd TENPLEX=...`), its server bound
  to loopback. What it gets wrong where shards are joined is counted in the table.
- Not run: Oobleck, which needs CUDA and private interfaces of torch 2.0; Gemini, which was not tried.
"""
