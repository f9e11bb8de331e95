"""Which activations of a stage are dropped after the forward and computed again, and where the others rest."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from autoshard.errors import InputError, require
from autoshard.spec.repeats import compress, expand_counts

_TEXT = re.compile(r"(none|full(?::(?P<layers>[0-9]{1,9}))?|selective\[(?P<ops>[^\[\]]*)\])(?P<offload>\+offload)?")
_OFFLOAD = "+offload"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """``none``; ``selective[ops]``; ``full``; or ``full:K``, full for the first K of the stage's layers.

    With ``+offload`` behind it, what a layer keeps rests in host memory from its forward until its backward.

    >>> str(Recompute.parse("selective[attend,act]")), Recompute.parse("full:4").num_layers
    ('selective[act,attend]', 4)
    >>> str(Recompute.parse("none+offload")), str(Recompute.parse("none+offload").on_device)
    ('none+offload', 'none')
    """

    kind: Literal["none", "selective", "full"] = "none"
    ops: tuple[str, ...] = ()  # selective only: op names, or a framework's names of op sets; a set, kept sorted
    num_layers: int | None = None  # full only; None means every layer of the stage
    offload: bool = False  # what is kept goes to host memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(sorted(set(self.ops))))
        bad_names = ", ".join(repr(name) for name in self.ops if not _NAME.fullmatch(name))
        other_ops = "name the ops of selective, and of nothing else: selective[attend]"
        whole = self.num_layers is None or (self.kind == "full" and self.num_layers >= 1)
        number = f"only full takes a number of layers, of at least 1, not {self.num_layers}. Use none"
        require(
            (bool(self.ops) == (self.kind == "selective"), "ops", other_ops),
            (not bad_names, "ops", f"not a name: {bad_names}"),
            (whole, "num_layers", number),
            (not (self.offload and self.num_layers), "offload", "is of all layers of a stage. Use full+offload"),
        )

    @classmethod
    def parse(cls, text: str) -> "Recompute":
        """Read the text form of one stage."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InputError.of("", f"{text!r} is not a recompute. Write none, full, full:4 or selective[attend,act]")
        offload = match["offload"] is not None
        if match["ops"] is not None:
            ops = tuple(name.strip() for name in match["ops"].split(","))
            return cls(kind="selective", ops=ops, offload=offload)
        if text.startswith("none"):
            return cls(offload=offload)
        num_layers = None if match["layers"] is None else int(match["layers"])
        return cls(kind="full", num_layers=num_layers, offload=offload)

    def __str__(self) -> str:
        text = f"selective[{','.join(self.ops)}]" if self.kind == "selective" else self.kind
        number = "" if self.num_layers is None else f":{self.num_layers}"
        return f"{text}{number}{_OFFLOAD if self.offload else ''}"

    @property
    def on_device(self) -> "Recompute":
        """The same with all that is kept on the device: its layers run the same program."""
        return replace(self, offload=False) if self.offload else self

    @property
    def offloaded(self) -> "Recompute":
        """The same with all that is kept in host memory."""
        return replace(self, offload=True)

    @property
    def kinds(self) -> tuple["Recompute", ...]:
        """List what single layers do under it: ``full:K`` has full layers and plain ones.

        >>> [str(kind) for kind in Recompute.parse("full:4").kinds]
        ['full', 'none']
        """
        return (self,) if self.num_layers is None else (Recompute(kind="full"), Recompute())

    def of_layer(self, index: int) -> "Recompute":
        """Return what holds for one layer of the stage, counted from 0.

        >>> [str(Recompute.parse("full:1").of_layer(index)) for index in range(2)]
        ['full', 'none']
        """
        if self.num_layers is None:
            return self
        return Recompute(kind="full") if index < self.num_layers else Recompute()


def parse_stages(text: str) -> tuple[Recompute, ...]:
    """Read one Recompute for all stages, or one per stage: ``selective[attend]*7/full:4``."""
    return tuple(Recompute.parse(item) for item in expand_counts(text))


def stages_text(stages: tuple[Recompute, ...]) -> str:
    """Print what parse_stages reads."""
    return compress(map(str, stages))
