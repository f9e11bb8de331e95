"""The layouts that vendors document: ``vendor_layouts.json`` holds those of recipes, scripts and tables, with sources.

A layout has no dp, which takes the rest of the ranks; where the same source measured it, it has the seconds of a step.
What a source recomputes stands in names of operations, which every program knows.
"""

import json
import math
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources

from autoshard.plan.candidate import parse_pins
from autoshard.search.bound.request import Request
from autoshard.spec import record
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.units import counted

_NOT_SHAPE = ("name", "source", "max_positions", "norm_eps", "rotary_theta", "rotary_scaling")
_SHAPE = tuple(  # of a model, as far as layouts go
    entry.name for entry in fields(ModelSpec) if entry.name not in _NOT_SHAPE
)

_OPEN = 1.0  # a layout for any number of nodes is as far from a question as that for half or twice as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """Runs of a documented layout that say little, since their times had not settled: seconds of a step, the doubt."""

    step_s: tuple[float, ...]
    doubt: str  # what is measured, and what is not said
    source: str
    rows: tuple[str, ...] = field(repr=False)  # ids of the rows with these seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorLayout:
    """One documented layout, and what it was documented for."""

    vendor: str
    model: str  # a card of the catalogue
    chips: tuple[str, ...]
    nodes: int | None  # None where the source leaves it open
    seq_len: int
    global_batch: int
    layout: str  # a candidate in text, without dp
    source: str
    precision: str = ""  # of the run, as --precision takes it, where the source says it
    even: bool = False  # the source forces routers to choose all experts equally often
    lacks: str = ""  # what the source has beside the layout, and the layout cannot say
    measured_s: tuple[float, ...] = ()
    rows: tuple[str, ...] = field(default=(), repr=False)  # ids of the measured rows with these seconds
    unsettled: Unsettled | None = None

    def suits(self, model: ModelSpec, cluster: Cluster) -> bool:
        """Say whether the layout is for a model of this shape, on these chips."""
        if cluster.chip.name not in self.chips:
            return False
        card = load_model(self.model)
        return all(getattr(card, name) == getattr(model, name) for name in _SHAPE)

    def distance(self, request: Request) -> tuple[float, ...]:
        """Return the distance of a question from the documented one; simpler layouts come before others."""
        workload, nodes = request.workload, request.cluster.num_nodes
        sizes = parse_pins(self.layout)
        return (
            self.seq_len != workload.seq_len,
            _OPEN if self.nodes is None else abs(math.log2(self.nodes / nodes)),
            self.model != request.model.name,
            abs(math.log2(self.global_batch / workload.global_batch)),
            sum(sizes.get(axis, 1) != 1 for axis in ("tp", "pp", "cp", "ep")),
        )

    @property
    def options(self) -> str:
        """Return the options of the command under which a layout is as its source has it.

        >>> [layout.options for layout in vendor_layouts() if layout.model == "gpt-oss-120b"][0]
        '--precision bf16,gradients=bf16 --expert-imbalance 0 --fix kernels=mcore'
        """
        kernels = parse_pins(self.layout).get("kernels")
        stated = (("precision", self.precision), ("expert-imbalance", "0" if self.even else ""))
        fixed = ("fix", f"kernels={kernels}" if kernels else "")
        return " ".join(f"--{name} {value}" for name, value in (*stated, fixed) if value)

    def place(self, cluster: str) -> str:
        """Return in words the model and the machine that the layout was documented for."""
        return self.model if self.nodes is None else f"{self.model} on {self.nodes} x {cluster}"

    def words(self, cluster: str) -> str:
        """Return in words the question that the layout was documented for."""
        return (
            f"{self.place(cluster)}, {counted(self.seq_len, 'token')}, {counted(self.global_batch, 'sequence')} a step"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Documented:
    layouts: tuple[VendorLayout, ...]


@cache
def vendor_layouts() -> tuple[VendorLayout, ...]:
    """Return all layouts of vendors that autoshard knows."""
    text = (resources.files("autoshard.search.ask.vendor") / "vendor_layouts.json").read_text("utf-8")
    return record.decode(_Documented, json.loads(text), where="vendor_layouts.json").layouts
