"""The matrix of features: rows that together hold every pair of values that can meet."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from autoshard.layout.pin import pins_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import Request, plan_at, rejections_of
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision
from tests.ranks.cases import CLIP_NORM, COPIED, gpt, llama, request_of

Row = Mapping[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

MOST_RANKS = 8
NO_CLIP = 1e6  # far above the norm of every row
# What decides whether a row may run, and after it what goes with everything.
STRUCTURE: Mapping[str, tuple[str, ...]] = {
    "tp": ("1", "2", "4"),
    "sp": ("no", "yes"),
    "kv": ("own", "copied"),
    "cp": ("1", "ring", "zigzag", "a2a"),
    "experts": ("dense", "local", "spread", "dropped"),
    "pipe": ("none", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"),
    "stages": ("even", "uneven"),
    "dp": ("1", "2"),
    "zero": ("alone", "0", "1", "3"),
    "micro": ("1", "4"),
    "recompute": ("none", "full", "attend", "some"),
    "edge": ("usual", "own"),
}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "tied": ("no", "yes"),
    "vocab": ("32", "31"),
    "clip": ("yes", "no"),
    "mask": ("yes", "no"),
    "model": ("llama", "gpt"),
    "documents": ("joined", "separate"),
    "drop": ("no", "yes"),
}
FEATURES: Mapping[str, tuple[str, ...]] = {**STRUCTURE, **OPTIONS}
IMPOSSIBLE: Mapping[str, Callable[[Row], bool]] = {
    "sequence parallelism is over tp": lambda row: row["sp"] == "yes" and row["tp"] == "1",
    "only tp and cp cut what lies between blocks otherwise": lambda row: (
        row["edge"] == "own" and row["tp"] == "1" and row["cp"] == "1"
    ),
    "keys are copied over tp": lambda row: row["kv"] == "copied" and row["tp"] == "1",
    "one stage has nothing to be uneven to": lambda row: row["stages"] == "uneven" and row["pipe"] == "none",
    "ZeRO is about ranks that share weights": lambda row: (
        (row["zero"] == "alone") != (row["dp"] == "1" and row["cp"] == "1")
    ),
    "from 2 to 8 ranks": lambda row: not 2 <= num_ranks(row) <= MOST_RANKS,
}
CHUNKS = {"interleaved": 2, "zb_v": 2}
RECOMPUTE = {"none": "none", "full": "full", "attend": "selective[attend]", "some": "full:1"}

TABLE = """
tp sp  kv     cp     experts pipe        stages dp zero  micro recompute edge  tied vocab clip mask model documents drop
4  yes copied zigzag dropped none        even   1  3     4     some      own   yes  31    no   no   gpt   separate  no
2  yes own    1      spread  zb_v        uneven 2  1     1     attend    usual no   32    no   yes  llama separate  no
1  no  own    a2a    local   zb_h1       uneven 2  0     4     full      own   yes  31    yes  no   llama separate  no
2  no  copied ring   dense   1f1b        even   1  0     1     none      usual no   32    yes  yes  gpt   joined    no
4  yes copied 1      local   gpipe       uneven 1  alone 1     full      usual yes  31    yes  yes  gpt   joined    no
4  no  own    1      dense   interleaved even   1  alone 4     attend    own   no   32    no   no   llama joined    yes
1  no  own    1      dropped 1f1b        uneven 2  3     1     some      usual no   32    yes  yes  llama separate  no
4  no  copied 1      spread  none        even   2  1     4     none      own   yes  31    yes  no   gpt   joined    no
2  yes copied 1      dropped zb_h1       uneven 1  alone 4     none      usual yes  32    no   no   llama joined    no
2  yes own    1      dense   gpipe       uneven 2  0     4     some      own   yes  31    no   yes  gpt   separate  no
1  no  own    a2a    local   zb_v        even   1  3     1     none      own   no   31    no   no   gpt   separate  yes
1  no  own    a2a    dense   none        even   1  1     1     full      usual no   32    no   yes  llama joined    no
1  no  own    a2a    dropped interleaved uneven 2  0     4     attend    usual yes  31    yes  yes  gpt   joined    no
1  no  own    a2a    spread  gpipe       even   2  3     4     some      own   no   32    no   no   llama joined    no
1  no  own    a2a    local   1f1b        uneven 2  1     4     some      own   yes  31    no   no   gpt   separate  no
2  yes copied ring   local   interleaved uneven 1  3     4     attend    own   yes  31    no   no   llama joined    no
1  no  own    ring   dropped zb_v        uneven 2  1     4     full      own   yes  31    yes  no   gpt   joined    no
1  no  own    ring   spread  zb_h1       even   2  3     1     some      own   no   31    no   yes  gpt   separate  yes
2  yes copied ring   dropped gpipe       uneven 1  3     4     full      own   yes  31    no   no   gpt   joined    yes
4  yes copied ring   local   none        even   1  0     4     attend    own   yes  32    no   no   gpt   joined    yes
1  no  own    zigzag spread  1f1b        uneven 2  0     1     full      usual no   32    yes  yes  llama joined    yes
2  yes copied zigzag dense   zb_h1       uneven 1  1     4     attend    own   yes  31    no   no   gpt   joined    yes
2  yes copied zigzag local   zb_v        uneven 1  0     4     some      own   yes  31    no   no   gpt   joined    no
2  yes copied zigzag dropped gpipe       uneven 1  1     4     none      own   yes  31    no   no   gpt   separate  no
1  no  own    zigzag spread  interleaved uneven 2  1     4     some      own   yes  31    no   no   gpt   separate  no
4  yes copied 1      dense   zb_v        uneven 1  alone 4     some      own   yes  31    no   no   gpt   joined    no
2  yes copied zigzag dense   1f1b        uneven 1  3     4     attend    own   yes  31    no   no   gpt   separate  no
4  yes copied 1      dropped 1f1b        uneven 1  alone 4     some      own   yes  31    no   no   gpt   separate  no
1  no  own    1      dropped gpipe       uneven 1  alone 4     attend    usual yes  31    no   no   gpt   joined    no
4  yes copied 1      dropped interleaved uneven 1  alone 4     full      own   yes  31    no   no   gpt   joined    no
4  yes copied 1      dropped interleaved uneven 1  alone 4     none      own   yes  31    no   no   gpt   joined    no
2  yes copied 1      dropped none        even   1  alone 4     some      own   yes  31    no   no   gpt   separate  no
4  yes copied 1      dropped zb_h1       uneven 1  alone 4     some      own   yes  31    no   no   gpt   separate  yes
"""


def rows() -> tuple[Row, ...]:
    """The rows of the table."""
    names, *lines = (line.split() for line in TABLE.strip().splitlines())
    return tuple(dict(zip(names, line, strict=True)) for line in lines)


# -- what a row means ----------------------------------------------------------------------------------


def num_ranks(row: Row) -> int:
    """How many processes a row takes."""
    return int(row["tp"]) * (1 + (row["pipe"] != "none")) * (1 + (row["cp"] != "1")) * int(row["dp"])


def layers_of(row: Row) -> tuple[int, ...]:
    """Layers per stage: as few as possible, and two where only some of a stage's are recomputed."""
    num_stages = 1 if row["pipe"] == "none" else 2 * CHUNKS.get(row["pipe"], 1)
    each = 2 if num_stages == 1 or (row["recompute"] == "some" and row["stages"] == "even") else 1
    uneven = (1 + (row["stages"] == "uneven"),)
    return (*uneven, *(1,) * (num_stages - 1)) if row["stages"] == "uneven" else (each,) * num_stages


