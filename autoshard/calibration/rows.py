"""Measured rows: one run per line of JSON, with what was run, what it took, and where that is written."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

from autoshard.calibration.architecture import stated_arch
from autoshard.errors import Fault, InputError, no_such_file, require
from autoshard.plan.folding import expert_mesh, fold_of
from autoshard.plan.plan import Plan
from autoshard.spec import record
from autoshard.spec.cluster import LOCAL
from autoshard.spec.cluster_catalogue import NodeType, load_node_type
from autoshard.spec.files import json_lines, read_data
from autoshard.spec.kernels import load_kernels, table_fault
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.record import encode
from autoshard.spec.workload import BalancedOver, Documents, Optimizer, Precision
from autoshard.units import counted

# short: ended, or was stopped, before its times had settled; crashed: took no step, perhaps because memory ran out
Kind = Literal["run", "rehearsal", "short", "crashed"]
SUFFIX = ".jsonl"
OF_A_RUN = "measured.jsonl"  # in the folder of a run, beside other files
OF_A_CLUSTER = "cluster.json"  # beside rows: the file of the machine that they were run on

_COUNTS = ("seq_len", "global_batch_seqs", "micro_batch", "nodes", "chips", "lnc", "tp", "pp", "vp", "cp", "ep", "dp",
           "etp", "zero_group")  # fmt: skip
_RELEASE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})*")
_MOST_FAULTS = 3  # of a row that is left out
_UNFIT: Mapping[Kind | None, str] = {
    "rehearsal": "is of a rehearsal, which runs a small model in the place of the plan's",
    "short": "is of a run that ended before its times had settled",
}
_OTHERS = (  # keys of other files, what each file is, and which command takes it
    ({"schema", "strategies"}, "a plan", "`autoshard verify {0}` checks it, `autoshard explain {0}` shows its parts, "
     "and `autoshard run {0}` measures it: the row is measured.jsonl in the folder of the run"),
    ({"step", "loss"}, "the metrics of a run, a line for each step", "The row of a run is measured.jsonl beside them: "
     "`autoshard validate {1}`"),
    ({"id", "status"}, "the table of a sweep", "Name one of its runs, or the folder of its runs"),
    ({"model", "cluster"}, "a recipe", "`autoshard plan --config {0}` finds its plan"),
    ({"matrix_efficiency", "interval"}, "a calibration", "`autoshard validate ROWS --calibration {0}` tries it"),
    ({"variants", "links"}, "a cluster file", "`autoshard plan --cluster {0}` plans for it"),
    ({"base", "source"}, "a cluster file", "`autoshard plan --cluster {0}` plans for it"),
    ({"model_type"}, "the config of a model", "`autoshard plan --model {0}` plans for it"),
)  # fmt: skip
_UNENDED = "holds a run without a measured row, which is written when it ends"
_REMEDY = "Run a plan to its end (autoshard run PLAN), and name the file measured.jsonl in its folder, or its folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One measured run; None is what its publisher does not say."""

    id: str
    kind: Kind | None = None  # a whole run, where a row does not say
    group: str | None = None  # rows that could be chosen between: same model, chips, sequence and batch
    platform: str
    cluster: Mapping[str, object] | None = field(default=None, hash=False)  # its file, in a row that came alone
    model: str | None = None
    arch: Mapping[str, object] | None = field(default=None, hash=False)
    seq_len: int
    global_batch_seqs: int
    micro_batch: int | None = None
    nodes: int | None = None
    chips: int | None = None
    lnc: int | None = None
    network_gbps: float | None = None  # of a node, all of its ports together; that of its platform, if not stated
    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    etp: int | None = None  # ranks of tp that share each expert: 1, or tp, where a row does not say
    sp: bool | None = None
    recompute: str | None = None
    sharding: str | None = None
    zero_group: int | None = None  # ranks over which ZeRO divides states; all of dp and cp, where a row does not say
    precision: str | None = None
    optimizer: Optimizer | None = None  # AdamW, where a row does not say
    documents: Documents | None = None  # joined, where a row does not say
    expert_imbalance: float | None = None  # of the busiest expert over the mean; 0 where routing was forced to be even
    router_balance_loss: float | None = None  # none, where a row does not say; likewise
    router_balance_over: BalancedOver | None = None
    router_z_loss: float | None = None
    router_bias_speed: float | None = None
    pipeline_schedule: str | None = None
    candidate: str | None = None  # the whole layout in text, where it was autoshard that ran; agrees with the columns
    framework: str | None = None
    framework_version: str | None = None
    release: str | None = None  # of the platform's software, in numbers: 2.18.0 of the Neuron SDK
    kernels: str | None = None  # the table of what the framework runs as one kernel; that of the platform's usual one
    flash_attention: bool | None = None
    step_time_s: float | None = None
    peak_memory_gib: float | None = None
    peak_memory_gib_by_stage: tuple[float, ...] | None = None
    confidence: str | None = None
    inferred: Mapping[str, object] | None = field(default=None, hash=False)  # what is not published: field -> from what
    published: Mapping[str, object] | None = field(default=None, hash=False)  # column -> the publisher's own words
    source: Mapping[str, object] | None = field(default=None, hash=False)
    first_seen: str | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no run can have."""
        counts = [(name, getattr(self, name)) for name in _COUNTS]
        measured = [(name, getattr(self, name)) for name in ("step_time_s", "peak_memory_gib", "network_gbps")]
        require(
            (bool(self.id.strip()), "id", "must not be empty"),
            (self.release is None or bool(_RELEASE.fullmatch(self.release)), "release",
             f"must be a number such as 2.18.0, or null, not {self.release!r}"),
            (not (unknown := self.kernels and table_fault(self.kernels)), "kernels", unknown or ""),
            (self.nodes is not None or self.chips is not None, "nodes", "missing; say nodes, chips or both"),
            (self.kind != "crashed" or not (self.step_time_s or self.peak_memory_gib), "kind",
             "a run that crashed has no step_time_s and no peak_memory_gib"),
            *((count is None or count >= 1, name, f"must be at least 1, or null, not {count}")
              for name, count in counts),
            *((value is None or value > 0, name, f"must be positive, or null, not {value}")
              for name, value in measured),
        )  # fmt: skip

    @classmethod
    def read(cls, data: object) -> "MeasuredRow":
        """Read one row, or raise an InputError that names every field at fault; tables in CSV write 8 as 8.0.

        >>> data = {"id": "a", "platform": "trn1", "seq_len": 4096, "global_batch_seqs": 8, "nodes": 1, "tp": 8.0}
        >>> MeasuredRow.read(data).tp
        8
        """
        if isinstance(data, InputError):  # no JSON
            raise data
        if not isinstance(data, dict):
            return record.decode(cls, data)
        fields = cast(dict[str, object], data)
        if not {"id", "platform"} & fields.keys():
            raise InputError.of("", "is no measured row, which has an id and a platform")
        counts = {name: fields[name] for name in _COUNTS if name in fields}
        whole = {name: int(value) for name, value in counts.items() if isinstance(value, float) and value.is_integer()}
        return record.decode(cls, {**fields, **whole})

    @property
    def unmeasured(self) -> "MeasuredRow":
        """The same row without what was measured: all that a prediction may look at."""
        return replace(self, step_time_s=None, peak_memory_gib=None, peak_memory_gib_by_stage=None)

    @property
    def own_cluster(self) -> NodeType | None:
        """The cluster file that the row carries."""
        with suppress(InputError):
            return None if self.cluster is None else record.decode(NodeType, self.cluster)
        return None

    @property
    def unfit(self) -> str:
        """Why the row says nothing about the runs of its group; "" if it does."""
        return _UNFIT.get(self.kind, "")

    @property
    def layout(self) -> tuple[object, ...]:
        """What a planner decides about the run: rows of one group that agree here measured the same choice twice."""
        axes = (self.tp, self.pp, self.vp, self.cp, self.ep, self.dp, self.sp, self.zero_group)
        texts = (
            self.recompute,
            self.sharding,
            self.precision,
            self.pipeline_schedule,
            self.candidate,
            self.framework,
        )
        return (*axes, self.micro_batch, *texts, self.kernels, self.flash_attention)


def precision_of(text: str) -> Precision:
    """Read the precision of a row: a name, and what differs from it; plain fp16 leaves the gradients open.

    >>> precision_of("bf16,products=fp8").products, precision_of("fp16,gradients=fp16").masters
    ('fp8', 'fp32')
    """
    is_open = text.startswith("fp16") and "gradients=" not in text
    require((not is_open, "", "write fp16,gradients=fp16 or fp16,gradients=fp32"))
    return Precision.named(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """The rows of files by their place (``runs.jsonl line 3``), their data sets, and why other rows are left out."""

    rows: Mapping[str, MeasuredRow]
    sets: Mapping[str, str]  # place of a row -> name of its data set
    left_out: Mapping[str, InputError]
    incomplete: frozenset[str] = frozenset()  # places in left_out of rehearsals, and of runs that did not end
    clusters: Mapping[str, NodeType] = field(default_factory=dict[str, NodeType])  # that lie beside rows, by place

    @property
    def num_unread(self) -> int:
        """Rows that are left out though they are of whole runs."""
        return len(self.left_out.keys() - self.incomplete)

    def without(self, faults: Mapping[str, InputError], path: Path | None = None) -> "MeasuredRows":
        """Leave more rows out; given the path that all are of, raise an InputError if none is left."""
        rows = {where: row for where, row in self.rows.items() if where not in faults}
        remaining = replace(self, rows=rows, left_out={**self.left_out, **faults})
        if path and not rows:
            nothing = Fault(where=str(path), message=f"holds no measured row that can be used. {_REMEDY}")
            raise InputError([nothing, *remaining.left_out_lines])
        return remaining

    @property
    def left_out_lines(self) -> tuple[Fault, ...]:
        """One line for each row that is left out; neighbouring lines of a file with the same fault share one."""
        placed: list[tuple[str, int, str]] = []
        for where, error in self.left_out.items():
            file, _, number = where.rpartition(" line ")
            more = (
                f", and {counted(len(error.faults) - _MOST_FAULTS, 'fault')} more"
                if len(error.faults) > _MOST_FAULTS
                else ""
            )
            says = "; ".join(map(str, error.faults[:_MOST_FAULTS])) + more
            placed.append((file, int(number), says) if number.isdigit() else (where, 0, says))
        lines: list[Fault] = []
        for _, group in groupby(enumerate(placed), key=lambda line: (line[1][0], line[1][2], line[1][1] - line[0])):
            (_, (file, first, says)), *following = group
            at = f" lines {first} to {first + len(following)}" if following else f" line {first}"
            lines.append(Fault(where=file + (at if first else ""), message=says))
        return tuple(lines)


def measured_rows(path: Path) -> MeasuredRows:
    """Read the data sets of a path: every file is one, all runs of a folder are one; a row counts once in a set.

    Rows of rehearsals and of runs that were too short are used where a file or a run is named that has no others.
    """
    rows: dict[str, MeasuredRow] = {}
    sets: dict[str, str] = {}
    left_out: dict[str, InputError] = {}
    places: dict[tuple[str, str], str] = {}
    clusters: dict[str, NodeType] = {}
    runs = sorted(folder for folder in path.iterdir() if folder.is_dir() and _is_run(folder)) if path.is_dir() else []
    unended = {str(run): InputError.of("", _UNENDED) for run in runs if not (run / OF_A_RUN).is_file()}
    absent = no_such_file(path, "Rows are written by runs (autoshard run) and from logs (autoshard import LOG --rows)")
    require((path.exists(), str(path), absent))
    _refuse_others(path)
    files = [path]  # a file, that of a run, all of a folder, those of its runs
    if (path / OF_A_RUN).is_file():
        files = [path / OF_A_RUN]
    elif path.is_dir():
        require((not _is_run(path), str(path), f"{_UNENDED}. {_REMEDY}"))
        files = sorted(path.glob(f"*{SUFFIX}")) + sorted(path.glob(f"*/{OF_A_RUN}"))
        require((bool(files or unended), str(path), f"holds no files of rows: their names end in {SUFFIX}"))
    for file in files:
        name = file.stem if path in (file, file.parent) else path.resolve().name
        beside = _cluster_beside(file)
        for where, row in _rows_in(file).items():
            cluster = beside if isinstance(row, InputError) else row.own_cluster or beside
            if isinstance(row, InputError):
                left_out[where] = row
            elif (name, row.id) in places:
                left_out[where] = InputError.of("id", f"{row.id} stands in {places[name, row.id]} already")
            else:
                rows[where], sets[where], places[name, row.id] = row, name, where
                clusters |= {where: cluster} if cluster else {}
    unended = unended if not files or any(file.parent.parent == path for file in files) else {}
    unfit = {where: InputError.of("", row.unfit) for where, row in rows.items() if row.unfit}
    keeps_unfit = files in ([path], [path / OF_A_RUN]) and len(unfit) == len(rows)
    unfit = {} if keeps_unfit else unfit
    incomplete = frozenset([*unended, *unfit])
    measured = MeasuredRows(
        rows=rows, sets=sets, left_out={**left_out, **unended}, incomplete=incomplete, clusters=clusters
    )
    return measured.without(unfit, path)


def _cluster_beside(file: Path) -> NodeType | None:
    """Return the node type whose file lies beside rows, if there is one that can be read."""
    beside = file.with_name(OF_A_CLUSTER)
    with suppress(InputError):
        return load_node_type(str(beside)) if beside.is_file() else None
    return None


def _refuse_others(path: Path) -> None:
    """Refuse a file of another kind, and say which command takes it."""
    if not path.is_file():
        return
    try:
        data: object = next(iter(json_lines(path).values()), None)
        data = read_data(path) if isinstance(data, InputError) else data
    except InputError:
        return
    keys = set(cast(dict[str, object], data)) if isinstance(data, dict) else set[str]()
    for file_keys, what, use in _OTHERS:
        if file_keys <= keys and "platform" not in keys:
            raise InputError.of(str(path), f"is {what}, not a file of measured rows. {use.format(path, path.parent)}")


def _rows_in(file: Path) -> Mapping[str, MeasuredRow | InputError]:
    """Return the rows of a file, or what is wrong with them: a run that is killed leaves half a line."""
    lines = dict[str, MeasuredRow | InputError]()
    for where, data in json_lines(file).items():
        try:
            lines[where] = MeasuredRow.read(data)
        except InputError as error:
            lines[where] = error
    return lines or {str(file): InputError.of("", "holds no rows; write one JSON object per line")}


def _is_run(folder: Path) -> bool:
    return (folder / "plan.json").is_file() and (folder / "logs").is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """One run of a plan: what it took, and when which software ran it."""

    name: str
    step_time_s: float
    date: str  # YYYY-MM-DD
    versions: str
    kind: Kind = "run"
    platform: str = LOCAL  # what ran it: the processors here, whatever the plan is for, or the plan's own cluster


def row_text(plan: Plan, ran: Occasion) -> str:
    """Write the row of a run as a line, without empty fields."""
    row = encode(row_of(plan, ran))
    return json.dumps({name: value for name, value in row.items() if value is not None})


def row_of(plan: Plan, ran: Occasion) -> MeasuredRow:
    """Return the row of a run: ``calibrate`` and ``validate`` read it as the same question.

    On another platform than the plan's, its layout is written without what belongs to that platform; recompute names
    the operations themselves, because other kernels have other names for sets of them. So it is where the plan's
    kernels are those of another program, because an engine of autoshard's was measured.
    """
    model, workload, cluster, layout = plan.model, plan.workload, plan.cluster, plan.candidate
    at_home, own_kernels = ran.platform == cluster.name, load_kernels(plan.kernels).engine is not None
    if not (at_home and own_kernels):
        resolve, ops = load_kernels(plan.kernels).resolve, {op for cuts in plan.strategies.values() for op in cuts}
        recompute = tuple(
            replace(entry, ops=tuple(op for op in resolve(entry.ops) if op in ops)) if entry.ops else entry
            for entry in layout.recompute
        )
        layout = replace(layout, kernels=None, recompute=recompute)
    if not at_home:
        layout = replace(layout, place=None, lnc=None)
    layout = replace(layout, fold=fold_of(plan))
    axes: dict[str, Any] = {axis: getattr(layout, axis) for axis in ("tp", "pp", "vp", "cp", "dp", "lnc")}
    ep, etp = expert_mesh(layout)
    has_card = model.name in model_names() and load_model(model.name) == model
    return MeasuredRow(
        id=ran.name,
        kind=ran.kind,
        group=f"{model.name}-{ran.platform}-{layout.num_ranks}-{workload.seq_len}-{workload.global_batch}",
        platform=ran.platform,
        model=model.name,
        arch=None if has_card else stated_arch(model),
        seq_len=workload.seq_len,
        global_batch_seqs=workload.global_batch,
        micro_batch=layout.mbs,
        nodes=cluster.num_nodes if at_home else 1,
        chips=cluster.num_nodes * cluster.chips_per_node if at_home else layout.num_ranks,
        **axes,
        ep=ep,
        etp=etp if layout.fold else None,
        sp=layout.sequence_parallel,
        sharding={0: "none", 1: "ZeRO-1", 3: "ZeRO-3"}[layout.zero],
        precision="fp16,gradients=fp32" if workload.precision.name == "fp16" else workload.precision.name,
        optimizer=workload.optimizer,
        documents=None if workload.documents == "joined" else workload.documents,
        expert_imbalance=workload.expert_imbalance if model.num_experts else None,
        **workload.router_training,
        candidate=str(layout),
        framework=f"autoshard, {plan.engine if at_home else 'torch'} engine",
        framework_version=ran.versions,
        step_time_s=ran.step_time_s,
        source={"plan": str(plan.candidate), "cluster": plan.cluster.name},
        first_seen=ran.date,
    )
