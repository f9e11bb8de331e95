"""The parts of ``python -m benchmarks on_gpu``: what each measures on a GPU, and goes through without one."""
