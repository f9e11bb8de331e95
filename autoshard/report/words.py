"""What the parts of a step are called; apart from tables, so that JSON needs no terminal."""

TIME_WORDS = {
    "compute": "compute",
    "waiting": "waiting for kernels to start",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "sends between stages",
    "bubble": "waiting in the pipeline",
    "dp": "gradients and weights over dp",
    "update": "optimizer update",
    "fixed": "fixed time of every step",
}
