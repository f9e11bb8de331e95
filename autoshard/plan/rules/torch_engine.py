"""Rules of the torch engine, which executes tables and action lists itself, so that little is refused."""

from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.neuron import on_trn1
from autoshard.plan.rules.rule import Rule


def on_torch(c: Columns) -> bool:
    """Hold for plans of the torch engine."""
    return c.engine == "torch"


def _trn1(c: Columns) -> str:
    return f"engine=torch: PyTorch runs natively on trn2 and later, not on {c.cluster.name}. Use --engine nxd"


RULES = (
    Rule(
        id="torch-trn1",
        subject="engine",
        applies=lambda c: on_torch(c) and on_trn1(c),
        allows=lambda c: False,
        message=_trn1,
        source="AWS Neuron documentation, training/torchtitan (Neuron 2.33): TorchNeuron needs Trn2 or Trn3",
    ),
)
