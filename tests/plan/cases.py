"""Real models on real clusters, and random candidates that have a shape on them."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import plan_hash
from autoshard.plan.plan import Prediction, StageMemory, rounded
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.check import rejections
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.schedule.builders import BUILDERS
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload

model = functools.cache(load_model)
cluster = functools.cache(load_cluster)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything but the candidate."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engine: Engine

    @property
    def facts(self) -> tuple[ModelSpec, Cluster, Workload, Engine]:
        return self.model, self.cluster, self.workload, self.engine

    def columns(self, **values: Any) -> Columns:
        return Columns(model=self.model, cluster=self.cluster, workload=self.workload, engine=self.engine, **values)


def workload(**changes):
    precision = Precision.named(changes.pop("precision", "bf16"))
    return Workload(**{"seq_len": 8192, "global_batch": 1024, "precision": precision, **changes})


def ask(model_name="llama3-70b", cluster_name="trn1.32xlarge", nodes=16, lnc=None, **changes):
    engine = changes.pop("engine", None)
    place = cluster(cluster_name, nodes, lnc, changes.pop("ranks", None))
    return Question(model=model(model_name), cluster=place, workload=workload(**changes), engine=engine or place.engine)


def reasons(question, text, extra_rules=()):
    candidate = Candidate.parse(text, question.cluster.num_ranks)
    return {r.rule_id: r for r in rejections(candidate, *question.facts, extra_rules=extra_rules)}


def plan_of(question, text):
    return build_plan(Candidate.parse(text, question.cluster.num_ranks), *question.facts)


def with_prediction(plan, **changes):
    """Give a plan a prediction with made-up numbers that agree with each other."""
    memory = StageMemory(num_weights=1, parts={"weights": 3 * 2**30, "activations": 2**30})
    values = {
        "step_time_s": 10.0,
        "low_s": 8.0,
        "high_s": 15.0,
        "time_parts": {"compute": 6.5, "bubble": 2.0, "tp": 1.5},
        "stage_memory": (memory,) * plan.schedule.num_ranks,
        "capacity_bytes": 16 * 2**30,
        "tokens_per_s": rounded(plan.workload.tokens_per_step / 10.0),
        "mfu": rounded(1 / 3),
        "communication_bytes": {"tp": 10**9, "dp": 10**8},
        "basis": "uncalibrated",
        "of": plan_hash(plan),
        **changes,
    }
    return dataclasses.replace(plan, prediction=Prediction(**values))


CLUSTERS = (
    ("trn1.32xlarge", None), ("trn1n.32xlarge", None), ("trn2.48xlarge", 1), ("trn2.48xlarge", 2),
    ("h100-80", None), ("a100-40", None),
)  # fmt: skip
MODELS = ("llama3-70b", "llama3-8b", "mixtral-8x7b", "gpt2-xl", "gpt-neox-20b", "qwen3-8b", "mistral-7b")


@st.composite
def questions(draw, batches=(60, 64, 256, 1024)):
    name, lnc = draw(st.sampled_from(CLUSTERS))
    return ask(
        draw(st.sampled_from(MODELS)),
        name,
        draw(st.sampled_from([1, 2, 4])),
        lnc,
        seq_len=draw(st.sampled_from([1024, 3000, 4096, 8192])),
        global_batch=draw(st.sampled_from(batches)),
        precision=draw(st.sampled_from(["bf16", "bf16-sr", "fp16", "fp32"])),
        engine=draw(st.sampled_from(["nxd", "torch"])),
    )


RECOMPUTES = (
    "none", "full", "full:2", "full:50", "selective[attend]", "selective[CoreAttention,attention,nothing]",
    "none+offload", "full+offload",
)  # fmt: skip
SIZES = (1, 2, 3, 4, 8, 16, 32, 64)


def any_candidates():
    """Candidates without regard to any rule."""
    one_of, size = st.sampled_from, st.sampled_from(SIZES)
    recompute = one_of(RECOMPUTES).map(Recompute.parse)
    return st.builds(
        Candidate,
        **dict.fromkeys(("tp", "pp", "cp", "ep", "dp"), size),
        **dict.fromkeys(("vp", "mbs"), one_of((1, 2, 3))),
        sp=st.booleans(),
        zero=one_of([0, 1, 3]),
        schedule=one_of(list(BUILDERS)),
        recompute=st.lists(recompute, min_size=1, max_size=4).map(tuple),
        stages=one_of([None, (40, 40), (16, 16), (80,), (20, 20, 20, 20)]),
        kernels=one_of([None, "te", "none_such"]),
        cp_kind=one_of(["ring", "all_to_all"]),
        cp_order=one_of(["contiguous", "zigzag"]),
        boundary=one_of([None, "[batch]"]),
        lnc=one_of([None, 1, 2]),
    )


def _divisor(draw, number, most=64):
    return draw(st.sampled_from([size for size in SIZES if number % size == 0 and size <= most]))


@st.composite
def shaped(draw):
    """A question and a candidate that has a shape there; it may still break Rules."""
    question, any_other = draw(questions(batches=(1024,))), draw(any_candidates())
    ranks = question.cluster.num_ranks
    tp = _divisor(draw, ranks, question.cluster.ranks_per_node)
    vp = draw(st.sampled_from([1, 1, 2]))
    pp = _divisor(draw, ranks // tp, question.model.num_layers // vp)
    cp = _divisor(draw, ranks // tp // pp)
    dp = ranks // (tp * pp * cp)
    mbs = _divisor(draw, 1024 // dp)
    vp = vp if 1024 // (dp * mbs) % pp == 0 else 1
    kinds = draw(st.lists(st.sampled_from(RECOMPUTES[:5]), min_size=pp * vp, max_size=pp * vp))
    sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": _divisor(draw, dp), "dp": dp, "vp": vp, "mbs": mbs}
    schedule = "interleaved" if vp > 1 else draw(st.sampled_from(["gpipe", "1f1b"]))
    recompute = tuple(map(Recompute.parse, kinds))
    boundary = draw(st.sampled_from([None, "[batch/dp, seq/cp.tp, hidden]"]))
    fixed = {"stages": None, "kernels": None, "lnc": None, "boundary": boundary, "recompute": recompute}
    return question, dataclasses.replace(any_other, **sizes, **fixed, schedule=schedule)
