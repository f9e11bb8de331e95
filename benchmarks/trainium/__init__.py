"""The parts of ``python -m benchmarks on_trainium``: what each measures on Trainium, and goes through without one."""
