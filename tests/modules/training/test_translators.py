"""Stacks whose samples are no tokens, encoders with decoders, layers that attend twice: steps of the plain module."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.engine.torch.formats import Formats
from autoshard.errors import InputError
from autoshard.modules.capture import Captured, capture
from autoshard.modules.decoder.arguments import planned_data, token_arguments
from autoshard.modules.decoder.ends import trained_end
from autoshard.modules.decoder.reading import captured_stack, frozen_buffers, read_decoder, with_constants
from autoshard.modules.decoder.segments import Stack, stack_of
from autoshard.modules.training.packing import Packing
from autoshard.modules.training.reading import TracedCode, traced_code
from autoshard.spec.workload import Precision
from tests.kit import local_plan
from tests.modules.training import own_translators as own
from tests.modules.training.code_cases import plan_of
from tests.modules.training.own_decoders import Gpt, biased
from tests.modules.training.own_samples import HIDDEN, SAMPLES, Layer, Made, contrastive
from tests.modules.training.own_translators import OF_TRANSFORMERS, SOURCE, TARGET, TRANSLATORS, Translator
from tests.modules.training.sample_cases import hold_samples, plan_of_samples
from tests.slower import covering, rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MADE = {**TRANSLATORS, **OF_TRANSFORMERS}
LAYOUTS = [
    ("tp=2,pp=2,dp=1,mbs=2", 4),
    ("tp=1,pp=1,dp=2,mbs=2", 2),
    ("tp=1,pp=2,vp=2,dp=1,mbs=2,schedule=interleaved,recompute=full", 2),
    ("tp=2,pp=1,dp=2,mbs=2,zero=3", 4),
    ("tp=1,pp=2,dp=2,mbs=2,zero=1,schedule=zb_h1", 4),
]
CUTS = [  # a cut in the encoder, one in the decoder, and one at each layer
    ("tp=1,pp=2,dp=1,mbs=2,stages=1/3", 2), ("tp=1,pp=2,dp=1,mbs=2,stages=3/1", 2), ("tp=1,pp=4,dp=1,mbs=2", 4),
    ("tp=1,pp=1,cp=2,dp=1,mbs=2,cp_order=contiguous", 2), ("tp=1,pp=2,vp=2,dp=1,mbs=2,schedule=zb_v", 2),
    ("tp=1,pp=2,dp=1,mbs=2,recompute=full", 2),
]  # fmt: skip
MASKED = {"x": torch.randn(4, 16, HIDDEN), "order": torch.rand(4, 16)}


def captured_of(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[Captured, Stack]:
    of_tokens = token_arguments(module, inputs)
    captured = captured_stack(module, lambda: capture(module, inputs), of_tokens)
    return captured, stack_of(captured.program, trained_end(captured, of_tokens).value)


def traced(made: Made, *, precision: str = "fp32") -> TracedCode:
    module, inputs = made
    model = read_decoder(module, None, inputs)
    plan = local_plan(
        "tp=1,pp=1,dp=1,mbs=2", model, precision=Precision.named(precision), seq_len=SOURCE, global_batch=8
    )
    return traced_code(module, plan, Formats(), inputs)


def names(values: Sequence[object]) -> list[str]:
    return [str(getattr(value, "name", value)) for value in values]


def test_what_later_parts_read_goes_along_in_one_place_for_equal_layers():
    captured, stack = captured_of(*own.translator())
    assert [layer.name for layer in stack.layers] == ["readers.0", "readers.1", "writers.0", "writers.1"]
    bias = "p_readers_0_attention_bias_weight"  # few numbers, of which each layer makes the bias of all positions
    first, last = stack.layers[0], stack.layers[-1]
    state, decoded = stack.embed.gives.name, stack.layers[2].takes
    assert decoded and names(first.arriving) == [state, bias, decoded.name]
    read = stack.layers[1].gives.name
    assert names(stack.layers[2].arriving) == [read, decoded.name] and stack.layers[2].takes is decoded
    assert names(last.arriving)[0] == read and last.arriving[1] is last.takes
    assert captured.parameters[bias] == "readers.0.attention.bias.weight"


@pytest.mark.parametrize("name", rest_is_slow(["translator", "T5", "BART"], 1, 2))
def test_layers_of_a_list_are_of_one_kind_whatever_they_hand_on(name: str):
    code = traced(MADE[name](3))
    encoder, decoder = code.graph.graph.order[:2], code.graph.graph.order[3:]
    assert {*encoder} == {"layer"} and len({*decoder}) == 1 and not {*encoder} & {*decoder}


def test_a_layer_that_attends_twice_is_planned_by_all_of_its_work():
    model = read_decoder(*_named(own.translator()))
    assert model.traced and model.order == "layer/layer_2/layer_3*2"
    writer = next(kind for kind in model.kinds if kind.name == "layer_3")
    products = [line for line in writer.lines if "scaled_dot_product_attention" in line and "= Opaque" in line]
    assert len(products) == 2 and all('"products"' in line for line in products)
    assert writer.lines[0].startswith("arrive = Opaque") and any(line.startswith("leave =") for line in writer.lines)
    assert model.traced.carried == ("batch", "packed_rows", "hidden")
    assert model.traced.sizes["packed_rows"] == SOURCE + TARGET + 1  # the bias of 32 numbers takes a row
    said = " ".join(model.traced.unlifted)
    assert "readers.0.attention.bias.weight" in said and " along beside the hidden state" in said
    assert "FLOPs" not in said  # those of the plan are those of the code


@pytest.mark.slow
def test_meshes_on_which_no_cut_of_a_layer_is_legal_are_left_out_of_a_search():
    model = read_decoder(*_named(MADE["BART"](2)))
    result = autoshard.plan(model, "h100-80", nodes=8, global_batch=512, fix="tp=2")
    assert result.plan.mesh.size("cp") == 1 and result.certificate.num_solved


def _named(made: Made) -> tuple[nn.Module, None, Mapping[str, torch.Tensor]]:
    return made[0], None, made[1]


def test_weights_that_are_frozen_are_constants_as_long_as_a_host_holds_them():
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Embedding(2**14, 2**14, device="meta"))
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    assert frozen_buffers(with_constants(module)) == ["0.weight"]
    assert [name for name, _ in module.named_parameters()] == ["1.weight", "1.bias", "2.weight"]
    assert [*module.state_dict()] == ["0.weight", "1.weight", "1.bias", "2.weight"]
    alike = nn.ModuleList(nn.Linear(2**14, 2**13, bias=False, device="meta") for _ in range(3)).requires_grad_(False)
    assert not frozen_buffers(with_constants(alike))  # so that equal layers stay alike
    gpt = Gpt()
    gpt.places.requires_grad_(False)  # as if it were too large
    gpt.norm.requires_grad_(False)
    plan = plan_of(gpt, "tp=1,pp=1,dp=1,mbs=2")
    assert plan.model.traced and any("576 of" in note and "are frozen" in note for note in plan.model.traced.unlifted)
    with pytest.raises(
        InputError, match=r"places\.weight: is frozen, as 2 more are: more than the 268,435,456"
    ) as refused:
        traced_code(gpt, plan, Formats())
    assert len(refused.value.faults) == 1


@pytest.mark.slow
def test_a_frozen_table_has_the_format_of_a_plan():
    code = traced(own.whisper(), precision="bf16")
    table = "model.encoder.embed_positions.weight"
    assert code.graph.captured.exported.buffers[table] == torch.bfloat16
    assert code.buffers[table].dtype == torch.float32


class PartlyBiased(nn.Module):
    """A product of which a part has a bias that no training changes, in the format in which modules are made (BEiT)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.bias, self.other = inner, nn.Parameter(torch.zeros(32)), nn.Buffer(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight, torch.cat([self.bias, self.other]))


