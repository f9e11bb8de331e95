"""Collectives between the cores of a node, by kind, group and size, beside what the model predicts."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autoshard.cost.collective import mesh_ring
from autoshard.layout.layout import Collective, CollectiveKind
from autoshard.plan.candidate import Candidate
from autoshard.spec.files import json_lines
from autoshard.spec.mesh import Mesh
from benchmarks.result import Extra, Result
from benchmarks.trainium.machine import Machine, told
from benchmarks.trainium.running import started

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
SIZES = (2**16, 2**20, 2**24, 2**27)  # bytes of a rank's buffer where it is largest
_LNC = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # as autoshard.plan.environment has them
_NEAR = {"trn1": 8}  # the smallest size of tp; on trn2 that of a chip
DRY_RANKS, DRY_BYTES, TIMES = 4, 4096, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One collective of groups of equal size, which all talk at once."""

    name: str
    kind: CollectiveKind
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int
    predicted_s: float

    def given(self, *, dry: bool) -> Mapping[str, Any]:
        """Return what ranks are told; in a dry run few bytes between few ranks."""
        groups = _few(len(self.groups[0])) if dry else self.groups
        size = DRY_BYTES if dry else self.num_bytes
        return {"name": self.name, "kind": self.kind, "groups": groups, "bytes": size}


def run(machine: Machine) -> Iterator[Result]:
    """Time every collective in one world of all ranks."""
    found = wires(machine)
    file, out = (machine.setting.folder / f"wires{ending}" for ending in (".json", ".jsonl"))
    given = {"device": _device(machine), "times": 1 if machine.dry else TIMES, "out": str(out)}
    machine.setting.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**given, "wires": [one.given(dry=machine.dry) for one in found]}), encoding="utf-8")
    ranks = DRY_RANKS if machine.dry else machine.node().num_ranks
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    lnc = machine.lncs[0]
    more = {} if lnc is None else {name: str(lnc) for name in _LNC}
    out.unlink(missing_ok=True)
    started([sys.executable, *start, "-m", "benchmarks.trainium.ranks", str(file)], more)
    seconds = dict(cast(tuple[str, float], line) for line in json_lines(out).values() if isinstance(line, list))
    for one in found:
        taken_s = seconds[one.name]  # KeyError: a rank has left one out
        group: dict[str, Extra] = {"group": len(one.groups[0]), "groups": len(one.groups), "bytes": one.num_bytes}
        if not machine.dry:
            group["bytes_per_s"] = one.num_bytes / taken_s
        yield told(one.name, one.predicted_s, None if machine.dry else taken_s, group)


def wires(machine: Machine) -> Sequence[Wire]:
    """Return the collectives of the axes that plans for this machine have."""
    cluster, found = machine.node(), list[Wire]()
    for axis, text in _axes(cluster.num_ranks, _NEAR.get(cluster.platform, 4)).items():
        layout = Candidate.parse(text)
        sizes = {"tp": layout.tp, "dp": layout.dp}
        mesh = Mesh.laid_on(cluster, sizes)
        atoms = mesh.atoms_of(axis.partition("_")[0])
        groups = dict.fromkeys(tuple(mesh.group_of(rank, atoms)) for rank in range(cluster.num_ranks))
        ring = mesh_ring(cluster, mesh, atoms, machine.calibration())
        for kind in KINDS:
            hops = max(1, ring.size - 1) if kind == "permute" else 1  # one hop is measured, not the whole way round
            collective = Collective(kind=kind, dim="seq", atoms=atoms, to_dim="heads" if kind == "all_to_all" else None)
            for size in SIZES:
                found.append(
                    Wire(
                        name=f"{kind}_{axis}_{size}", kind=kind, groups=tuple(groups), num_bytes=size,
                        predicted_s=float(ring.time_s(collective, size)) / hops,
                    )
                )  # fmt: skip
    return found


def _axes(num_ranks: int, near: int) -> Mapping[str, str]:
    """Return axes by name, with a layout that has each: ``near`` neighbours, strides over them, all of a node."""
    if num_ranks <= near:
        return {f"dp_{num_ranks}": f"tp=1,pp=1,dp={num_ranks}"}
    strides = num_ranks // near
    return {
        f"tp_{near}": f"tp={near},pp=1,dp={strides}",
        f"tp_{num_ranks}": f"tp={num_ranks},pp=1,dp=1",
        f"dp_{strides}": f"tp={near},pp=1,dp={strides}",
    }


def _few(size: int) -> Sequence[Sequence[int]]:
    return [[0, 1], [2, 3]] if size < DRY_RANKS else [[0, 1, 2, 3]]


def _device(machine: Machine) -> str:
    return "cpu" if machine.dry else {"nxd": "xla", "torch": "neuron"}[machine.engines[0]]
