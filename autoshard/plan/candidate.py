"""A point of the search as one line of text: ``tp=32,pp=8,dp=2,recompute=selective[attend]``."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from autoshard.errors import Faults, InputError, nearest, require
from autoshard.layout.layout import Cuts, Layout
from autoshard.plan.recompute import Recompute, parse_stages, stages_text
from autoshard.schedule.builders import builders
from autoshard.spec.cluster import Placement
from autoshard.spec.repeats import compress, expand_counts, split_outside_brackets

_SIZES = ("tp", "pp", "cp", "ep", "dp", "vp", "mbs")
_BATCH, _TOKENS = ("edp", "ep"), (("cp",), ("kv", "rep"), ("cp", "kv", "rep"), ())  # as a boundary may cut them
_EXACT = 1e-9  # layers: shares are sums of floats
CpKind = Literal["ring", "all_to_all"]
CpOrder = Literal["contiguous", "zigzag"]
Fold = Literal["none", "tp", "cp", "cp.tp"]  # axes beside ep whose ranks hold other experts each
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
    zero_group: int | None = None  # ranks over which ZeRO divides states, the others hold copies; None: all of dp * cp
    weight_group: int | None = None  # ranks over which weights of ZeRO-3 rest; None: as states do
    schedule: str = "1f1b"
    recompute: tuple[Recompute, ...] = (Recompute(),)  # one for all stages, or one per stage
    stages: tuple[int, ...] | None = None  # layers per stage, at the ends perhaps none; None: even
    place: Placement | None = None  # of the ranks of a node on the mesh
    kernels: str | None = None
    cp_kind: CpKind = "ring"
    cp_order: CpOrder = "contiguous"
    boundary: str | None = None
    fold: Fold | None = None  # None: as is fastest
    lnc: int | None = None

    def __post_init__(self) -> None:
        counts = [(name, getattr(self, name)) for name in (*_SIZES, *(("lnc",) if self.lnc is not None else ()))]
        stages = self.stages or (1,)
        holds = min(stages) >= 0 and 0 not in stages[1:-1]
        alone = "the first may hold the embedding alone, and the last the head; all others have at least 1 layer"
        faults = [(value >= 1, f"{name}={value}", "must be at least 1") for name, value in counts]
        require(*faults, (holds, "stages", alone))
        require(
            (len(self.recompute) >= 1, "recompute", "must name at least one stage"),
            (self.stages is None or bool(self.stages), "stages", "must name at least one stage"),
        )
        if self.sp is not None and self.sp == (self.tp > 1):
            object.__setattr__(self, "sp", None)
        if len(self.recompute) == self.num_stages and len(set(self.recompute)) == 1:
            object.__setattr__(self, "recompute", self.recompute[:1])

    @classmethod
    def parse(cls, text: str, num_ranks: int | None = None) -> "Candidate":
        """Read the text form, keys in any order; ``dp`` may be left out when the number of ranks is known."""
        values: dict[str, Any] = dict(parse_pins(text))
        if "dp" in values:
            return cls(**values)
        if num_ranks is None:
            raise InputError.of("dp", "missing; add dp=N")
        sizes = {name: int(values.get(name, 1)) for name in ("tp", "pp", "cp")}
        product = math.prod(sizes.values())
        if num_ranks % product:
            where = ",".join(f"{name}={size}" for name, size in sizes.items())
            message = f"tp*pp*cp is {product} and does not divide the {num_ranks} ranks of the cluster"
            raise InputError.of(where, message)
        return cls(**values, dp=num_ranks // product)

    def __str__(self) -> str:
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        always = ("tp", "pp", "dp")
        return pins_text({key: now for key, (now, default) in values.items() if key in always or now != default})

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
        """Return the Recompute of one stage."""
        return self.recompute[0] if len(self.recompute) == 1 else self.recompute[stage]


def balanced_stages(num_layers: int, num_stages: int, head: float) -> tuple[int, ...]:
    """Split layers in a row as nanotron does, where a head takes as long as ``head`` layers; none without any.

    A stage ends with the layer that fills its share or takes it beyond. So the first stages have more, and late ones
    may have the head alone, or nothing: these get a layer of the stage before. By nanotron's code a stage goes on where
    a layer fills its share to the last bit; seconds and memory of its runs say that it ends.

    >>> balanced_stages(16, 4, 4.0), balanced_stages(8, 2, 1.0), balanced_stages(16, 8, 4.0)
    ((5, 5, 5, 1), (5, 3), (3, 2, 3, 2, 3, 1, 1, 1))
    """
    share = (num_layers + head) / num_stages
    ends: list[int] = []
    for stage in range(1, num_stages):
        full = math.ceil(share * stage - _EXACT)
        ends.append(min(max(full, stage), num_layers - num_stages + stage))
    return tuple(end - start for start, end in zip([0, *ends], [*ends, num_layers], strict=True))


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage: as even as can be, what is left over goes to the middle.

    The first stage also holds the embedding and the last the head, so the ends get fewer layers; with only
    one stage to spare it is the last, because the head costs more time than the embedding.

    >>> even_stages(80, 8), even_stages(10, 4), even_stages(7, 4)
    ((10, 10, 10, 10, 10, 10, 10, 10), (2, 3, 3, 2), (2, 2, 2, 1))
    """
    least, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest) // 2
    return tuple(least + (first <= stage < first + rest) for stage in range(num_stages))