def test_a_buffer_that_is_joined_with_weights_has_their_format():
    module: Any = biased(is_causal=True, by_hand=False)
    for layer in module.layers:
        layer.attention = PartlyBiased(layer.attention)
    code = traced_code(module, plan_of(module, "tp=1,pp=1,dp=1,mbs=2", precision="bf16"), Formats())
    assert {*code.graph.captured.exported.buffers.values()} == {torch.bfloat16}


class Masked(nn.Module):
    """An encoder of some tokens, and a decoder of all: both, and the head, look places up in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.encoder, self.out = (
            nn.Embedding(16, HIDDEN),
            nn.ModuleList([Layer(), Layer()]),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.decoder = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        (hidden, seen), rows = order.argsort(-1).split([12, 4], -1), torch.arange(len(x), device=x.device)[:, None]
        y, unseen = x[rows, seen] + self.places(seen), self.places(hidden)
        for layer in self.encoder:
            y = layer(y)
        y = torch.cat([y + self.places(seen), unseen], 1)
        for layer in self.decoder:
            y = layer(y)
        return nn.functional.mse_loss(self.out(y[:, 4:] + self.places(hidden)), x[rows, hidden])


def test_a_table_that_all_parts_read_is_planned_and_refused_by_a_run():
    plan = plan_of_samples(lambda: (Masked(), MASKED), "tp=1,pp=1,dp=1,mbs=2")
    with pytest.raises(InputError, match=r"^places\.weight: is used by a layer and elsewhere, .*autoshard\.shard$"):
        traced_code(Masked(), plan, Formats(), MASKED)


class Sharing(Translator):
    """A product that two layers share is no small weight."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.readers
        assert isinstance(first, own.Reader) and isinstance(second, own.Reader)
        second.up = first.up


