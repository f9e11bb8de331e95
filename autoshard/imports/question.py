"""From a configuration to the question of a planner, and the candidate that it states; what is assumed is said."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from autoshard.errors import InputError, require
from autoshard.imports.batches import with_batches
from autoshard.imports.imported import ImportedRun
from autoshard.imports.model import DROPOUTS, model_of
from autoshard.imports.ranks import AXES, degrees_of, stated_ranks
from autoshard.imports.stages import chunks_of, recompute_of_stages, with_ends
from autoshard.imports.table import Facts
from autoshard.plan.candidate import Candidate, even_stages, parse_pins
from autoshard.plan.folding import unfolded
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Engine
from autoshard.search.ask.api import request_of
from autoshard.search.ask.arguments import Brought
from autoshard.search.bound.request import MOST_RANKS, Request, resolved
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from autoshard.spec.kernels import libraries_of, load_kernels, program_table
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import Pins, QuestionOptions, headroom_check
from autoshard.spec.repeats import MAX_ITEMS
from autoshard.spec.workload import ROUTER_TRAINING
from autoshard.units import counted

_CHIPS = re.compile(
    r"(?<![a-z])(gb200|gb300|b300|b200|h100|h200|h800|a100|trn1n?|trn2u?|trn3|vr200|r100)(?![0-9])", re.IGNORECASE
)
_NEAREST: Mapping[str, str] = {"vr200": "gb300", "r100": "b300"}  # no cluster file has these


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What a user says of a configuration beside its file; None where the file decides.

    Args:
        model: A model card by name (see `autoshard list models`), or the path of a Hugging Face config.json. Default:
            what the file says, or the card with its sizes.
        cluster: A cluster by name (see `autoshard list clusters`), or the path of a cluster file. Default: what the
            file or its name says, or h100-80; for NxD Training trn1.32xlarge.
        lnc: Logical NeuronCore configuration of trn2 and trn3: 1 or 2. Default: what the file says.
        seq_len: Tokens in a sequence. Default: what the file says.
        global_batch: Sequences in an optimizer step. Default: what the file says.
        precision: Number format of weights and activations, as for `autoshard plan`. Default: what the file says.
        headroom: The share of a rank's usable memory that stays free: 0.1 is 10 %, 0 none. Default: 0.1.
        calibration: A calibration file, made by `autoshard calibrate`. Default: the one that comes with the cluster.
        release: The release of the platform's software, e.g. 2.17 of the Neuron SDK.
        fix: Keys of the layout that the file leaves open, or that are to be others, e.g. mbs=4,recompute=full.
    """

    model: str | None = None
    cluster: str | None = None
    lnc: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    headroom: float | None = None
    calibration: str | None = None
    release: str | None = None
    fix: Pins | None = None

    def __post_init__(self) -> None:
        require(headroom_check(self.headroom or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a file leaves open: what was taken, why, and the option that sets it."""

    what: str
    why: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}{f' ({self.option} sets it)' if self.option else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedQuestion:
    """The question of a configuration, and its answer to it."""

    run: ImportedRun
    request: Request
    candidate: Candidate
    engine: Engine
    model_from: str
    assumed: tuple[Assumed, ...]
    opens_nodes: bool  # whether neither file nor user states a number of ranks


def imported_question(
    run: ImportedRun, options: ImportOptions, nodes: int | None = None, why: Assumed | None = None
) -> ImportedQuestion:
    """Return the question of a configuration; what is typed goes before what the file says.

    ``why`` is said of a number of nodes that nobody typed.
    """
    model, model_from = model_of(run, options.model)
    builder = _QuestionBuilder(run=run, options=options, nodes=nodes, model=model, assumed=[why] if why else [])
    return builder.question(model_from)


def _refuse_counts(facts: Facts, file: str) -> None:
    """Refuse counts that no run can have, and pipelines that nobody could list."""
    counts = {name: facts[name] for name in _COUNTS if facts.get(name) is not None}
    stages = int(facts.get("layout.pp", 1)) * int(facts.get("layout.vp", 1))
    where = Path(file).name
    require(
        *((1 <= int(count) <= MOST_RANKS, where, f"{name.partition('.')[2]} must be 1 to {MOST_RANKS}, not {count}")
          for name, count in counts.items()),
        (stages <= MAX_ITEMS, where, f"{stages} stages; a pipeline has at most {MAX_ITEMS}"),
    )  # fmt: skip


_COUNTS = (
    *(
        f"layout.{key}"
        for key in ("tp", "pp", "cp", "ep", "etp", "dp", "vp", "mbs", "replicas", "shards", "layers_per_stage")
    ),
    *(
        "layout.every",
        "layout.zero_group",
        "layout.weight_group",
        "cluster.nodes",
        "cluster.per_node",
        "cluster.ranks",
        "work.accumulation",
    ),
    *("work.seq_len", "work.global_batch"),
)


@dataclass(slots=True, kw_only=True)
class _QuestionBuilder:
    """Collects what is assumed on the way."""

    run: ImportedRun
    options: ImportOptions
    nodes: int | None
    model: ModelSpec
    assumed: list[Assumed] = field(default_factory=list[Assumed])

    def assume(self, what: str, why: str, option: str = "") -> None:
        self.assumed.append(Assumed(what=what, why=why, option=option))

    @property
    def facts(self) -> Facts:
        """The facts of the file, with what was typed about the layout over them."""
        pins = parse_pins(self.options.fix or "")
        batch = {"work.global_batch": self.options.global_batch} if self.options.global_batch else {}
        return {**self.run.facts, **batch, **{f"layout.{key}": value for key, value in pins.items()}}

    def question(self, model_from: str) -> ImportedQuestion:
        """Return the question and the candidate."""
        facts = self.facts
        _refuse_counts(facts, self.run.file)
        sizes = {axis: int(facts.get(f"layout.{axis}", 1)) for axis in AXES}
        name, lnc = self._cluster_name()
        cluster = self._cluster(name, lnc, sizes, facts)
        self._assume_dropouts(cluster)
        dp = cluster.num_ranks // math.prod(sizes.values()) or 1
        if (degrees := degrees_of(facts)) not in (None, dp):
            told = (
                f"the degrees of the file make {degrees}, and {self.run.program.title} refuses other numbers of ranks"
            )
            self.assume(f"dp {dp}", f"{told} until they are changed", "--nodes")
        by_file = "work.global_batch" in self.run.facts
        facts, (what, *why) = with_batches(facts, self.run.program, dp, by_file=by_file)
        if what:
            self.assume(what, *why)
        work = self._work(facts)
        stated = QuestionOptions(
            model=self.model.name, cluster=name, lnc=lnc, seq_len=work["seq_len"], global_batch=work["global_batch"],
            precision=work["precision"], headroom=self.options.headroom, calibration=self.options.calibration,
            release=self.options.release, **self._router_losses(facts),
        )  # fmt: skip
        request = request_of(stated, cluster.num_nodes, Brought(model=self.model))
        request = replace(request, cluster=cluster, other_lnc=())
        capacity = facts.get("work.expert_capacity") if self.model.num_experts else None
        request = replace(request, workload=replace(request.workload, expert_capacity=capacity))
        if request.defaults:
            self.assume("length and batch", request.defaults, "--seq-len, --global-batch")
        candidate, engine = resolved(request, self._candidate(facts, sizes, dp, cluster))
        return ImportedQuestion(
            run=self.run,
            request=replace(request, pins={"kernels": candidate.kernels or cluster.kernels}),
            candidate=candidate,
            engine=engine,
            model_from=model_from,
            assumed=tuple(self.assumed),
            opens_nodes=self.nodes is None and stated_ranks(self.run, facts, cluster.ranks_per_node)[0] is None,
        )

    def _assume_dropouts(self, cluster: Cluster) -> None:
        """Take what the program drops where its file does not say; neuronx-distributed, in its place, drops nothing."""
        program = self.run.program
        usual = {key: program.defaults.get(f"model.{key}", getattr(self.model, key)) for key in DROPOUTS}
        unsaid = {key: rate for key, rate in usual.items() if f"model.{key}" not in self.run.said}
        changed = {key: rate for key, rate in unsaid.items() if rate != getattr(self.model, key)}
        if changed and cluster.engine != "nxd":
            self.model = replace(self.model, **changed)
            rates = ", ".join(f"{key.replace('_', ' ')} {rate:g}" for key, rate in changed.items())
            self.assume(rates, f"the default of {program.title}", f"{', '.join(changed)} of the file")

    def _router_losses(self, facts: Facts) -> Mapping[str, Any]:
        """Return the losses of routers that are stated; a model without experts has none, whatever a file says."""
        keys = ROUTER_TRAINING if self.model.num_experts else ()
        return {key: facts[f"work.{key}"] for key in keys if facts.get(f"work.{key}")}

    def _cluster_name(self) -> tuple[str, int | None]:
        """Return the name of the cluster and its logical cores."""
        lnc = self.options.lnc or self.run.facts.get("cluster.lnc")
        if self.options.cluster:
            return self.options.cluster, self.options.lnc
        if name := self.run.facts.get("cluster.name"):
            self.assume(f"cluster {name}", f"its nodes have {self.run.facts['cluster.per_node']} ranks", "--cluster")
            return name, lnc
        match = _CHIPS.search(f"{self.run.hints} {self.run.file}")
        if match is None:
            self.assume(f"cluster {self.run.program.cluster}", "the file names none", "--cluster")
            return self.run.program.cluster, lnc
        word = match[1].lower()
        name = _NEAREST.get(word, word)
        name = load_cluster(name).name
        why = f"{word} in the file's name or first comment" if name in cluster_names() and word not in _NEAREST else (
            f"no cluster file has the {word} of the file's name"
        )  # fmt: skip
        self.assume(f"cluster {name}", why, "--cluster")
        return name, lnc

    def _cluster(self, name: str, lnc: int | None, sizes: Mapping[str, int], facts: Facts) -> Cluster:
        """Return the cluster with as many nodes as are typed or stated, or as few as the layout needs."""
        node = load_cluster(name, lnc=lnc)
        need = math.prod(sizes.values()) * self._least_dp(facts)
        if self.nodes is not None:
            return load_cluster(name, self.nodes, lnc=lnc)
        ranks, why = stated_ranks(self.run, facts, node.ranks_per_node)
        if ranks is None or ranks % need:
            nodes = math.lcm(need, node.ranks_per_node) // node.ranks_per_node
            said = f"the file says {counted(ranks, 'rank')}, but " if ranks else ""
            said = said or "the file names no number of nodes; "
            self.assume(counted(nodes, "node"), f"{said}the layout needs {counted(need, 'rank')}", "--nodes")
            return load_cluster(name, nodes, lnc=lnc)
        if why:
            self.assume(counted(ranks, "rank"), why, "--nodes")
        per_node = node.ranks_per_node
        if ranks % per_node == 0:
            return load_cluster(name, ranks // per_node, lnc=lnc)
        per_chip = node.ranks_per_chip
        nodes = -(-ranks // per_node)
        if ranks % nodes or ranks // nodes % per_chip:
            raise InputError.of("--nodes", f"missing: {ranks} ranks do not fill nodes of {name} evenly. Type a number")
        whole = load_cluster(name, nodes, lnc=lnc)
        return replace(whole, chips_per_node=ranks // nodes // per_chip, placements=())

    def _least_dp(self, facts: Facts) -> int:
        """Return how many replicas a layout has at least."""
        return math.lcm(self._experts(facts)["ep"], degrees_of(facts) or 1, int(facts.get("layout.dp", 1)))

    def _experts(self, facts: Facts) -> Mapping[str, Any]:
        """Return over which ranks experts are shared out."""
        program, ep = self.run.program, int(facts.get("layout.ep", 1))
        tp, cp = (int(facts.get(f"layout.{axis}", 1)) for axis in ("tp", "cp"))
        if not self.model.num_experts:
            return {"ep": 1}
        if program.engine == "nxd" or not program.limits.folds:  # a Rule keeps the nxd engine from folding
            return {"ep": ep, "fold": "none" if program.engine == "torch" and max(tp, cp) > 1 else None}
        ep, fold = unfolded(ep, facts.get("layout.etp"), tp=tp, cp=cp)
        return {"ep": ep, "fold": fold}

    def _work(self, facts: Facts) -> dict[str, Any]:
        """Return length, batch and number formats; None where they are left open."""
        return {
            "seq_len": self.options.seq_len or facts.get("work.seq_len"),
            "global_batch": facts.get("work.global_batch"),
            "precision": self.options.precision or facts.get("work.precision") or "bf16",
        }

    def _candidate(self, facts: Facts, sizes: Mapping[str, int], dp: int, cluster: Cluster) -> Candidate:
        """Return the layout that the file states, on so many ranks."""
        if "layout.mbs" not in facts:
            self.assume("micro-batch 1", "the file does not say", "--fix mbs=N")
        piped, (vp, schedule) = sizes["pp"] > 1, self._pipeline(facts, sizes["pp"])
        zero, group = self._sharding(facts, dp, sizes["cp"], cluster)
        kernels, recompute = self._kernels(facts, cluster)
        names = {"cp_kind": "ring", "cp_order": "contiguous"}
        ring = {key: facts.get(f"layout.{key}", value) if sizes["cp"] > 1 else value for key, value in names.items()}
        ring["cp_order"] = "contiguous" if cluster.engine == "nxd" else ring["cp_order"]
        stages = self._stages(facts, sizes["pp"], vp) if piped else None
        layers = stages or even_stages(self.model.num_layers, sizes["pp"] * vp)
        return Candidate(
            **sizes,
            dp=dp,
            **self._experts(facts),
            vp=vp,
            mbs=int(facts.get("layout.mbs", 1)),
            sp=facts.get("layout.sp") if sizes["tp"] > 1 else None,
            zero=cast(Any, zero),
            zero_group=group,
            weight_group=weights
            if zero == 3 and (weights := facts.get("layout.weight_group")) != dp * sizes["cp"]
            else None,
            schedule=schedule,
            stages=stages,
            recompute=recompute_of_stages(recompute, layers, facts.get("layout.every")),
            kernels=kernels,
            lnc=cluster.lnc,
            **cast(Any, ring),
        )

    def _pipeline(self, facts: Facts, pp: int) -> tuple[int, str]:
        """Return the chunks of a rank, and the schedule."""
        if pp == 1:
            return 1, "1f1b"
        vp = int(facts.get("layout.vp", 1))
        if "layout.num_stages" in facts and "layout.vp" not in facts:
            vp = max(1, int(facts["layout.num_stages"]) // pp)
        elif "layout.layers_per_stage" in facts and "layout.vp" not in facts:
            vp = chunks_of(self.model.num_layers, pp, facts)
        elif "layout.vp" not in facts:
            vp = int(facts.get("layout.vp_of_schedule", 1))
        return vp, str(facts.get("layout.schedule") or ("interleaved" if vp > 1 else "1f1b"))

    def _stages(self, facts: Facts, pp: int, vp: int) -> tuple[int, ...] | None:
        """Return the layers of each stage, None for the even split."""
        layers, num_stages = self.model.num_layers, pp * vp
        stages: tuple[int, ...] | None = facts.get("layout.stages")
        if cuts := facts.get("layout.cuts"):
            ends = [0, *(cut + 1 for cut in cuts), layers]
            stages = tuple(end - start for start, end in pairwise(ends))
        first, last = facts.get("layout.first"), facts.get("layout.last")
        if stages is None and (first or last):
            stages = with_ends(layers, pp, vp, (first, last))
        if stages is None:
            stages = self.run.program.stages(layers, num_stages, facts)
        return None if stages is None or stages == even_stages(layers, num_stages) else stages

    def _sharding(self, facts: Facts, dp: int, cp: int, cluster: Cluster) -> tuple[int, int | None]:
        """Return the stage of ZeRO, and the ranks over which it divides states where that is not all of dp and cp."""
        zero, whole = int(facts.get("layout.zero", 0)), dp * cp
        shards, replicas = facts.get("layout.shards"), int(facts.get("layout.replicas", 1))
        if shards == 1 and cp == 1 and "layout.shards" in facts and self.run.program.name == "torchtitan":
            zero = 0
        if whole == 1:
            return (1 if zero == 1 else 0), None
        group = whole // replicas if replicas > 1 and whole % replicas == 0 else None
        if facts.get("layout.shards_in_node"):
            inner = max(1, cluster.ranks_per_node // int(facts.get("layout.tp", 1)))
            group = inner if whole % inner == 0 and inner < whole else None
        group = facts.get("layout.zero_group", group)
        if zero == 3 and group == 1:
            return 0, None
        return zero, group if zero and group not in (None, whole) else None

    def _kernels(self, facts: Facts, cluster: Cluster) -> tuple[str | None, tuple[Recompute, ...]]:
        """Return the kernels of the program, or the cluster's own where it has no such devices."""
        key = "layout.kernels"
        kernels = str(facts.get(key, cluster.kernels))
        if (libraries := libraries_of(kernels)) and not self.model.num_experts and kernels == self.run.facts.get(key):
            kernels = program_table(kernels)
            self.assume(f"kernels {kernels}", f"{self.model.name} has no experts that need {' and '.join(libraries)}")
        recompute: tuple[Recompute, ...] = facts.get("layout.recompute", (Recompute(),))
        is_said = "layout.recompute" in self.run.said or "recompute" in parse_pins(self.options.fix or "")
        if recompute[0].kind != "none" and not is_said:
            why = f"the default of {self.run.program.title}"
            self.assume(f"recompute {recompute[0].kind}", why, "--fix recompute=KIND")
        if (load_kernels(kernels).engine == "nxd") == (cluster.engine == "nxd"):
            return (None if kernels == cluster.kernels else kernels), recompute
        program = load_kernels(cluster.kernels).program
        why = f"{self.run.program.title} does not run on {cluster.name}; {program} does"
        self.assume(f"kernels {cluster.kernels}", why)
        resolve = load_kernels(kernels).resolve
        return None, tuple(replace(kind, ops=resolve(kind.ops)) if kind.ops else kind for kind in recompute)
