"""Layouts that somebody may pin: each is refused, or gives the loss and the gradients of one process."""

import random
from collections.abc import Callable, Mapping

import pytest

from autoshard.engine.programs import graph_of
from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Deliver
from autoshard.plan.plan import Plan
from autoshard.plan.verify import verify
from autoshard.spec.model import ModelSpec
from tests.ranks.cases import MIXTRAL, Task, compare, deepseek, gemma, gpt, gpt_oss, llama, olmo2, plan_of, run_steps
from tests.ranks.spawn import on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
RANKS, TRIES, EVERY = 4, 60, range(60)
MODELS: tuple[Callable[..., ModelSpec], ...] = (llama, gpt, gemma, olmo2, deepseek, gpt_oss)
LAYOUTS = (
    "tp=2,pp=1,dp=2,mbs=2", "tp=4,pp=1,dp=1,mbs=2", "tp=2,pp=1,cp=2,dp=1,mbs=2", "tp=2,pp=2,dp=1,mbs=2",
    "tp=2,pp=1,dp=2,zero=3,mbs=2", "tp=2,pp=2,vp=2,dp=1,mbs=1,schedule=interleaved", "tp=2,pp=1,dp=2,ep=2,mbs=2",
    "tp=2,pp=1,dp=2,sp=false,mbs=2", "tp=1,pp=1,cp=2,dp=2,mbs=2,cp_order=zigzag", "tp=2,pp=1,dp=2,mbs=2,recompute=full",
    "tp=2,pp=1,cp=2,dp=1,mbs=2,cp_kind=all_to_all", "tp=2,pp=2,dp=1,mbs=2,schedule=zb_h1",
)  # fmt: skip


def pinned(generator: random.Random) -> tuple[Plan, str]:
    """Draw a model, a layout and pins until a plan keeps to them; say what was drawn."""
    for _ in range(TRIES):
        make, text = generator.choice(MODELS), generator.choice(LAYOUTS)
        options = {**(MIXTRAL if "ep=" in text and make is llama else {}), "vocab": 32}
        try:
            model = make(**options)
            pins = dict(drawn(plan_of(text, model), generator) for _ in range(generator.randint(1, 4)))
            plan = plan_of(text, model, pins)
        except InputError:
            continue
        if verify(plan_of(text, model)):  # as experts of a model without any
            continue
        assert not verify(plan), f"{text}, {pins}: a plan that is made with pins may run"
        return plan, f"{make.__name__}, {text}, {pins}"
    raise AssertionError(f"no pins of {TRIES} draws have a plan")


def drawn(plan: Plan, generator: random.Random) -> tuple[str, str]:
    """Draw an operation of any block, ends as often as layers, and which of its dims each axis cuts."""
    first, *layers, last = graph_of(plan).blocks
    block: Block = generator.choice((first, generator.choice(layers), last))
    ops = [op for op in block.select("micro_batch", "F") if not isinstance(op.kind, Deliver) and op.name != "loss"]
    tensor = block.tensors[generator.choice(ops).outputs[0]]
    cuts: dict[str, list[str]] = {dim: [] for dim in tensor.dims}
    for axis in ("dp", "cp", "tp"):
        if plan.mesh.size(axis) > 1 and generator.random() < 0.75:
            cuts[generator.choice(tensor.dims)].append(axis)
    return tensor.name, layout(cuts)


def layout(cuts: Mapping[str, list[str]]) -> str:
    return f"[{', '.join('/'.join(filter(None, (dim, '.'.join(axes)))) for dim, axes in cuts.items())}]"


@pytest.mark.parametrize(
    "seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.thorough) for seed in EVERY]
)
def test_what_is_pinned_gives_what_one_process_gives(seed: int):
    plan, about = pinned(random.Random(seed))
    task = Task.of(plan)
    answers = on_ranks(RANKS, run_steps, task)
    try:
        compare(task.reference(), [share for (share,) in answers])
    except AssertionError as error:
        raise AssertionError(f"{about}: {error}") from error
