"""Checkpoints of NxD: a file of every rank of tp and pp, in the folder ``model`` of a tag."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from autoshard.engine.hf_names import DERIVED, shapes_of
from autoshard.engine.nxd.shards import NxdNames, Qkv, TpRank, qkv_of
from autoshard.errors import Fault, InputError, require
from autoshard.plan.plan import Plan
from autoshard.runtime.convert.copying import Entry, TargetFile
from autoshard.runtime.convert.stored import Stored, WeightSource, read_state, shape_faults
from autoshard.spec.model import ModelSpec

_FILE = re.compile(r"dp_rank_00(?:_ep_rank_00)?_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_MARKS = ("checkpoint", "done")  # files of a tag: the first says what it is, the last that it is whole
_TABLE = "model.embed_tokens.weight", "gpt_neox.embed_in.weight"
Ranks = Mapping[tuple[int, int], Mapping[str, Stored]]  # by tp and pp


def nxd_folder(path: Path) -> Path | None:
    """Return the folder of a tag: this one, or the newest that is whole; None without any."""
    tags = [one for one in path.iterdir() if (one / _MARKS[1]).exists()] if path.is_dir() else []
    for folder in (path, *sorted(tags, key=lambda one: one.stat().st_mtime, reverse=True)):
        if any(_FILE.fullmatch(one.name) for one in (folder / "model").glob("*.pt")):
            return folder
    return None


def nxd_source(folder: Path, family: str, model: ModelSpec) -> WeightSource:
    """Open a checkpoint of NxD, or say all that is wrong; its files show how it was cut."""
    ranks = _ranks(folder)
    tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    names = {name for found in ranks.values() for name in found}
    rows = [
        tp * found[name].shape[0] for found in ranks.values() for name in _TABLE if name in found and found[name].shape
    ]
    vocab = next((one for one in rows if one >= model.vocab), -(-model.vocab // tp) * tp)  # with padding
    tables = _fitting(ranks, NxdNames.of(family, model, qkv_of(names), vocab))
    faults: list[Fault] = []
    for at, number in product(range(tp), range(pp)):
        here = {name for other in range(tp) for name in ranks[other, number]} & tables[at].tensors.keys()
        wanted = {name: tables[at].stacked(name)[0] for name in sorted(here)}
        faults += shape_faults(ranks[at, number], wanted, DERIVED, str(folder / _name(at, number)))
    faults += [Fault(where=f"{folder}: {name}", message="missing") for name in tables[0].tensors.keys() - names]
    if faults:
        raise InputError(sorted(faults, key=lambda fault: fault.where))
    stored = (
        replace(one, patches=tuple(tables[at].stacked(name)[1]))
        for (at, _), found in ranks.items()
        for name, one in found.items()
        if name in tables[at].tensors
    )
    return WeightSource(stored, shapes_of(model), str(folder))


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
            Entry(name=name, dtype=dtypes[one.rows[0].ours], shape=shape, patches=tuple(patches))
            for name, one in names.tensors.items()
            if one.block in blocks[number]
            for shape, patches in [names.stacked(name)]
        )
        files.append(TargetFile(file=_name(at, number), entries=entries, kind="state"))
    return files


def finish_nxd(folder: Path) -> None:
    """Mark the folder as a whole tag."""
    for mark in _MARKS:
        (folder / mark).write_text("1", encoding="utf-8")


def _name(tp: int, pp: int) -> str:
    return f"model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


def _ranks(folder: Path) -> Ranks:
    """Read what every file holds."""
    files = {
        (int(found[1]), int(found[2])): path
        for path in sorted((folder / "model").iterdir())
        if (found := _FILE.fullmatch(path.name))
    }
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    message = f"there is no such file, though others are of {tp} tp and {pp} pp ranks. Copy it again"
    require(*((rank in files, str(folder / _name(*rank)), message) for rank in product(range(tp), range(pp))))
    return {rank: read_state(path) for rank, path in files.items()}


def _fitting(ranks: Ranks, names: NxdNames) -> Sequence[NxdNames]:
    """Return the names of every tp rank: how often keys are copied shows in shapes, in which order in the numbers."""
    tp, model = 1 + max(at for at, _ in ranks), names.model

    def tables(*atoms: tuple[str, int]) -> list[NxdNames]:
        return [names.at(TpRank(atoms=atoms, index=at)) for at in range(tp)]

    usual: Sequence[NxdNames] = ()
    for copies in (one for one in range(1, tp + 1) if tp % one == 0):
        if model.num_kv_heads % (tp // copies) or model.num_heads // model.num_kv_heads % copies:
            continue
        found = tables(("rep", copies), ("kv", tp // copies))
        usual = usual or found
        keys = next(name for name, one in found[0].tensors.items() if any(".k." in row.ours for row in one.rows))
        files = [number for at, number in ranks if at == 0 and keys in ranks[0, number]]
        if not files or ranks[0, files[0]][keys].shape != found[0].stacked(keys)[0]:
            continue
        if copies in (1, tp):
            return found
        patch = next(one for one in found[0].stacked(keys)[1] if ".k." in one.tensor)
        first, second, other = (patch.view(ranks[at, files[0]][keys].read()) for at in (0, 1, tp // copies))
        if torch.equal(first, other):
            return found
        if torch.equal(first, second):
            return tables(("kv", tp // copies), ("rep", copies))
        where = f"{ranks[0, files[0]][keys].file}: {keys}"
        raise InputError.of(where, f"keys are copied {copies} times, but no other rank's are like these: they differ")
    message = f"{tp} files of tp do not fit {model.num_heads} query heads and {model.num_kv_heads} of keys"
    require((bool(usual), "tp", message))
    return usual