def candidate_of(row: Row) -> Candidate:
    """The candidate of a row."""
    pipe, layers = row["pipe"], layers_of(row)
    choices = {
        "tp": row["tp"],
        "pp": "1" if pipe == "none" else "2",
        "dp": row["dp"],
        "cp": "1" if row["cp"] == "1" else "2",
        "ep": "2" if row["experts"] == "spread" or (row["experts"], row["dp"]) == ("dropped", "2") else "1",
        "vp": str(CHUNKS.get(pipe, 1)),
        "sp": "true" if row["sp"] == "yes" else "false",
        "zero": "1" if row["zero"] == "alone" else row["zero"],
        "schedule": "1f1b" if pipe == "none" else pipe,
        "recompute": RECOMPUTE[row["recompute"]],
        "cp_kind": "all_to_all" if row["cp"] == "a2a" else "ring",
        "cp_order": "zigzag" if row["cp"] == "zigzag" else "contiguous",
    }
    if row["stages"] == "uneven":
        choices["stages"] = "/".join(map(str, layers))
    if row["edge"] == "own":
        choices["boundary"] = "[batch/dp, seq, hidden/cp.tp]"
    return Candidate.parse(",".join(f"{name}={value}" for name, value in choices.items()))


def model_of(row: Row) -> ModelSpec:
    """The model of a row."""
    changes: dict[str, Any] = {"num_layers": sum(layers_of(row)), "vocab": int(row["vocab"])}
    changes["tied_embeddings"] = row["tied"] == "yes"
    if row["drop"] == "yes":
        changes |= {"hidden_dropout": 0.1, "attention_dropout": 0.2, "drops_embeddings": row["model"] == "gpt"}
    if row["kv"] == "copied":
        changes["num_kv_heads"] = int(row["tp"]) // 2
    if row["experts"] != "dense":
        changes |= {"num_experts": 4, "experts_per_token": 2, "gated_mlp": True, "mlp_bias": False}
    return {"llama": llama, "gpt": gpt}[row["model"]](**changes)


