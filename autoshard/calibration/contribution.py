"""Rows for others: what was run and what it took, made anew from numbers and known words, with nothing else in them.

Whatever a run's own files say in free words (ids, names, paths, notes) may name people, machines or data, so that it is
left out, not searched: a value comes along only where its column has a fixed set of values, or a grammar without words.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.calibration.architecture import ARCH
from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import MeasuredRow, MeasuredRows, measured_rows, precision_of
from autoshard.errors import InputError, inside, require
from autoshard.plan.candidate import Candidate
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import ALIASES, NodeType, cluster_names
from autoshard.spec.kernels import table_fault
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.workload import ROUTER_TRAINING

# Packages whose versions come along, and what of a version does: no tag that somebody's own build has added.
_PACKAGES = (
    "autoshard", "torch", "torch-xla", "torch-neuronx", "neuronx-distributed", "neuronx-cc", "nki", "triton",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "python",
)  # fmt: skip
_VERSION = re.compile(
    r"([a-z][a-z0-9-]*) ([0-9]{1,9}(?:\.[0-9]{1,9}){1,4}(?:(?:a|b|rc)[0-9]{1,4})?)(\+(?:cpu|cu[0-9]{2,4}))?(?![\w.])"
)
_FRAMEWORK = re.compile(r"autoshard, (torch|nxd) engine")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_FORMAT, _DIGITS = 1, 12
_SHARDING = {0: "none", 1: "ZeRO-1", 3: "ZeRO-3"}
_NUMBERS = (  # columns that hold numbers, true or false, or one of a fixed set of words
    "seq_len", "global_batch_seqs", "micro_batch", "nodes", "chips", "lnc", "tp", "pp", "vp", "cp", "ep", "dp", "etp",
    "sp", "optimizer", "documents", "expert_imbalance", *ROUTER_TRAINING, "release", "kernels", "flash_attention",
    "step_time_s", "peak_memory_gib", "peak_memory_gib_by_stage",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The rows of runs without anything that names a person, a machine, a place or data."""

    rows: tuple[MeasuredRow, ...]
    read: MeasuredRows  # from where; with the reasons why others were left out

    @property
    def text(self) -> str:
        """The file: one row a line."""
        return "".join(json.dumps(_stated(row)) + "\n" for row in self.rows)


def contribution(
    path: Path, machine: Mapping[str, str | int], installed: str = "", here: NodeType | None = None
) -> Contribution:
    """Return the rows of a run, or of a folder of runs, for other users; InputError if none can be used.

    ``machine`` says what the machine here is, in words that the caller vouches for, and ``here`` as a cluster;
    ``installed`` which packages are installed, which comes along if they are those that ran.
    """
    read = measured_rows(path)
    rows, faults = dict[str, MeasuredRow](), dict[str, InputError]()
    for where, row in read.rows.items():
        try:
            rows[where] = _for_others(row, machine, versions_in(installed), here)
        except InputError as error:
            faults[where] = error
    return Contribution(read=read.without(faults, path), rows=tuple(rows.values()))


def versions_in(text: str | None) -> Mapping[str, str]:
    """Return the versions of known packages that a text names.

    >>> versions_in("autoshard 0.1.0, torch 2.13.0+cu130, nki 0.3.0+of.acme, acme 7.1")
    {'autoshard': '0.1.0', 'torch': '2.13.0+cu130', 'nki': '0.3.0'}
    """
    versions = dict[str, str]()
    for part in (text or "").split(", "):
        match = _VERSION.match(part)
        if match and match[1] in _PACKAGES:
            versions.setdefault(match[1], match[2] + (match[3] or ""))
    return versions


def _for_others(
    row: MeasuredRow, machine: Mapping[str, str | int], installed: Mapping[str, str], here: NodeType | None
) -> MeasuredRow:
    """Return a row of known words and numbers only."""
    platform, layout = _known(row, here)
    file = None if platform in cluster_names() else record.encode(here)  # as it is read here, not as the owner has it
    run = run_of(replace(row, platform=platform), here)  # what cannot be read again helps nobody
    arch = {name: value for name, value in row.arch.items() if name in ARCH} if row.arch else None
    model = f"decoder-{run.model.num_layers}x{run.model.hidden}" if arch else row.model
    versions, date = versions_in(row.framework_version), _DATE.match(row.first_seen or "")
    framework = _FRAMEWORK.match(row.framework or "")
    same = installed.get("torch", "").partition("+")[0] == versions.get("torch", "").partition("+")[0]
    around = installed if same else dict[str, str]()
    bare = MeasuredRow(
        id="contributed",
        kind=row.kind,
        group=f"{model}-{platform}-{layout.num_ranks}-{row.seq_len}-{row.global_batch_seqs}",
        platform=platform,
        cluster=file,
        model=model,
        arch=arch,
        **{name: getattr(row, name) for name in _NUMBERS},
        precision=row.precision,
        sharding=_SHARDING[layout.zero],
        candidate=str(layout),
        framework=framework[0] if framework else "autoshard",
        framework_version=", ".join(f"{name} {version}" for name, version in versions.items()) or None,
        source={"contributed": _FORMAT, "versions": {**around, **versions}, "machine": dict(machine)},
        first_seen=date[0] if date else None,
    )
    digest = hashlib.sha256(json.dumps(record.encode(bare), sort_keys=True).encode()).hexdigest()
    return replace(bare, id=f"contributed {digest[:_DIGITS]}")


def _known(row: MeasuredRow, here: NodeType | None) -> tuple[str, Candidate]:
    """Return the platform and the layout of a row, or say which of its words are nobody's but the owner's."""
    platform = ALIASES.get(row.platform, row.platform)
    unknown_platform = (
        "is a cluster of your own, and no name of `autoshard list clusters`, nor what `list clusters --here` says here"
    )
    require(
        (not row.unfit, "", row.unfit),
        (row.step_time_s is not None, "step_time_s", "is missing"),
        (platform in cluster_names() or (here is not None and platform == here.name), "platform", unknown_platform),
        (row.candidate is not None, "candidate", "is missing: only runs of autoshard are contributed"),
        (bool(row.arch) or row.model in model_names(), "model", "is no card, and arch is missing"),
    )
    with inside("precision"):
        precision_of(row.precision or "bf16")
    with inside("candidate"):
        layout = Candidate.parse(row.candidate or "")
    unknown = layout.kernels and table_fault(layout.kernels)
    require((not unknown, "candidate", unknown or ""))
    return platform, layout


def _stated(row: MeasuredRow) -> Mapping[str, Any]:
    return {name: value for name, value in record.encode(row).items() if value is not None}
