"""A point of the search as one line of text: ``tp=32,pp=8,dp=2,recompute=selective[attend]``."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from autoshard.errors import Fault, InputError, require
from autoshard.plan import keys
from autoshard.plan.recompute import Recompute, show_stages
from autoshard.plan.run_length import compress
from autoshard.spec.placement import Placement

ALWAYS_PRINTED = ("tp", "pp", "dp")

CpOrder = Literal["contiguous", "zigzag"]
Zero = Literal[0, 1, 3]  # which states dp ranks share: none; optimizer and masters; gradients and weights as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Every choice of the outer search; None means the default of the cluster or the model.

    >>> str(Candidate.parse("dp=2,tp=32,pp=8,cp=1,sp=true"))
    'tp=32,pp=8,dp=2'
    >>> Candidate.parse("tp=32,pp=8", num_ranks=512).dp
    2
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1  # a part of dp: dp = edp * ep
    dp: int = 1
    vp: int = 1
    mbs: int = 1
    sp: bool | None = None  # None: true when tp > 1
    zero: Zero = 1
    schedule: str = "1f1b"
    recompute: tuple[Recompute, ...] = (Recompute(),)  # one for all stages, or one per stage
    stages: tuple[int, ...] | None = None  # layers per stage; None: even
    place: Placement | None = None  # of the ranks of a node on the mesh
    kernels: str | None = None
    cp_kind: Literal["ring", "all_to_all"] = "ring"
    cp_order: CpOrder = "contiguous"
    boundary: str | None = None
    lnc: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, and bring equal meanings into one form."""
        require(*((value >= 1, f"{name}={value}", "must be at least 1") for name, value in self._counts()))
        require(
            (len(self.recompute) >= 1, "recompute", "must name at least one stage"),
            (self.stages is None or bool(self.stages), "stages", "must name at least one stage"),
        )
        if self.sp is not None and self.sp == (self.tp > 1):
            object.__setattr__(self, "sp", None)
        if len(self.recompute) == self.num_stages and len(set(self.recompute)) == 1:
            object.__setattr__(self, "recompute", self.recompute[:1])

    def _counts(self) -> list[tuple[str, int]]:
        names = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs", *(["lnc"] if self.lnc is not None else []))
        return [(name, getattr(self, name)) for name in names] + [("stages", size) for size in self.stages or ()]

    @classmethod
    def parse(cls, text: str, num_ranks: int | None = None) -> "Candidate":
        """Read the text form, keys in any order; ``dp`` may be left out when the number of ranks is known."""
        values: dict[str, Any] = dict(parse_pins(text))
        if "dp" not in values:
            values["dp"] = _missing_dp(values, num_ranks)
        return cls(**values)

    def __str__(self) -> str:
        """Print the canonical text form: keys at their default are left out, except tp, pp and dp."""
        return ",".join(
            f"{field.name}={show_value(field.name, getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.name in ALWAYS_PRINTED or getattr(self, field.name) != field.default
        )

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between the blocks are cut along the sequence over tp."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def num_ranks(self) -> int:
        """Ranks that the candidate uses."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all chunks."""
        return self.pp * self.vp

    def recompute_of(self, stage: int) -> Recompute:
        """Give the Recompute of one stage."""
        return self.recompute[0] if len(self.recompute) == 1 else self.recompute[stage]


def parse_pins(text: str) -> Mapping[str, object]:
    """Read some keys of a candidate, typed, as after ``--fix``; every fault is reported at once.

    >>> dict(parse_pins("pp=8,sp=false"))
    {'pp': 8, 'sp': False}
    """
    values: dict[str, object] = {}
    faults: list[Fault] = []
    for pair in keys.split_pairs(text):
        try:
            key, value = keys.read_pair(pair)
        except InputError as error:
            faults.extend(error.under(pair).faults)
            continue
        if key in values:
            faults.append(Fault(where=pair, message=f"{key} is given twice; keep one"))
        values[key] = value
    if faults:
        raise InputError(faults)
    return values


def show_pins(pins: Mapping[str, Any]) -> str:
    """Print what ``parse_pins`` reads.

    >>> show_pins(parse_pins("pp=2,recompute=full*2,sp=false"))
    'pp=2,recompute=full*2,sp=false'
    """
    return ",".join(f"{key}={show_value(key, value)}" for key, value in pins.items())


def _missing_dp(values: Mapping[str, Any], num_ranks: int | None) -> int:
    if num_ranks is None:
        raise InputError.of("dp", "missing; add dp=N")
    sizes = {name: int(values.get(name, 1)) for name in ("tp", "pp", "cp")}
    product = math.prod(sizes.values())
    if num_ranks % product:
        shown = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError.of(shown, f"tp*pp*cp is {product} and does not divide the {num_ranks} ranks of the cluster")
    return num_ranks // product


def show_value(name: str, value: Any) -> str:
    """Print the value of one key."""
    if name == "recompute":
        return show_stages(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return compress(map(str, cast(tuple[int, ...], value)))
    return str(value)