def request_for(row: Row, precision: str = "bf16", optimizer: str = "adamw") -> Request:
    """The question that a row answers."""
    changes: dict[str, Any] = {
        "global_batch": int(row["dp"]) * int(row["micro"]),
        "precision": Precision.named(precision),
        "optimizer": optimizer,
        "clip_norm": CLIP_NORM if row["clip"] == "yes" else NO_CLIP,
        "expert_capacity": 1.0 if row["experts"] == "dropped" else None,
        "documents": row["documents"],
    }
    if row["experts"] == "dropped":  # 4 experts have 8 slots, one for each of the most ranks that cut them
        changes["seq_len"] = 16
    request = request_of(Candidate.parse(f"tp={num_ranks(row)},pp=1,dp=1"), model_of(row), **changes)
    return replace(request, layouts=pins_of(COPIED, row["kv"])) if row["kv"] == "copied" else request


def plan_for(row: Row, precision: str = "bf16", optimizer: str = "adamw") -> Plan:
    """The plan of a row."""
    return plan_at(request_for(row, precision, optimizer), candidate_of(row), even_refused=True)


# -- which rows there must be --------------------------------------------------------------------------


def is_legal(row: Row) -> bool:
    """Whether the planner's Rules let the torch engine run a row."""
    return not rejections_of(request_for(row), candidate_of(row), "torch")


@functools.cache
def possible() -> tuple[Row, ...]:
    """Every combination of the structure that may run, with the first value of every option.

    What lies between blocks is asked last: no other Rule speaks of it, and Rules take their time.
    """
    first = {name: values[0] for name, values in FEATURES.items()}
    names = [name for name in STRUCTURE if name != "edge"]
    combined = (
        {**first, **dict(zip(names, values, strict=True))} for values in product(*(STRUCTURE[name] for name in names))
    )
    legal = [row for row in combined if is_thinkable(row) and is_legal(row)]
    edged = ({**row, "edge": edge} for row in legal for edge in STRUCTURE["edge"])
    return tuple(row for row in edged if is_thinkable(row))


def is_thinkable(row: Row) -> bool:
    """Whether the features of a row can meet at all."""
    return not any(excludes(row) for excludes in IMPOSSIBLE.values())


def pairs_of(row: Row, names: Iterable[str] = FEATURES) -> Iterator[Pair]:
    """Every two values that meet in a row."""
    return combinations(((name, row[name]) for name in names), 2)


def possible_pairs() -> set[Pair]:
    """All pairs that some row can have; an option goes with everything."""
    found = {pair for row in possible() for pair in pairs_of(row, STRUCTURE)}
    for one, other in combinations(FEATURES, 2):
        if other in OPTIONS:
            met = {row[one] for row in possible()} if one in STRUCTURE else FEATURES[one]
            found |= {((one, left), (other, right)) for left, right in product(met, OPTIONS[other])}
    return found


def quick(found: Sequence[Row]) -> tuple[Row, ...]:
    """Of some rows those that hold every single value of them, each with the most that are missing for its ranks."""
    missing, chosen = {(name, row[name]) for row in found for name in FEATURES}, list[Row]()
    while missing:
        row = max(found, key=lambda row: len(missing & set(row.items())) / num_ranks(row))
        missing -= set(row.items())
        chosen.append(row)
    return tuple(chosen)
