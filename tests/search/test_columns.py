"""A batch of layouts is priced as each of them alone."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.predict import plan_cost
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import parse_pins
from autoshard.plan.rules.check import legal_mask
from autoshard.plan.tables import with_tables
from autoshard.search.columns import at, evaluate, joined, tiled
from autoshard.search.space import whole_space
from tests.cost.cases import ask
from tests.tabled import cutting_of

SAMPLE, KINDS = 25, 2  # layouts of each case, and of each the kinds of recompute that are priced by themselves

# model, cluster, nodes, pins
CASES = {
    "dense-trn1": ("llama3-8b", "trn1.32xlarge", 4, ""),
    "large-trn1": ("llama3-70b", "trn1.32xlarge", 16, ""),
    "dense-trn2": ("llama3-8b", "trn2.48xlarge", 2, ""),
    "dense-gpu": ("llama3-8b", "h100-80", 4, ""),
    "experts-gpu": ("mixtral-8x7b", "h100-80", 4, ""),
    "tied-gpu": ("gpt2-xl", "a100-40", 1, ""),
    "no-sp": ("llama3-8b", "h100-80", 2, "sp=false"),
    "zero-0": ("llama3-8b", "h100-80", 2, "zero=0"),
    "zero-3": ("llama3-8b", "h100-80", 2, "zero=3"),
    "zero-3-experts": ("mixtral-8x7b", "h100-80", 2, "zero=3"),
    "zigzag": ("llama3-8b", "h100-80", 2, "cp=2,cp_order=zigzag"),
    "all-forwards-first": ("llama3-8b", "h100-80", 2, "schedule=gpipe"),
    "interleaved-gpu": ("llama3-70b", "h100-80", 16, "schedule=interleaved,vp=2"),
    "split": ("llama3-8b", "h100-80", 4, "schedule=zb_h1"),
    "split-v": ("llama3-70b", "h100-80", 16, "schedule=zb_v,vp=2"),
    "split-uneven": ("llama3-8b", "h100-80", 2, "schedule=zb_h1,pp=4,stages=7/9/9/7"),
    "interleaved": ("llama3-70b", "trn1.32xlarge", 16, "schedule=interleaved,vp=2"),
    "partly-full": ("llama3-8b", "trn1.32xlarge", 4, "recompute=full:2"),
    "per-stage": ("llama3-8b", "trn1.32xlarge", 4, "pp=2,recompute=full/none"),
    "uneven": ("llama3-8b", "trn1.32xlarge", 4, "pp=2,stages=15/17"),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """A question, and a random part of its legal layouts, the same in every run."""
    model, cluster, nodes, pins = CASES[request.param]
    question = ask(model, cluster, nodes, seq_len=1024 if model == "gpt2-xl" else 8192)
    engine = question.cluster.engine
    facts = (question.model, question.cluster, question.workload)
    space = whole_space(*facts, engine, parse_pins(pins) if pins else {})
    question = replace(question, kernels=space.base.kernels or question.cluster.kernels)
    legal = space.keep(legal_mask(space.columns(*facts, 0)))
    assert legal.num_layouts, "the case has legal layouts"
    random = np.random.default_rng(7)
    chosen = random.permutation(legal.num_layouts)[:SAMPLE]
    return question, legal.keep(np.sort(chosen))


def most_cut(question, space):
    """The cutting of the layout with the largest tp, which serves all."""
    return cutting_of(question, space.at(int(np.argmax(space.rows["tp"])), 0), space.engine)


def test_a_batch_is_priced_as_the_tables_of_its_members(case):
    question, space = case
    together = evaluate(question, space, most_cut(question, space))
    assert together.time_s.shape == (space.num_layouts, len(space.recomputes))
    random = np.random.default_rng(11)
    for index in range(space.num_layouts):
        for number in random.permutation(len(space.recomputes))[:KINDS].tolist():
            candidate = space.at(index, number)
            plan = build_plan(candidate, question.model, question.cluster, question.workload, space.engine)
            alone = plan_cost(with_tables(plan, most_cut(question, space)), question)
            assert together.time_s[index, number] == pytest.approx(float(alone.time_s), rel=1e-9), str(candidate)
            assert together.peak_bytes[index, number] == pytest.approx(float(alone.peak_bytes), rel=1e-9), str(
                candidate
            )


def test_the_price_of_a_layout_does_not_depend_on_its_neighbours(case):
    question, space = case
    together = evaluate(question, space, most_cut(question, space))
    for index in (0, space.num_layouts - 1):
        alone = evaluate(question, space.keep(np.array([index])), most_cut(question, space))
        assert together.time_s[index] == pytest.approx(alone.time_s[0], rel=1e-12)
        assert together.peak_bytes[index] == pytest.approx(alone.peak_bytes[0], rel=1e-12)


def test_columns_inside_a_value_are_taken_repeated_and_joined():
    value = {"a": np.array([1.0, 2.0]), "b": {"c": 3.0}, "kind": "text"}
    assert tiled(value, 2, 2)["a"].tolist() == [1, 2, 1, 2]
    assert tiled(value, 2, 2)["b"]["c"].tolist() == [3, 3, 3, 3]
    assert at(tiled(value, 2, 2), np.array([1]))["a"].tolist() == [2]
    both = joined([{"a": 1.0}, {"a": np.array([2.0, 3.0]), "b": 4.0}], 2)
    assert both["a"].tolist() == [1, 1, 2, 3]
    assert both["b"].tolist() == [0, 0, 4, 4]
    assert value["kind"] == tiled(value, 2, 2)["kind"]