def test_large_weights_that_layers_share_are_refused():
    with pytest.raises(InputError, match=r"readers\.1: uses readers\.0\.up\.weight, as readers\.0 does"):
        read_decoder(*_named((Sharing(), own.translator()[1])))


def may_run(case: Any) -> bool:
    """Timesformer joins frames with samples, which ranks of dp have apart: that is refused."""
    name, (text, _) = case.values
    return name != "Timesformer" or "dp=1" in text


CASES = [*covering(SAMPLES, LAYOUTS), *covering(MADE, LAYOUTS), *covering(TRANSLATORS, CUTS)]


@pytest.mark.parametrize(
    ("name", "layout"), [case for case in CASES if may_run(case)],
    ids=lambda value: value if isinstance(value, str) else value[0],
)  # fmt: skip
def test_steps_are_those_of_the_plain_module(name: str, layout: tuple[str, int]):
    hold_samples({**MADE, **SAMPLES}[name], *layout)


@pytest.mark.parametrize("text", rest_is_slow(["tp=2,pp=1,dp=2,mbs=4", "tp=1,pp=2,dp=2,mbs=4,zero=1"], 1, 2))
def test_a_loss_that_compares_the_samples_of_a_micro_batch_is_that_of_the_plain_module(text: str):
    hold_samples(contrastive, text, 4)


@pytest.mark.slow
def test_an_example_of_a_single_sample_is_enough():
    module, inputs = SAMPLES["diffusion"]()
    single = {name: tensor[:1] for name, tensor in inputs.items()}
    several, alone = (read_decoder(module, None, given).traced for given in (inputs, single))
    assert several and alone and (several.lines, several.sizes) == (alone.lines, alone.sizes)


def test_whole_numbers_stay_whole_whatever_the_example_holds():
    (argument,) = planned_data({"labels": torch.full((2, 3), -100)}, ["labels"])
    assert argument.is_whole and not argument.drawn(np.random.default_rng(0)).any()


@pytest.mark.slow
def test_formats_of_one_size_are_not_packed_together():
    (module, inputs), formats = SAMPLES["diffusion"](), Formats()
    model = read_decoder(module, None, inputs)
    plan = local_plan(
        "tp=1,pp=1,dp=1,mbs=4", model, precision=Precision.named("fp32"), seq_len=model.max_positions, global_batch=8
    )
    captured = traced_code(module, plan, formats, inputs).graph.captured
    stack = stack_of(captured.program, trained_end(captured, ()).value)
    stack.embed.gives.format, stack.beside[0].format = torch.float16, torch.bfloat16
    for layer in stack.layers:
        layer.gives.format = torch.float16
    with pytest.raises(InputError, match="which would round it"):
        Packing.of(stack, 4, casts=True)