def boundary_cuts(boundary: str | None, *, sequence_parallel: bool) -> Cuts:
    """Return how the hidden state is cut between blocks: as the boundary says, or else along its tokens.

    >>> boundary_cuts(None, sequence_parallel=True)["seq"]
    ('cp', 'kv', 'rep')
    >>> boundary_cuts("[batch/dp, seq/cp, hidden/tp]", sequence_parallel=True)["hidden"]
    ('kv', 'rep')
    """
    if boundary is None:
        return {"batch": _BATCH, "seq": ("cp", *(("kv", "rep") if sequence_parallel else ()))}
    return {dim: cut for dim, cut in Layout.parse(boundary).dims if cut}


def boundary_fault(boundary: str | None) -> str:
    """Say why blocks cannot hand the hidden state on in such a layout; "" where they can.

    >>> boundary_fault("[batch/dp, seq, hidden/tp.cp]")
    'hidden is cut over cp, tp or cp.tp, or whole'
    """
    if boundary is None:
        return ""
    try:
        layout = Layout.parse(boundary)
    except InputError as error:
        return str(error)
    if tuple(dim for dim, _ in layout.dims) != ("batch", "seq", "hidden") or layout.sums or layout.maxima:
        return "the hidden state is [batch, seq, hidden], with nothing pending"
    (_, batch), *others = layout.dims
    if batch != _BATCH:
        return "dp cuts the batch, between blocks as well. Write batch/dp"
    wrong = [dim for dim, cut in others if cut not in _TOKENS]
    return f"{wrong[0]} is cut over cp, tp or cp.tp, or whole" if wrong else ""


_AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep"}  # as plans say them in words
_MEANT = {**_AXES, "micro_batch": "mbs", "sequence": "sp", "virtual": "vp", "fsdp": "zero"}


def _meant(key: str) -> str:
    """Say which key was meant by a word.

    >>> _meant("tensor_parallel"), _meant("tpp")
    ('Did you mean tp?', 'Did you mean tp or pp?')
    """
    word = key.lower().replace("-", "_").split("_parallel")[0].removesuffix("_model").removesuffix("_size")
    return f"Did you mean {_MEANT[word]}?" if word in _MEANT else nearest(key, list(READERS))


def parse_pins(text: str) -> Mapping[str, object]:
    """Read some keys of a candidate, typed, as after ``--fix``; every fault is reported at once.

    >>> dict(parse_pins("pp=8,sp=false"))
    {'pp': 8, 'sp': False}
    """
    values, faults = dict[str, object](), Faults()
    for pair in split_outside_brackets(text, ",") if text.strip() else ():
        key, equals, raw = (part.strip() for part in pair.partition("="))
        with faults.of(pair.strip()):
            require(
                (bool(equals), "", "write key=value, for example tp=8"),
                (not equals or key in READERS, "", f"unknown key {key!r}. {_meant(key)}"),
                (key not in values, "", f"{key} is given twice; keep one"),
            )
            values[key] = READERS[key](raw)
    faults.refuse()
    return values


def pins_text(pins: Mapping[str, Any]) -> str:
    """Print what ``parse_pins`` reads; values may be text already, and lists, as people write them in Python.

    >>> pins_text(parse_pins("pp=2,recompute=full*2,sp=false"))
    'pp=2,recompute=full*2,sp=false'
    >>> pins_text({"pp": 2, "recompute": "full:3/none", "stages": [3, 1]})
    'pp=2,recompute=full:3/none,stages=3/1'
    """
    return ",".join(f"{key}={value_text(key, value)}" for key, value in pins.items())


def value_text(key: str, value: Any) -> str:
    """Print the value of one key."""
    if isinstance(value, str):
        return value
    if key == "recompute":
        return stages_text(value)
    if isinstance(value, tuple | list):
        return compress(map(str, cast(Sequence[int], value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _matching(raw: str, pattern: str, meaning: str) -> str:
    if not re.fullmatch(pattern, raw):
        raise InputError.of("", f"{raw!r} is not {meaning}")
    return raw


def _count(raw: str) -> int:
    return int(_matching(raw, "0*[1-9][0-9]{0,8}", "a whole number of at least 1"))


def _choice(*choices: object) -> Callable[[str], object]:
    by_text = {value_text("", choice): choice for choice in choices}

    def read(raw: str) -> object:
        if raw not in by_text:
            raise InputError.of("", f"{raw!r} is not one of {', '.join(by_text)}")
        return by_text[raw]

    return read


READERS: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(_SIZES, _count),
    "sp": _choice(True, False),
    "zero": _choice(*get_args(Zero)),
    "zero_group": _count,
    "weight_group": _count,
    "schedule": lambda raw: _choice(*builders())(raw),
    "recompute": parse_stages,
    "stages": lambda raw: tuple(0 if item == "0" else _count(item) for item in expand_counts(raw)),
    "place": Placement.parse,
    "kernels": lambda raw: _matching(raw, "[A-Za-z0-9_][A-Za-z0-9_.+-]*", "a name"),
    "cp_kind": _choice(*get_args(CpKind)),
    "cp_order": _choice(*get_args(CpOrder)),
    "boundary": lambda raw: str(Layout.parse(raw)),
    "fold": _choice(*get_args(Fold)),
    "lnc": _count,
}
