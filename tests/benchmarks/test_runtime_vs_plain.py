"""The plain loop is the same model, and the verdict follows the numbers."""

import pytest
import torch

from autoshard.engine.programs import graph_of
from benchmarks.plain_llama import PlainLlama
from benchmarks.runtime_vs_plain import CASES, Compared, compared, judge, plan_of, shape

FAIR = Compared(ratios=(0.99, 1.0, 1.01, 1.0, 0.98))
SLOW = Compared(ratios=(0.8, 0.81, 0.82, 0.8, 0.79))


def test_the_plain_model_has_our_weights():
    plain = sum(one.numel() for one in PlainLlama(shape(), 8).parameters())
    assert plain == graph_of(plan_of("tp=1,pp=1,dp=1")).num_parameters() == shape().num_parameters


def test_stages_of_the_plain_model_make_the_whole():
    torch.manual_seed(0)
    whole, parts = PlainLlama(shape(), 8), [PlainLlama(shape(), 8, layers) for layers in (range(2), range(2, 4))]
    state = whole.state_dict()
    parts[0].load_state_dict({name: state[name] for name in parts[0].state_dict()})
    later = {name: state[name.replace("layers.0", "layers.2").replace("layers.1", "layers.3")] for name in
             parts[1].state_dict()}  # fmt: skip
    parts[1].load_state_dict(later)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(parts[1](parts[0](tokens)), whole(tokens))


@pytest.mark.parametrize("slow", [None, *CASES])
def test_each_case_may_fail_it(slow: str | None):
    result = judge({name: SLOW if name == slow else FAIR for name in CASES})
    assert result.holds == (slow is None)
    assert result.value == (0.8 if slow == "one" else 1.0)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_every_case_runs(name: str):
    found = compared(*CASES[name], pairs=2)
    assert len(found.ratios) == 2 and found.interval[0] <= found.median <= found.interval[1]
