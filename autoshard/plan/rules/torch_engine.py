"""Rules of the torch engine.

PyTorch's pipelines, tensor, sequence and data parallelism (ZeRO-1, and FSDP2 as ZeRO-3) compose, so little is
refused.
"""

from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.effect import SPLIT
from autoshard.plan.rules.neuron import on_trn1
from autoshard.plan.rules.rule import Rule, implies, one_of


def on_torch(c: Columns) -> bool:
    """Hold for plans of the torch engine."""
    return c.engine == "torch"


def _trn1(c: Columns) -> str:
    return f"engine=torch: PyTorch runs natively on trn2 and later, not on {c.cluster.name}. Use --engine nxd"


def _split_recompute(c: Columns) -> str:
    return (
        f"schedule={c.schedule},recompute={c.recompute}: PyTorch recomputes again for every part of a split backward, "
        f"or fails. Use recompute=none, or schedule={_WHOLE[str(c.schedule)]}"
    )


def _split_zero(c: Columns) -> str:
    return (
        f"schedule={c.schedule},zero=3: FSDP reduces gradients when the input's are done, before W has made them. Use "
        f"zero=1, or schedule={_WHOLE[str(c.schedule)]}"
    )


_WHOLE = {"zb_h1": "1f1b", "zb_v": "interleaved"}  # the nearest schedule with whole backwards

RULES = (
    Rule(
        id="torch-trn1",
        subject="engine",
        applies=lambda c: on_torch(c) and on_trn1(c),
        allows=lambda c: False,
        message=_trn1,
        source="AWS Neuron documentation, training/torchtitan (Neuron 2.33): TorchNeuron needs Trn2 or Trn3",
    ),
    Rule(
        id="torch-split-recompute",
        subject="schedule,recompute",
        applies=on_torch,
        allows=lambda c: implies(one_of(c.schedule, SPLIT), c.recompute == "none"),
        message=_split_recompute,
        source="measured with PyTorch 2.13 (torch/distributed/pipelining/_backward.py, ScheduleZBVZeroBubble): "
        "checkpointing ran 6.5 to 11 forwards per micro-batch, selective checkpointing raised",
    ),
    Rule(
        id="torch-split-zero",
        subject="schedule,zero",
        applies=on_torch,
        allows=lambda c: implies(one_of(c.schedule, SPLIT), c.zero != 3),
        message=_split_zero,
        source="PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: post_backward reduces when the "
        "gradients of a unit's inputs are done",
    ),
)
