"""The workload of a step: batch, sequence, precision, optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autoshard.errors import InputError, in_range, inside, nearest, require
from autoshard.spec import record

Dtype = Literal["bf16", "fp16", "fp32", "fp64", "fp8", "int64"]
DTYPE_BYTES: dict[Dtype, int] = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int64": 8}

PrecisionName = Literal["bf16", "bf16-sr", "fp16", "fp32"]
Optimizer = Literal["adamw", "sgd"]  # sgd: weight - rate * gradient, no momentum, no decay
Documents = Literal["joined", "separate"]  # whether documents in one sequence attend to each other
BalancedOver = Literal["batch", "sequence"]  # the tokens over which experts shall be equally busy

# Fields of Workload that say how routers are trained.
ROUTER_TRAINING = ("router_balance_loss", "router_balance_over", "router_z_loss", "router_bias_speed")
MOST = 2**31 - 1  # sequences or tokens: products of sizes stay inside the 64 bits of numpy's integers
MAX_COEFFICIENT = 1e3  # of a loss of routers; published ones lie between 1e-4 and 1e-1
MAX_BIAS_SPEED = 1.0  # scores lie between 0 and 1, and DeepSeek-V3 had 0.001
MAX_CAPACITY = 1e6  # slots of an expert over its equal share of the tokens: more than there are experts
# How far the busiest of 64 experts lies above the mean of its layer: 0.72 and 0.52 in models of 1B and 3B parameters
# with an auxiliary loss, 0.04 with a bias in its place (Wang et al., arXiv 2408.15664, 2024, table 2, MaxVio_global).
EXPERT_IMBALANCE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The number format of each part of the training state; without ``masters`` the weights themselves are updated.

    ``products`` is the format of activations and weights in matrix products, where that is another one.
    """

    weights: Dtype
    activations: Dtype
    gradients: Dtype
    masters: Dtype | None
    moments: Dtype
    products: Dtype | None = None

    @classmethod
    def named(cls, text: str) -> "Precision":
        """Return the precision of this name, and with these parts in other formats.

        >>> Precision.named("bf16").masters, Precision.named("bf16,gradients=bf16").gradients
        ('fp32', 'bf16')
        """
        name, *changes = (part.strip() for part in text.split(","))
        precisions = dict[str, Precision](PRECISIONS.items())
        if name not in precisions:
            in_fp8 = " Products in FP8 are bf16,products=fp8." if name.lower().startswith("fp8") else ""
            reason = f"{name!r} is not a precision. {nearest(name, list(precisions))}{in_fp8}"
            raise InputError.of("precision", reason)
        pairs = (change.partition("=") for change in changes)
        formats = {part: None if dtype == "none" else dtype for part, _, dtype in pairs}
        with inside("precision"):
            return record.decode(cls, {**record.encode(precisions[name]), **formats})

    @property
    def name(self) -> str:
        """Its text in recipes and options: the named precision with the fewest differences, and these differences.

        >>> Precision.named("bf16,moments=bf16,gradients=bf16").name
        'bf16,gradients=bf16,moments=bf16'
        """
        texts = (",".join([name, *_differences(self, precision)]) for name, precision in PRECISIONS.items())
        return min(texts, key=lambda text: text.count(","))

    @property
    def rounds_stochastically(self) -> bool:
        """Whether weights are updated in BF16 themselves, where rounding to the nearest would lose small updates.

        >>> Precision.named("bf16-sr").rounds_stochastically, Precision.named("bf16").rounds_stochastically
        (True, False)
        """
        return self.masters is None and self.weights == "bf16"

    def state_bytes(self, num_moments: int) -> Mapping[str, int]:
        """Return the bytes of one weight, of its gradient, its master and its optimizer's moments, by part.

        >>> Precision.named("bf16").state_bytes(num_moments=2)
        {'weights': 2, 'gradients': 4, 'masters': 4, 'optimizer': 8}
        """
        return {
            "weights": DTYPE_BYTES[self.weights],
            "gradients": DTYPE_BYTES[self.gradients],
            "masters": DTYPE_BYTES[self.masters] if self.masters else 0,
            "optimizer": num_moments * DTYPE_BYTES[self.moments],
        }


def _differences(precision: Precision, reference: Precision) -> list[str]:
    """Return the parts of a precision whose format is not that of ``reference``."""
    pairs = [(part.name, getattr(precision, part.name), getattr(reference, part.name)) for part in fields(Precision)]
    return [
        f"{name}={'none' if dtype is None else dtype}"
        for name, dtype, reference_dtype in pairs
        if dtype != reference_dtype
    ]


_BF16 = Precision(weights="bf16", activations="bf16", gradients="fp32", masters="fp32", moments="fp32")
PRECISIONS: Mapping[PrecisionName, Precision] = {
    "bf16": _BF16,
    "bf16-sr": replace(_BF16, masters=None),
    "fp16": replace(_BF16, weights="fp16", activations="fp16"),
    "fp32": replace(_BF16, weights="fp32", activations="fp32", masters=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step: sequences, their length, number formats, optimizer.

    Documents that share a sequence are ``joined`` (one text for attention and positions) or ``separate``. The
    coefficients of routers' losses are those of each layer; 0 leaves a loss out. ``router_bias_speed`` is by how much a
    step moves the correction bias of an expert that was chosen too often or too seldom.
    """

    seq_len: int
    global_batch: int
    precision: Precision
    optimizer: Optimizer = "adamw"
    clip_norm: float = 1.0
    expert_capacity: float | None = None
    documents: Documents = "joined"
    expert_imbalance: float = EXPERT_IMBALANCE  # of the busiest expert over the mean, where no token is dropped
    router_balance_loss: float = record.option(0.0)
    router_balance_over: BalancedOver = record.option("batch")
    router_z_loss: float = record.option(0.0)
    router_bias_speed: float = record.option(0.0)

    def __post_init__(self) -> None:
        require(
            *in_range(self, "seq_len", "global_batch", low=1, high=MOST),
            *in_range(self, "clip_norm", positive=True),
            *in_range(self, "expert_capacity", positive=True, high=MAX_CAPACITY),  # None: no token is dropped
            *in_range(self, "expert_imbalance", high=MAX_CAPACITY),
            *in_range(self, "router_balance_loss", "router_z_loss", high=MAX_COEFFICIENT),
            *in_range(self, "router_bias_speed", high=MAX_BIAS_SPEED),
            (
                self.router_balance_over == "batch" or self.router_balance_loss > 0,
                "router_balance_over",
                f"is {self.router_balance_over}, but router_balance_loss is 0, so that nothing is balanced",
            ),
        )

    @property
    def trains_routers(self) -> bool:
        """Whether routers have losses of their own."""
        return self.router_balance_loss > 0 or self.router_z_loss > 0

    @property
    def router_training(self) -> Mapping[str, Any]:
        """The fields that say how routers are trained; none of those that say nothing.

        >>> work = Workload(seq_len=8, global_batch=1, precision=Precision.named("bf16"), router_z_loss=0.001)
        >>> work.router_training
        {'router_z_loss': 0.001}
        """
        names = ROUTER_TRAINING if self.router_balance_loss else ROUTER_TRAINING[2:]
        return {name: value for name in names if (value := getattr(self, name))}

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes."""
        return self.seq_len * self.global_batch
