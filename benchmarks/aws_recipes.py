"""The training recipes that AWS ships for neuronx-distributed: from facts to the question that a planner is asked."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.search.bound.request import Request
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.files import read_data
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload

FACTS = Path(__file__).parents[1] / "tests" / "data" / "aws_recipes.json"
_KERNELS = {"flash": "nxd", "ring": "nxd", "core": "nxd_core"}  # by the attention that a recipe asks for
# mixed_precision keeps FP32 masters, gradients and moments; autocast keeps FP32 weights and casts what it multiplies:
# aws-neuron/neuronx-distributed-training docs/general/config_overview.rst, precision.
_PRECISIONS: Mapping[str, Precision] = {
    "mixed_precision": Precision.named("bf16"),
    "autocast": dataclasses.replace(Precision.named("fp32"), products="bf16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsRecipe:
    """The facts of one recipe; ``differs`` holds what its model has otherwise than our card of that name."""

    name: str
    source: str
    work: Literal["pretraining", "sft", "lora", "dpo", "orpo"]
    model: str
    differs: Mapping[str, int] = field(hash=False)
    cluster: str
    lnc: int | None
    nodes: int
    seq_len: int
    global_batch: int
    micro_batch: int
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    sp: bool
    zero1: bool
    kv_replicator: int | None  # how often NxD holds each KV head; null where a recipe does not say
    stages: str | None  # layers per stage in run lengths; null for the even split
    recompute: str
    attention: Literal["flash", "ring", "core"]
    precision: Literal["mixed_precision", "autocast"]
    expert_capacity: float | None  # null drops no token
    assumed: Mapping[str, str] = field(hash=False)  # what the recipe does not say, and why it is so here

    @property
    def kernels(self) -> str:
        """Name the Kernels that the recipe asks for."""
        return _KERNELS[self.attention]

    def spec(self) -> ModelSpec:
        """Return the model, with what the recipe changes."""
        changes: Mapping[str, int] = self.differs
        return dataclasses.replace(load_model(self.model), **changes)

    def request(self) -> Request:
        """Return the question that the recipe is an answer to; the kernels are given, as the recipe names them."""
        workload = Workload(
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            precision=_PRECISIONS[self.precision],
            expert_capacity=self.expert_capacity,
        )
        cluster = load_cluster(self.cluster, self.nodes, lnc=self.lnc)
        pins = {"kernels": self.kernels}
        return Request(model=self.spec(), cluster=cluster, workload=workload, engines=("nxd",), pins=pins)

    def candidate(self) -> Candidate:
        """Return the layout; dp is what is left of the ranks."""
        cluster = load_cluster(self.cluster, self.nodes, lnc=self.lnc)
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "vp": self.vp, "mbs": self.micro_batch}
        pairs = [f"{key}={size}" for key, size in sizes.items()]
        pairs += [f"sp={str(self.sp).lower()}", f"zero={int(self.zero1)}", f"recompute={self.recompute}"]
        pairs += [f"stages={self.stages}"] if self.stages else []
        pairs += [f"kernels={self.kernels}"] if self.kernels != cluster.kernels else []
        return Candidate.parse(",".join(pairs), cluster.num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    source: str
    recipes: tuple[AwsRecipe, ...]


def load_aws_recipes(path: Path = FACTS) -> tuple[AwsRecipe, ...]:
    """Read the facts; every fault names the file."""
    try:
        return record.decode(_Facts, read_data(path)).recipes
    except InputError as error:
        raise error.under(str(path)) from error
