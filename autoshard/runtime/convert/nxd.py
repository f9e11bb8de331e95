"""Checkpoints of NxD: a file of every rank of tp and pp, in the folder ``model`` of a tag."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from autoshard.engine.hf_names import DERIVED, shapes_of
from autoshard.engine.nxd.shards import NxdNames, Qkv, TpRank, qkv_of
from autoshard.errors import Fault, InputError, require
from autoshard.files import naming
from autoshard.layout.shards import Box
from autoshard.plan.plan import Plan
from autoshard.runtime.convert.copying import Entry, TargetFile
from autoshard.runtime.convert.squares import Ranks, sums_of_squares
from autoshard.runtime.convert.stored import WeightSource, read_state, same_bits, shape_faults
from autoshard.spec.model import ModelSpec

_FILE = re.compile(r"dp_rank_00(?:_ep_rank_00)?_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_EXPERTS = re.compile(r"dp_rank_\d+_ep_rank_0*[1-9]\d*_.*\.pt")
_MARKS = ("checkpoint", "done")  # files of a tag: the first says what it is, the last that it is whole
_TABLE = "model.embed_tokens.weight", "gpt_neox.embed_in.weight"
Tables = Sequence[NxdNames]  # of every tp rank


def nxd_folder(path: Path) -> Path | None:
    """Return the folder of a tag: this one, or the newest that is whole; None without any."""
    tags = [tag for tag in path.iterdir() if (tag / _MARKS[1]).exists()] if path.is_dir() else []
    for folder in (path, *sorted(tags, key=lambda tag: tag.stat().st_mtime, reverse=True)):
        if any(_FILE.fullmatch(file.name) for file in (folder / "model").glob("*.pt")):
            return folder
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """A plan that may say in which order ranks hold heads, where numbers cannot because all heads are alike."""

    plan: Plan
    saved: bool  # whether the files were surely saved under it, so that it must agree with the numbers


def nxd_source(folder: Path, family: str, model: ModelSpec, source_plan: SourcePlan | None = None) -> WeightSource:
    """Open a checkpoint of NxD, or say all that is wrong; its files show how it was cut."""
    ranks = _ranks(folder)
    tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    names = {name for tensors in ranks.values() for name in tensors}
    rows = [
        tp * tensors[name].shape[0]
        for tensors in ranks.values()
        for name in _TABLE
        if name in tensors and tensors[name].shape
    ]
    vocab = next((count for count in rows if count >= model.vocab), -(-model.vocab // tp) * tp)  # with padding
    whole = NxdNames.of(family, model, qkv_of(names), vocab)
    orders = _orders(ranks, whole)
    tables = next(iter(orders.values()))
    faults: list[Fault] = []
    for at, number in product(range(tp), range(pp)):
        here = {name for tp_rank in range(tp) for name in ranks[tp_rank, number]} & tables[at].tensors.keys()
        shapes_here = {name: tables[at].stacked(name)[0] for name in sorted(here)}
        faults += shape_faults(ranks[at, number], shapes_here, DERIVED, str(folder / _name(at, number)))
    faults += [Fault(where=f"{folder}: {name}", message="missing") for name in tables[0].tensors.keys() - names]
    if faults:
        raise InputError(sorted(faults, key=lambda fault: fault.where))
    order = _order(ranks, orders, source_plan, folder)
    tables = orders[order]
    stored = (
        replace(tensor, patches=tuple(tables[at].stacked(name)[1]))
        for (at, _), tensors in ranks.items()
        for name, tensor in tensors.items()
        if name in tables[at].tensors
    )
    shapes = shapes_of(model)
    squares = partial(sums_of_squares, ranks, whole, shapes)
    remark = f"copies of keys in the order of {order}" if len(orders) > 1 else ""
    return WeightSource(stored, shapes, str(folder), squares=squares, remark=remark)


def nxd_outputs(
    plan: Plan, family: str, model: ModelSpec, dtypes: Mapping[str, torch.dtype], qkv: Qkv | None
) -> list[TargetFile]:
    """List the file of every rank of tp and pp."""
    tp, padded = plan.mesh.size("tp"), plan.padding.get("vocab", model.vocab)
    message = "NxD's experts are not cut over ep here, as its engine does not run that. Use a plan with ep=1"
    require((plan.mesh.size("ep") == 1, "ep", message))
    usual: Qkv = "plain" if model.num_heads == model.num_kv_heads else "fused"
    rest = -(-padded // tp) * tp
    whole = NxdNames.of(family, model, qkv or usual, rest)
    ranks = [whole.at(TpRank.of(plan.mesh, at)) for at in range(tp)]
    blocks: dict[int, set[str]] = defaultdict(set)
    for stage in plan.stages:
        blocks[stage.rank] |= {f"layer.{stage.first_layer + layer}" for layer in range(stage.num_layers)}
    blocks[plan.stages[0].rank].add("embed.0")
    blocks[plan.stages[-1].rank].add("head.0")
    files: list[TargetFile] = []
    for number, (at, names) in product(sorted(blocks), enumerate(ranks)):
        entries = tuple(
            Entry(name=name, dtype=dtypes[stacked_rows.rows[0].ours], shape=shape, patches=tuple(patches))
            for name, stacked_rows in names.tensors.items()
            if stacked_rows.block in blocks[number]
            for shape, patches in [names.stacked(name)]
        )
        files.append(TargetFile(file=_name(at, number), entries=entries, kind="state"))
    return files


def finish_nxd(folder: Path) -> None:
    """Mark the folder as a whole tag."""
    for mark in _MARKS:
        with naming(folder / mark):
            (folder / mark).write_text("1", encoding="utf-8")


def _name(tp: int, pp: int) -> str:
    return f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def _ranks(folder: Path) -> Ranks:
    """Read what every file holds."""
    cut = sorted(path for path in (folder / "model").iterdir() if _EXPERTS.fullmatch(path.name))
    message = "its experts are cut over ep, which is not read here. Merge them with NxD's own converter"
    require((not cut, str(next(iter(cut), "")), message))
    files = {
        (int(match[1]), int(match[2])): path
        for path in sorted((folder / "model").iterdir())
        if (match := _FILE.fullmatch(path.name))
    }
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    message = f"there is no such file, though others are of {tp} tp and {pp} pp ranks. Copy it again"
    require(*((rank in files, str(folder / _name(*rank)), message) for rank in product(range(tp), range(pp))))
    return {rank: read_state(path) for rank, path in files.items()}


def _orders(ranks: Ranks, names: NxdNames) -> Mapping[str, Tables]:
    """Return the names of every tp rank, in trn1's order and in trn2's where they differ.

    Shapes show how often keys are copied.
    """
    tp, model = 1 + max(at for at, _ in ranks), names.model
    usual: Mapping[str, Tables] = {}
    for copies in (number for number in range(1, tp + 1) if tp % number == 0):
        groups = tp // copies
        if model.num_kv_heads % groups or model.num_heads // model.num_kv_heads % copies:
            continue
        outer, inner = ("rep", copies), ("kv", groups)
        different = {"trn1": (outer, inner)} | ({"trn2": (inner, outer)} if copies > 1 and groups > 1 else {})
        orders = {
            platform: [names.at(TpRank(atoms=atoms, index=at)) for at in range(tp)]
            for platform, atoms in different.items()
        }
        usual = usual or orders
        first = orders["trn1"][0]
        keys = next(_keys_and_values(first))
        stage = next((stage for at, stage in ranks if at == 0 and keys in ranks[0, stage]), None)
        if stage is not None and ranks[0, stage][keys].shape == first.stacked(keys)[0]:
            return orders
    message = f"{tp} files of tp do not fit {model.num_heads} query heads and {model.num_kv_heads} of keys"
    require((bool(usual), "tp", message))
    return usual


def _order(ranks: Ranks, orders: Mapping[str, Tables], source_plan: SourcePlan | None, folder: Path) -> str:
    """Return the order of ranks: that of the numbers, or that of a plan where numbers fit both orders."""
    if len(orders) == 1:
        return next(iter(orders))
    seen = _order_by_values(ranks, orders)
    planned = _order_of_plan(orders, source_plan.plan) if source_plan else None
    if seen and source_plan and source_plan.saved and planned and planned != seen:
        message = f"its copies of keys lie in the order of {seen}, and those of the plan in that of {planned}"
        raise InputError.of(str(folder), f"{message}. Type --plan with the plan under which it was saved, or none")
    if order := seen or planned:
        return order
    message = "all heads of keys and values are alike, so numbers do not show in which order ranks hold query heads"
    raise InputError.of(str(folder), f"{message}. Type --plan with the plan under which it was saved, and --to")


def _order_by_values(ranks: Ranks, orders: Mapping[str, Tables]) -> str | None:
    """Return the order, trn1's or trn2's, in which all copies of a key or value head are equal; None if both are."""
    names = _keys_and_values(orders["trn1"][0])
    for name, stage in product(names, sorted({stage for _, stage in ranks})):
        if name not in ranks[0, stage]:
            continue
        fitting = [order for order, tables in orders.items() if _copies_agree(ranks, tables, name, stage)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            where = f"{ranks[0, stage][name].file}: {name}"
            message = "its ranks hold copies of keys and values, which differ in trn1's order of ranks and in trn2's"
            raise InputError.of(where, f"{message}. Take a checkpoint in which they are equal")
    return None


def _order_of_plan(orders: Mapping[str, Tables], plan: Plan) -> str | None:
    """Return the order of a plan that cuts heads as the files do."""
    first = orders["trn1"][0]
    if plan.mesh.size("tp") != len(orders["trn1"]):
        return None
    cuts = [first.at(TpRank.of(plan.mesh, at)).cuts for at in range(len(orders["trn1"]))]
    return next((order for order, tables in orders.items() if [table.cuts for table in tables] == cuts), None)


def _keys_and_values(names: NxdNames) -> Iterator[str]:
    """Yield the tensors that hold keys or values, those of keys first in a layer."""
    for name, tensor in names.tensors.items():
        if any(row.ours.rpartition(".")[0].endswith((".k", ".v")) for row in tensor.rows):
            yield name


def _copies_agree(ranks: Ranks, tables: Tables, name: str, stage: int) -> bool:
    """Say whether an order of ranks makes all copies of the heads in a tensor equal."""
    held: dict[tuple[str, Box], torch.Tensor] = {}
    for at, table in enumerate(tables):
        stored = ranks[at, stage][name].read()
        for patch in table.stacked(name)[1]:
            if ".q." not in patch.tensor:
                numbers = patch.view(stored)
                if not same_bits(held.setdefault((patch.tensor, patch.box), numbers), numbers):
                    return False
    return True
