"""Questions, settings and sharded blocks for the tests of the cost model."""

import functools
from dataclasses import replace

from autoshard.cost.calibration import uncalibrated
from autoshard.cost.compute import Rates
from autoshard.cost.predict import predict
from autoshard.cost.setting import BlockCost, BlockMemory, Question, block_cost, block_work, setting_of
from autoshard.cost.stages import Sends
from autoshard.cost.step import PlanPipeline, StageLayers, step_cost
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import ATOMS
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.record import options_on
from autoshard.spec.workload import Precision, Workload
from tests.tabled import blocks_of, tabled

model = functools.cache(load_model)
cluster = functools.cache(load_cluster)
ENDLESS = 1e30
NO_WORK = Recompute()
EVERYONE = ("edp", "ep", "cp")  # over whom sums of most gradients are pending


def distinct_models():
    """The first card of every architecture that differs from others in more than sizes."""
    found = {}
    for name in model_names():
        spec = model(name)
        flags = (spec.norm, spec.positions, spec.gated_mlp, spec.parallel_residual, spec.tied_embeddings, spec.qkv_bias)
        found.setdefault((*flags, *options_on(spec), spec.num_experts > 0, spec.queries_per_kv_head > 1), name)
    return list(found.values())


def workload(**changes):
    return Workload(**{"seq_len": 8192, "global_batch": 256, "precision": Precision.named("bf16"), **changes})


def ask(model_name="llama3-8b", cluster_name="trn1.32xlarge", nodes=4, kernels=None, **changes):
    place = cluster(cluster_name, nodes)
    return Question(
        model=model(model_name),
        cluster=place,
        workload=workload(**changes),
        kernels=kernels or place.kernels,
        calibration=uncalibrated(),
    )


def candidate_of(question, text):
    candidate = Candidate.parse(text, question.cluster.num_ranks)
    return replace(candidate, kernels=None if question.kernels == question.cluster.kernels else question.kernels)


def setting(question, text):
    candidate = candidate_of(question, text)
    blocks = blocks_of(question, candidate, question.cluster.engine)
    return setting_of(question, candidate, replace(blocks, atoms=frozenset(ATOMS)))


def lowered(question, text, kind="layer", drop="none"):
    return setting(question, text).blocks.block(kind, Recompute.parse(drop))


def plan_of(question, text):
    engine = question.cluster.engine
    facts = (question.model, question.cluster, question.workload)
    return tabled(build_plan(candidate_of(question, text), *facts, engine))


@functools.cache
def predicted_of(question, text):
    """The prediction of a candidate with the constants of the question."""
    return predict(plan_of(question, text), question.calibration)


def priced(question, text, kind="layer", drop="none", rates=None):
    """The cost of one block of a candidate."""
    here = setting(question, text)
    sharded, whole = (here.blocks.block(kind, Recompute.parse(one)) for one in (drop, "none"))
    return block_price(sharded, whole, here, rates or question.rates)


def block_price(sharded, whole, here, rates):
    """The cost of a block; the matrix units are those of the rates."""
    return block_cost(block_work(sharded, whole, here, rates.matrix_tile), here.rings, rates)


def only(sharded, pass_, *ops):
    """The same block with no kernels but those of one pass that run these operations, and without messages."""
    runs = tuple(run for run in sharded.runs if run.pass_ == pass_ and {op.source for op in run.ops} & {*ops})
    assert runs, f"no kernel of pass {pass_} runs {ops}"
    return replace(sharded, runs=runs, sharding=replace(sharded.sharding, messages=()))


def rates(**changes):
    """Endless rates but for the ones given."""
    names = ("matrix_flops_per_s", "vector_flops_per_s", "memory_bytes_per_s")
    return Rates(**{**dict.fromkeys(names, ENDLESS), **changes})


def seconds_of(question, text, pass_, *ops, kind="layer", **changes):
    """Seconds of single kernels, with endless rates but for those given."""
    here = setting(question, text)
    sharded = only(here.blocks.block(kind, NO_WORK), pass_, *ops)
    return float(block_price(sharded, sharded, here, rates(**changes)).part_s("compute"))


def flops(question, text, pass_, *ops, **changes):
    return seconds_of(question, text, pass_, *ops, matrix_flops_per_s=1.0, **changes)


def moved_bytes(question, text, pass_, *ops, **changes):
    return seconds_of(question, text, pass_, *ops, memory_bytes_per_s=1.0, **changes)


def block(forward_s=0.0, backward_s=0.0, seconds=None, **changes):
    """A made-up block, which takes and holds nothing but what is given."""
    names = ("saved_bytes", "waiting_bytes", "remade_bytes", "working_bytes", "placeholder_bytes")
    memory = BlockMemory(**{**dict.fromkeys(names, 0), "weights": {}, "tied_weights": {}, **changes})
    usual = {"F": {"compute": forward_s}, "I": {"compute": backward_s}, "W": {}}
    return BlockCost(seconds=seconds or usual, sent_bytes={}, memory=memory)


def pipeline(schedule, counts, *, send_s=0.0, hides=False, apart=False, boundary_bytes=0):
    last = len(counts) - 1
    stages = (
        StageLayers(
            first=sum(counts[:number]), kinds=("layer",) * count, recompute=NO_WORK,
            is_first=number == 0, is_last=number == last,
        )
        for number, count in enumerate(counts)
    )  # fmt: skip
    return PlanPipeline(
        schedule=schedule,
        stages=tuple(stages),
        boundary_bytes=boundary_bytes,
        sends=Sends(time_s=send_s, hidden=hides, receives_apart=apart),
        bucket_bytes=0,
    )


def cost_of(run, layer=None, ends=None, *, zero=1, kernels=None, price=None):
    """The cost of a pipeline of made-up blocks."""
    question = ask(kernels=kernels)
    found = {"layer": layer or block(), "embed": ends or block(), "head": ends or block(), **(price or {})}
    here = replace(setting(question, "tp=8,dp=16"), zero=zero)
    return step_cost(question, here, run, lambda kind, drop: found[kind])
