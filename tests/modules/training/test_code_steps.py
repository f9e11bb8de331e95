"""Steps of decoders' own code by plans: losses, norms and weights are those of the plain module."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
from torch import nn

from autoshard.engine.torch.formats import Formats
from autoshard.modules.training.reading import traced_code
from autoshard.run.protocol import EngineMode
from tests.modules.decoder.test_lift import bert, modern_bert
from tests.modules.training.code_cases import Make, compared, compared_dropping, hold, plan_made, plan_of
from tests.modules.training.own_decoders import (
    LOSSES,
    OWN,
    UNLIKE,
    Choosing,
    Penalised,
    Typed,
    biased,
    dropping,
    state_space,
    talking,
)
from tests.ranks.spawn import on_ranks
from tests.slower import covering, rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAMES = ("gpt", "mixture", "llama", "windows")
# A layout, and how many ranks it has.
LAYOUTS = [
    ("tp=2,pp=2,dp=1,mbs=2", 4),
    ("tp=1,pp=1,dp=2,mbs=2", 2),
    ("tp=2,pp=1,dp=1,mbs=4,recompute=full", 2),
    ("tp=1,pp=2,dp=1,mbs=1,schedule=zb_h1", 2),
    ("tp=1,pp=2,dp=2,mbs=1,zero=1", 4),
    ("tp=1,pp=2,vp=2,dp=1,mbs=2,schedule=interleaved", 2),
    ("tp=1,pp=1,dp=2,mbs=1,zero=3", 2),
    ("tp=1,pp=1,cp=2,dp=1,mbs=2,cp_order=contiguous", 2),
    ("tp=2,pp=2,dp=1,mbs=2,zero=3,recompute=full", 4),
    ("tp=1,pp=2,vp=2,dp=1,mbs=1,schedule=zb_v", 2),
    ("tp=1,pp=4,dp=1,mbs=1,stages=0/2/2/0", 4),
    ("tp=2,pp=2,dp=1,mbs=2,sp=false,recompute=selective[attend]", 4),
    ("tp=4,pp=1,dp=1,mbs=4", 4),
]
BIDIRECTIONAL: Mapping[str, Callable[[], nn.Module]] = {
    "BERT": bert, "ModernBERT": modern_bert, "biased": partial(biased, is_causal=False, by_hand=False),
    "talking heads": talking, "biased decoder": partial(biased, is_causal=True, by_hand=True),
}  # fmt: skip
COMBINED = covering(NAMES, LAYOUTS)  # each layout with one decoder; all pairs are left to `make thorough`


def hold_steps(make: Make, text: str, num_ranks: int = 2, *, exact: bool = True, mode: EngineMode = "literal") -> None:
    body, plan = partial(compared, mode=mode, exact=exact), plan_made(make, text)
    hold(on_ranks(num_ranks, body, make, plan, timeout_s=300.0), exact=exact)


@pytest.mark.parametrize(("name", "layout"), COMBINED, ids=lambda one: one if isinstance(one, str) else one[0])
def test_steps_are_those_of_the_plain_module(name: str, layout: tuple[str, int]):
    hold_steps(OWN[name], *layout)


@pytest.mark.parametrize(
    ("text", "num_ranks"),
    rest_is_slow([("tp=1,pp=2,dp=2,mbs=1", 4), ("tp=2,pp=1,dp=1,mbs=4,recompute=full", 2)], 0, 1),
)
def test_what_is_dropped_follows_from_the_sequence_alone(text: str, num_ranks: int):
    hold(on_ranks(num_ranks, compared_dropping, plan_made(dropping, text), timeout_s=300.0))


@pytest.mark.slow
def test_experts_may_be_cut_over_ranks_of_data():
    hold_steps(OWN["mixture"], "tp=1,pp=1,dp=2,ep=2,mbs=2")


@pytest.mark.slow
def test_generated_functions_take_the_same_steps():
    hold_steps(OWN["llama"], "tp=2,pp=1,dp=1,mbs=2", exact=False, mode="generated")


@pytest.mark.parametrize("name", rest_is_slow(OWN, 1, 3))
def test_equal_layers_are_one_block(name: str):
    module = OWN[name]()
    assert set(traced_code(module, plan_of(module, "tp=1,pp=1,dp=1,mbs=2"), Formats()).graph.graph.order) == {"layer"}


@pytest.mark.parametrize(("precision", "exact"), [("bf16", False), ("fp32", True)])
def test_a_mask_in_the_format_of_the_hidden_state_is_no_second_tensor_that_goes_on(precision: str, exact: bool):
    plan = plan_of(Typed(), "tp=1,pp=1,dp=1,mbs=2", precision=precision)
    code = traced_code(Typed().double() if exact else Typed(), plan, Formats(exact=exact))
    assert set(code.graph.graph.order) == {"layer"}


@pytest.mark.slow
def test_what_casts_in_its_forward_takes_the_steps_of_the_plain_module():
    hold_steps(Typed, "tp=1,pp=2,dp=1,mbs=2", exact=False)


@pytest.mark.parametrize("name", rest_is_slow(UNLIKE, 0))
@pytest.mark.parametrize(("text", "num_ranks"), [("tp=1,pp=2,dp=1,mbs=2", 2), ("tp=2,pp=2,dp=1,mbs=2", 4)])
def test_layers_of_two_kinds_take_the_steps_of_the_plain_module(name: str, text: str, num_ranks: int):
    hold_steps(UNLIKE[name], text, num_ranks)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("text", "num_ranks"),
    rest_is_slow(
        [
            ("tp=2,pp=2,dp=1,mbs=2", 4), ("tp=1,pp=1,dp=2,mbs=2", 2), ("tp=1,pp=2,dp=2,mbs=2,zero=1", 4),
            ("tp=1,pp=1,cp=2,dp=1,mbs=2,cp_order=contiguous", 2),
            ("tp=1,pp=2,vp=2,dp=1,mbs=2,schedule=interleaved,recompute=full", 2),
            ("tp=2,pp=1,dp=2,mbs=2,zero=3", 4),
        ],
        0, 1,
    ),
)  # fmt: skip
def test_a_loss_of_the_code_is_its_mean_over_micro_batches(name: str, text: str, num_ranks: int):
    hold_steps(LOSSES[name], text, num_ranks)


@pytest.mark.parametrize("make", rest_is_slow([Penalised, Choosing], 1))
@pytest.mark.parametrize("text", ["tp=1,pp=2,dp=1,mbs=8", "tp=2,pp=1,dp=1,mbs=8,recompute=full"])
def test_layers_that_join_sequences_take_the_steps_of_the_plain_module(make: Callable[[], nn.Module], text: str):
    hold_steps(make, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), covering(["Mamba", "Mamba2"], ["tp=1,pp=2,dp=1,mbs=2", "tp=1,pp=1,dp=2,mbs=2,zero=3"])
)
def test_state_space_models_take_the_steps_of_the_plain_module(name: str, text: str):
    hold_steps(partial(state_space, name), text, exact=False)  # they compute in FP32 whatever their format


@pytest.mark.slow
@pytest.mark.parametrize("make", BIDIRECTIONAL.values(), ids=BIDIRECTIONAL)
def test_encoders_and_biased_attention_take_the_steps_of_the_plain_module(make: Callable[[], nn.Module]):
    hold_steps(make, "tp=2,pp=1,dp=1,mbs=2")
