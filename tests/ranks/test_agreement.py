"""Ranks compare what they are about to begin: what is compared is what is begun, and another order is one message."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as some

from autoshard.engine.torch import agreeing
from autoshard.engine.torch.agreeing import AgreeingEngine, build_agreeing
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.ledger import BegunCollective, difference, differing_meeting, sequences
from autoshard.engine.torch.states.store import OpenedWeights, Store
from autoshard.errors import RunFailed
from autoshard.plan.plan import Plan
from autoshard.run.protocol import EngineMode, Run
from autoshard.spec.model import ModelSpec
from autoshard.spec.training import Training, Watching
from tests.ranks.cases import EXACT, MIXTRAL, Task, gpt, llama, plan_of
from tests.ranks.spawn import on_ranks
from tests.slower import covering, rest_is_slow

EVERY = Training(watchdog=Watching(collectives="every"))
CASES: list[tuple[str, ModelSpec]] = [
    ("tp=2,pp=2,dp=2,mbs=2,zero=1", llama()),
    ("tp=1,pp=2,dp=2,zero=3", gpt()),
    ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTRAL)),
    ("tp=2,pp=1,dp=2,ep=2,sp=false", llama(**MIXTRAL)),  # as many rows go over tp as were routed
    ("tp=1,pp=2,cp=2,dp=1,cp_order=zigzag", llama()),
    ("tp=2,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4)),
    ("tp=1,pp=2,dp=2,schedule=zb_h1,zero=0", gpt(num_layers=4)),
    ("tp=1,pp=2,dp=1,vp=2,schedule=zb_v", llama(num_layers=4)),
    ("tp=2,pp=1,dp=2,recompute=full:1", llama()),
    ("tp=1,pp=1,cp=2,dp=2,cp_kind=all_to_all", llama()),
    ("tp=1,pp=2,dp=2,schedule=zb_h1,zero=3,recompute=none+offload/full+offload", gpt(num_layers=4)),
    ("tp=1,pp=1,dp=4,ep=2,recompute=selective[norms]+offload", llama(**MIXTRAL)),
    ("tp=1,pp=1,dp=4,zero=3,zero_group=2", llama()),
    ("tp=1,pp=2,dp=4,zero=1,zero_group=2,schedule=zb_h1", gpt()),
    ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama()),
]
FEW = ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTRAL)), ("tp=1,pp=2,dp=2,zero=3", gpt())
COMBINED = [
    *covering(["literal", "generated"], FEW, fast=1),
    *rest_is_slow(product(["literal", "generated"], (case for case in CASES if case not in FEW)), 0, 2),
]


def steps_that_agree(task: Task, mode: EngineMode) -> int:
    """Run all steps of an engine that compares what it has begun with what it has said; return how much that was."""
    engine = TorchEngine(task.plan, task.weights.__getitem__, EXACT, Run(folder=Path(), training=EVERY, mode=mode))
    checked = AgreeingEngine(task.plan, engine)
    for micro_batches in task.steps:
        checked.step(micro_batches, task.learning_rate)
    return len(engine.world.ledger.entries)


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "case"), COMBINED, ids=lambda one: one if isinstance(one, str) else one[0])
def test_what_ranks_compare_is_what_they_begin(mode: EngineMode, case: tuple[str, ModelSpec]) -> None:
    text, model = case
    plan = plan_of(text, model)
    assert min(on_ranks(plan.mesh.num_ranks, steps_that_agree, Task.of(plan, 2), mode)) > 3


def close_by_hash(self: Store, opened: OpenedWeights, complete: Sequence[str] = ()) -> None:
    """What a set of strings does: buckets are reduced in an order that is another one in another interpreter."""
    self.take_back()
    self._leaving = [(flat, group.begin_reduce_scatter(sums)) for flat, group, sums in opened.pending]
    for name in {*complete}:
        flat = self._flat_of.get(name)
        if flat is not None:
            self._incomplete[flat].discard(name)
            if not self._incomplete[flat]:
                self._reducing[flat] = flat.begin_reducing()


def refusal(plan: Plan) -> str:
    with pytest.raises(RunFailed) as caught:
        build_agreeing(plan, Run(folder=Path("nowhere"), training=Training()))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.ranks
def test_an_order_that_follows_from_hashes_is_one_message_on_all_ranks_before_anything_is_sent(tmp_path: Path) -> None:
    """Ranks whose hashes have other seeds order the weights of a layer differently."""
    plan = plan_of("tp=2,pp=2,dp=2,mbs=2,zero=1", llama())
    said = on_ranks(
        8, refusal, plan, replaced=[(Store, "close", close_by_hash), (TorchEngine, "write_functions", nothing)]
    )
    assert len({*said}) == 1
    first, one, other, remedy = said[0].splitlines()
    assert first.startswith("ranks would begin different collectives, so no step is begun. Number ")
    assert "reduce_scatter of float32[" in one and "reduce_scatter of float32[" in other and one != other
    assert "same plan" in remedy


def needs_numbers(*_: Any) -> None:
    raise ValueError("this kernel needs numbers")


def built_with_a_warning(plan: Plan) -> str:
    with pytest.warns(UserWarning) as caught:
        assert isinstance(build_agreeing(plan, Run(folder=Path("nowhere"), training=Training())), TorchEngine)
    return str(caught[0].message)


@pytest.mark.ranks
def test_a_kernel_that_needs_numbers_is_no_reason_to_refuse_a_run() -> None:
    replaced = [(agreeing, "begun_by", needs_numbers), (TorchEngine, "write_functions", nothing)]
    said = on_ranks(2, built_with_a_warning, plan_of("tp=1,pp=1,dp=2", llama()), replaced=replaced)
    words = "the order of collectives is not compared: a step without numbers failed (ValueError: this kernel needs"
    assert all(text.startswith(words) for text in said)


def nothing(*_: Any) -> None:
    """Write no files."""


def entry(kind: str, *ranks: int, form: str = "float32[4]") -> BegunCollective:
    return BegunCollective(kind=kind, ranks=ranks, form=form)


def differs(*ledgers: Sequence[BegunCollective], ordered: bool = False) -> str:
    lines = [sequences(ledger, ordered_messages=ordered) for ledger in ledgers]
    digests = [{meeting: "\n".join(one).encode() for meeting, one in of_rank.items()} for of_rank in lines]
    found = differing_meeting(digests)
    return difference(*found, [of_rank.get(found[0], ()) for of_rank in lines]) if found else ""


def test_ranks_agree_where_each_group_and_what_groups_share_are_begun_in_one_order() -> None:
    both, left, right = entry("all_reduce", 0, 1, 2, 3), entry("all_gather", 0, 1), entry("all_gather", 2, 3)
    assert not differs([both, left], [both, left], [right, both][::-1], [both, right])
    assert not differs([left, both], [left, both], [both, right], [both, right]), "ranks 0 and 2 meet in one group only"
    text = differs([left, both], [both, left], [both, right], [both, right])
    assert "Number 1 of the collectives of ranks 0, 1:\n  rank 0: all_gather of float32[4] over ranks 0, 1\n" in text
    assert "  rank 1: all_reduce of float32[4] over ranks 0, 1, 2, 3\n" in text
    wide = entry("all_reduce", 0, 1, 2, 3, form="bfloat16[4]")
    assert "rank 2: all_reduce of bfloat16[4]" in differs([both], [both], [wide], [both])
    assert "rank 3: nothing more" in differs([both], [both], [both], [])


def test_groups_that_share_two_ranks_without_being_nested_are_ordered_too() -> None:
    one, other = entry("all_reduce", 0, 1, 2), entry("all_reduce", 0, 1, 3)
    assert "ranks 0, 1:" in differs([one, other], [other, one], [one], [other])


def test_the_order_of_messages_counts_on_devices_only() -> None:
    first, second = (entry("message", 0, 1, form=f"float32 with tag {tag}") for tag in (0, 2))
    assert not differs([first, second], [second, first])
    assert "messages from rank 0" in differs([first, second], [second, first], ordered=True)
    assert "nothing more" in differs([first, second], [first])


@given(some.data())
def test_any_swap_that_two_ranks_can_see_is_told(data: Any) -> None:
    """Random ledgers on a mesh of 2 x 2; one rank swaps two neighbours which it begins with the same other rank."""
    groups = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]
    program = data.draw(
        some.lists(some.tuples(some.sampled_from(groups), some.integers(1, 3)), min_size=2, max_size=12)
    )
    entries = [entry("all_reduce", *ranks, form=f"float32[{size}]") for ranks, size in program]
    ledgers = [[one for one in entries if rank in one.ranks] for rank in range(4)]
    assert not differs(*ledgers)
    rank = data.draw(some.sampled_from([rank for rank in range(4) if len(ledgers[rank]) > 1] or [None]))
    if rank is None:
        return
    at = data.draw(some.integers(0, len(ledgers[rank]) - 2))
    one, other = ledgers[rank][at : at + 2]
    ledgers[rank][at : at + 2] = [other, one]
    visible = one != other and len({*one.ranks} & {*other.ranks}) > 1
    assert bool(differs(*ledgers)) == visible


@pytest.mark.ranks
def test_a_plan_that_differs_between_ranks_is_told(tmp_path: Path) -> None:
    plan = plan_of("tp=1,pp=1,dp=2", llama())
    other = plan_of("tp=1,pp=1,dp=2,zero=0", llama())
    said = on_ranks(2, refusal_of_either, plan, other, replaced=[(TorchEngine, "write_functions", nothing)])
    assert said[0] == said[1] and "All ranks need the same plan" in said[0]


def refusal_of_either(plan: Plan, other: Plan) -> str:
    return refusal((plan, other)[dist.get_rank()])
