"""What a table of a program's keys is made of: entries that read facts from keys, and write keys from facts.

A fact is a value under a name of autoshard's: ``layout.tp`` (keys of a Candidate), ``work.seq_len`` (of the workload),
``cluster.nodes``, ``model.hidden_size`` (keys of a Hugging Face config.json).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from autoshard.errors import InputError
from autoshard.spec.model import ModelSpec
from autoshard.spec.record import options_on, show_value

Facts = Mapping[str, Any]
Keys = Mapping[str, Any]
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """Some keys of a program and the facts that they state; ``reads`` gets only the keys that a file has."""

    keys: tuple[str, ...]
    reads: Callable[[Keys], Facts]
    writes: Callable[[Facts], Keys] = lambda facts: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program can express of a layout; what it cannot is exported as the nearest that it can.

    ``axes`` are those that it has, ``schedules`` ours with their names there, ``selective`` the sets of operations that
    it can name (None: those of its kernels), ``stages`` whether cuts are free, free with one stage a rank, or even.
    """

    axes: tuple[str, ...]
    schedules: Mapping[str, str]
    zero: tuple[int, ...]
    stages: str
    recompute: tuple[str, ...]  # of none, selective, full and part: full for some layers of each stage
    selective: tuple[tuple[str, ...], ...] | None = None
    zero_group: bool = False
    weight_group: bool = False
    libraries: tuple[str, ...] = ()  # behind its kernels
    folds: bool = False  # whether ranks of tp and cp may hold other experts each
    router_losses: bool = False
    cp_kinds: tuple[str, ...] = ("ring",)
    cp_orders: tuple[str, ...] = ("zigzag",)
    sp: tuple[bool, ...] = (True, False)
    precisions: tuple[str, ...] = ("bf16",)
    workload: tuple[str, ...] = ()  # of optimizer, documents and expert_capacity: those that a file says
    shards_with: tuple[str, ...] = ()  # axes beside which weights are always sharded
    lacks: Callable[[ModelSpec], tuple[str, ...]] = lambda model: ()  # traits of a model that it does not have
    unsaid: Mapping[str, str] = field(default_factory=dict[str, str])  # what the file does not hold -> where it stands
    options: Callable[[ModelSpec], tuple[str, ...]] = lambda model: ()  # those of a model that a file says
    says_rotation: Callable[[ModelSpec], bool] = lambda model: True  # whether a file says how frequencies are scaled

    def unsayable(self, model: ModelSpec) -> tuple[str, ...]:
        """Return the options of a model that files cannot say, if they say at all which model is trained."""
        if {"model", "model_config"} & self.unsaid.keys():
            return ()
        said = self.options(model)
        return (*self.lacks(model), *(option for option in options_on(model) if option not in said))


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProgram:
    """One program: its table, what of its files changes neither the time nor the memory of a step, and its limits."""

    name: str
    title: str
    entries: tuple[KeyEntry, ...]
    harmless: tuple[str, ...]
    defaults: Facts  # what the program does where a file says nothing, with the names of facts
    matters: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # harmless only with
    # one of these words as its value
    bases: tuple[str, ...] = ()  # functions of other files whose values are the implied ones
    implied: Keys = field(default_factory=dict[str, Any])  # values of keys that a file does not state
    cluster: str  # where a file names none
    kernels: str  # with which an export is priced
    limits: Limits
    engine: str = "torch"  # of the plans that it takes
    form: str  # of the file that is written
    marks: tuple[str, ...]  # keys by which its files are told from those of others: any of these
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # of written keys
    files: Mapping[str, "OtherProgram"] = field(default_factory=dict[str, "OtherProgram"])  # keys that name a file
    stages: Callable[[int, int, Facts], tuple[int, ...] | None] = lambda layers, stages, facts: None
    accumulation: int | None = None  # micro-batches of a rank in a step, where a file says neither them nor the batch
    splits_batch: bool = False  # whether a micro-batch that a file leaves open is what the batch leaves a rank
    source: str = ""

    def place(self, key: str) -> str:
        """Return the whole path of a key in a file that is written."""
        name = key.removeprefix("/")
        section = next((section for section, keys in self.sections.items() if key in keys), "")
        return f"{section}.{name}" if section else name

    def is_harmless(self, path: str, value: object) -> bool:
        """Say whether a key that no entry reads changes neither the time nor the memory of a step."""
        words_of_value = set(re.findall(r"\w+", str(getattr(value, "text", value))))
        unusual = (words_of_value.isdisjoint(usual) for key, usual in self.matters.items() if fnmatchcase(path, key))
        return not any(unusual) and any(fnmatchcase(path, pattern) for pattern in self.harmless)

    @property
    def keys(self) -> frozenset[str]:
        """All keys of the table."""
        return frozenset(key for entry in self.entries for key in entry.keys)


def same(key: str, fact: str, convert: Callable[[Any], Any] | None = None) -> KeyEntry:
    """Return the entry of a key that has the value of one fact.

    >>> same("tensor_parallel_degree", "layout.tp").writes({"layout.tp": 8})
    {'tensor_parallel_degree': 8}
    """
    read = convert or whole_number
    return KeyEntry(
        keys=(key,),
        reads=lambda keys: {} if keys[key] is None else {fact: read(keys[key])},
        writes=lambda facts: {key: facts[fact]} if fact in facts else {},
    )


def read_only(*keys: str, reads: Callable[[Keys], Facts]) -> KeyEntry:
    """Return an entry that is never written: an older spelling, or what another entry writes."""
    return KeyEntry(keys=keys, reads=reads)


def alias(key: str, fact: str, convert: Callable[[Any], Any] | None = None) -> KeyEntry:
    """Return the entry of another spelling of a key, which is read and never written."""
    return read_only(key, reads=same(key, fact, convert).reads)


def whole_number(value: object) -> int:
    """Read a whole number, also from text.

    >>> whole_number("8"), whole_number(8.0)
    (8, 8)
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip().replace("_", "")
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise InputError.of("", f"expected a whole number, found {show_value(value)}")
    return int(text)


def truth(value: object) -> bool:
    """Read true or false, also from text; None is false.

    >>> truth("True"), truth(0), truth(None)
    (True, False, False)
    """
    text = "" if value is None else str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise InputError.of("", f"expected true or false, found {show_value(value)}")
    return text in _TRUE


def number(value: object) -> float:
    """Read a number, also from text."""
    try:
        return float(str(value))
    except ValueError:
        raise InputError.of("", f"expected a number, found {show_value(value)}") from None


def words(value: object) -> tuple[str, ...]:
    """Read a list of words: a list, or text with blanks or commas between them.

    >>> words("core_attn mlp"), words(["a"]), words(None)
    (('core_attn', 'mlp'), ('a',), ())
    """
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(map(str, cast(Sequence[object], value)))
    return tuple(str(value).replace(",", " ").split())


def matching(path: str, key: str) -> bool:
    """Say whether the path of a value in a file ends in a key; a key that begins with / is the whole path.

    >>> matching("model.optim.name", "optim.name"), matching("model.rename", "name"), matching("model.name", "/name")
    (True, False, False)
    """
    return path == key.removeprefix("/") or path.endswith(f".{key}")


def placed(program: OtherProgram, values: Keys) -> Iterator[tuple[str, str]]:
    """Yield each path of a file that the table has, with the key: the longest that fits."""
    for path in values:
        fits = [key for key in program.keys if matching(path, key)]
        if fits:
            yield path, max(fits, key=len)
