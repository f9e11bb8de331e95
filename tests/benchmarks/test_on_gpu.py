"""What runs on a GPU where there is one, tried with small layers on a processor."""

import pytest

from benchmarks.on_gpu import layers_of, speeds

SMALL = {"hidden": 32, "ffn": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.slow
@pytest.mark.ranks
def test_both_run_and_reach_something():
    found = speeds(layers_of(SMALL, seq_len=16), device="cpu", backend="eager", pairs=2)
    ours, plain = found["gpu_ours_tflops"], found["gpu_plain_tflops"]
    assert isinstance(ours, float) and isinstance(plain, float) and ours > 0 and plain > 0
    assert found["gpu_speed"] == pytest.approx(ours / plain, abs=1e-3) and found["gpu_ours_mfu"] is None
