"""Measurements that anybody can repeat: ``python -m benchmarks NAME --json``."""

from collections.abc import Mapping

# Name -> the function that measures. Text, so that a benchmark imports its subject only when it is run.
BENCHMARKS: Mapping[str, str] = {
    "accuracy": "benchmarks.accuracy:run",
    "sweep_choices": "benchmarks.sweep_choices:run",
    "few_rows": "benchmarks.few_rows:run",
    "validate_speed": "benchmarks.validate_speed:run",
    "departures": "benchmarks.departures:run",
    "departure_terms": "benchmarks.departure_terms:run",
    "advice": "benchmarks.advice:run",
    "cold_start": "benchmarks.cold_start:run",
    "reference_layouts": "benchmarks.reference_layouts:run",
    "setups": "benchmarks.setups:run",
    "simulate_pipeline": "benchmarks.simulate_pipeline:run",
    "estimate_batch": "benchmarks.estimate_batch:run",
    "convert_stream": "benchmarks.convert_stream:run",
    "plan_70b_16": "benchmarks.plan_speed:llama_70b",
    "plan_405b_512": "benchmarks.plan_speed:llama_405b",
    "plan_gpt3_512": "benchmarks.plan_speed:gpt3",
    "plan_all": "benchmarks.plan_all:run",
    "plan_scaling": "benchmarks.plan_scaling:run",
    "certificate": "benchmarks.certificate:run",
    "solve_block": "benchmarks.solve_block:run",
    "local_prediction": "benchmarks.local_prediction:run",
    "checkpoint_bandwidth": "benchmarks.checkpoint_bandwidth:run",
    "load_weights": "benchmarks.load_weights:run",
    "runtime_vs_plain": "benchmarks.runtime_vs_plain:run",
    "sharded_vs_plain": "benchmarks.sharded_vs_plain:run",
    "kernel_counts": "benchmarks.kernel_counts:run",
    "metrics_cost": "benchmarks.metrics_cost:run",
    "loader_start": "benchmarks.loading:loader_start",
    "loader_wait": "benchmarks.loading:loader_wait",
    "tokenize_speed": "benchmarks.tokenize_speed:run",
    "report_page": "benchmarks.report_page:run",
    "shard_module": "benchmarks.shard_module:run",
    "bytes_vs_gspmd": "benchmarks.bytes_vs_gspmd:run",
    "foreign_modules": "benchmarks.foreign_modules.table:run",
    "foreign_stacks": "benchmarks.foreign_stacks.table:run",
    "sweep_overhead": "benchmarks.sweep_overhead:run",
}

# Suites of parts, of the accelerators of a machine: name -> benchmarks.guarded.Suite. ``all`` leaves them out.
SUITES: Mapping[str, str] = {
    "on_gpu": "benchmarks.on_gpu:SUITE",
    "on_trainium": "benchmarks.on_trainium:SUITE",
}

# Benchmarks that take many minutes, which ``all`` leaves out.
LONG = ("foreign_modules", "foreign_stacks")
