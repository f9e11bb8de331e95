import subprocess
import sys
from dataclasses import replace

import pytest

import autoshard
from autoshard.blocks.cutting import Meshes, Terms, operator_problem
from autoshard.blocks.explain import explain
from autoshard.blocks.operators import solve
from autoshard.blocks.problem import weights_of
from autoshard.blocks.shard_block import BlockSharding, priced_sharding
from autoshard.cost.built_in import built_in
from autoshard.cost.predict import plan_cost, question_of
from autoshard.cost.setting import Question, price_block, setting_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.cost.step import StepCost
from autoshard.cost.update import update_cost
from autoshard.errors import InputError
from autoshard.layout.table import Strategy
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.slower import rest_is_slow
from tests.tabled import tabled


@pytest.mark.slow
def test_less_memory_costs_time_and_lets_weights_rest_in_pieces():
    free = autoshard.shard_block("tiny-llama", "local", "dp=2,tp=2")
    some, little = (
        autoshard.shard_block("tiny-llama", "local", "dp=2,tp=2", memory_bytes=share * free.memory_bytes)
        for share in (0.8, 0.6)
    )
    assert free.time_s < some.time_s < little.time_s
    assert not free.rests and little.rests
    for found, share in ((some, 0.8), (little, 0.6)):
        assert found.fits and found.memory_bytes <= share * free.memory_bytes and found.gap == 0.0
    assert "up.weight: flat/dp" in str(little)


def test_lines_are_those_of_a_plans_table():
    found = autoshard.shard_block("tiny-llama", "local", "dp=2,tp=2", engine="torch")
    assert {name: str(Strategy.parse(line)) for name, line in found.table.items()} == found.table
    made = autoshard.plan("tiny-llama", "local", fix="dp=2,tp=2,pp=1,cp=1,mbs=1")
    assert found.table == made.plan.strategies["layer"]


def test_what_fits_nowhere_is_answered_with_the_least():
    found = autoshard.shard_block("tiny-llama", "local", "dp=4", kind="head", memory_bytes=1.0)
    assert not found.fits and "nothing fits" in str(found)


QUESTIONS = (
    ("tiny-llama", "local", "dp=4"),
    ("llama3-8b", "h100-80", "dp=8"),
    ("llama3-8b", "h100-80", "dp=2,tp=4"),
    ("mixtral-8x7b", "h100-80", "dp=8,ep=4"),
    ("llama3-8b", "trn1.32xlarge", "dp=4,tp=8"),
)
PARTS = ("weights", "gradients", "masters", "optimizer", "activations")


def asked(name: str, cluster_name: str, text: str) -> tuple[Question, Candidate]:
    """A step of one micro-batch."""
    cluster = load_cluster(cluster_name)
    candidate = Candidate.parse(text, cluster.num_ranks)
    batch = candidate.dp * candidate.mbs
    workload = Workload(seq_len=1024, global_batch=batch, precision=Precision.named("bf16"))
    # What a program takes for each rank that has a piece comes once per step, however many blocks there are.
    calibration = replace(built_in(cluster_name, cluster.kernels), shard_s=0.0)
    return Question(
        model=load_model(name), cluster=cluster, workload=workload, kernels=cluster.kernels, calibration=calibration
    ), candidate


def sharded(question: Question, candidate: Candidate, kind: str, over: tuple[str, ...]) -> BlockSharding:
    """A block solved with weights that rest whole, or then laid down in pieces over some atoms."""
    terms = Terms.of(candidate, question.cluster.engine)
    per_weight = sum(question.workload.precision.state_bytes(num_moments=2).values())
    problem = operator_problem(question, Meshes.of(question, candidate), terms, kind)
    problem = replace(problem, state_bytes_per_weight=per_weight)
    solution = solve(problem)
    readers = [op.name for op in problem.block.select("micro_batch", "F") if weights_of(problem, op)]
    return priced_sharding(
        question, candidate, problem, replace(solution, rests=dict.fromkeys(readers, over) if over else {})
    )


def planned(question: Question, candidate: Candidate, kind: str, found: BlockSharding) -> tuple[float, float]:
    """The seconds of a block with this table in a plan, and the bytes that one more layer adds to the plan."""
    costs: list[StepCost] = []
    for num_layers in (3, 2):
        model = replace(question.model, num_layers=num_layers)
        plan = tabled(build_plan(candidate, model, question.cluster, question.workload, question.cluster.engine))
        plan = replace(plan, strategies={**plan.strategies, kind: found.table})
        costs.append(plan_cost(plan, question_of(plan, question.calibration)))
    question = question_of(plan, question.calibration)
    setting = setting_of(question, candidate, ListedBlocks.of(plan))
    pass_s = next(block.time_s for block in explain(plan).blocks if block.name == kind)
    memory = price_block(question, setting, kind, Recompute()).memory
    sent = update_cost({**memory.weights, **memory.tied_weights}, setting, question, pass_s, 1, 1).seconds
    more, less = (sum(cost.memory[0][part] for part in PARTS) for cost in costs)
    return pass_s + float(sent["dp"] + sent["tp"]), more - less


@pytest.mark.parametrize("kind", ["layer", "head"])
@pytest.mark.parametrize(("name", "cluster", "text"), rest_is_slow(QUESTIONS, 2, 3))
def test_seconds_and_bytes_are_those_of_a_plan_with_the_same_table(name: str, cluster: str, text: str, kind: str):
    question, candidate = asked(name, cluster, f"{text},zero=0")
    found = sharded(question, candidate, kind, ())
    time_s, layer_bytes = planned(question, candidate, kind, found)
    assert found.time_s == pytest.approx(time_s, rel=1e-12)
    assert kind != "layer" or found.memory_bytes == pytest.approx(layer_bytes, rel=1e-12)


def test_weights_in_pieces_take_and_hold_what_zero_3_does():
    question, candidate = asked("llama3-8b", "h100-80", "dp=8,zero=3")
    found = sharded(question, candidate, "layer", ("edp",))
    time_s, layer_bytes = planned(question, candidate, "layer", found)
    assert {*found.rests.values()} == {"flat/dp"} and len(found.rests) == 9
    assert found.time_s == pytest.approx(time_s, rel=1e-12)
    assert found.memory_bytes == pytest.approx(layer_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        ("dp=3", {}, "pp x dp x cp x tp is 3, but 1 x local has 4 ranks"),
        ("dp=4,zero=3", {}, "mesh.zero: does not say how a block is cut. Known: tp, pp, cp"),
        ("dp=4,hidden=2", {}, "unknown key 'hidden'"),
        ("dp=4", {"kind": "layers"}, "kind: 'layers' is not a kind of block. Did you mean layer"),
        ("dp=4", {"memory_bytes": -1.0}, "must be positive, not -1.0"),
    ],
)
def test_errors_say_what_to_write(mesh, more, message):
    with pytest.raises(InputError, match=message):
        autoshard.shard_block("tiny-llama", "local", mesh, **more)


def test_importing_autoshard_loads_no_solver():
    code = "import sys, autoshard; sys.exit('numpy' in sys.modules or 'autoshard.blocks' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
