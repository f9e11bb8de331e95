"""Plans whose steps real torch_xla runs on one rank, or lowers for each of many."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from autoshard.spec.workload import Precision
from tests.neuron.cases import nxd_plan
from tests.ranks.cases import Task, llama
from tests.xla.sent import Sent

FOUR = {"num_layers": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and what a rank sends beyond its table, with the reason."""

    text: str
    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    why: str = ""

    def task(self, num_steps: int) -> Task:
        """Attention is in single operations: kernels are for NeuronCores."""
        precision = Precision.named(self.precision)
        text, model = f"{self.text},kernels=nxd_core", llama(vocab=32, **self.options)
        return Task.of(nxd_plan(text, model, precision=precision, **self.workload), num_steps)

    def beyond(self) -> Counter[Sent]:
        """Return what is sent beyond the table."""
        return Counter(Sent.parse(one) for one in self.more)


RUN = {
    "eight micro-batches": Case(text="tp=1,pp=1,dp=1"),
    "one micro-batch": Case(text="tp=1,pp=1,dp=1,mbs=8"),
    "BF16, FP32 masters": Case(text="tp=1,pp=1,dp=1,mbs=2", precision="bf16"),
    "without ZeRO-1": Case(text="tp=1,pp=1,dp=1,mbs=2,zero=0"),
    "full recompute": Case(text="tp=1,pp=1,dp=1,mbs=2,recompute=full"),
    "SGD": Case(text="tp=1,pp=1,dp=1,mbs=2", workload={"optimizer": "sgd"}),
}
_AGAIN = "what a layer ends with is sent again, though backward does not read it"
LOWERED = {
    "dp, ZeRO-1": Case(text="tp=1,pp=1,dp=4"),
    "tp + sp x dp, ZeRO-1": Case(text="tp=2,pp=1,dp=2,mbs=2"),
    "the same in BF16": Case(text="tp=2,pp=1,dp=2,mbs=2", precision="bf16"),
    "tp x dp without sp, BF16": Case(text="tp=2,pp=1,dp=2,mbs=2,sp=false", precision="bf16"),
    "tp + sp x dp without ZeRO-1": Case(text="tp=2,pp=1,dp=2,mbs=4,zero=0"),
    "full recompute": Case(
        text="tp=2,pp=1,dp=1,mbs=8,recompute=full", more=("reduce_scatter 4096 B of {0,1}",) * 2, why=_AGAIN
    ),
    "1f1b": Case(text="tp=1,pp=4,dp=1,mbs=2", options=FOUR),
    "1f1b, tp + sp": Case(text="tp=2,pp=2,dp=1,mbs=2"),
    "1f1b, dp, ZeRO-1": Case(text="tp=1,pp=2,dp=2,mbs=2"),
    "interleaved, tp + sp": Case(text="tp=2,pp=2,dp=1,vp=2,schedule=interleaved,mbs=1", options=FOUR),
}
