"""Stacks whose samples are no tokens, trained by plans: losses, norms and weights are those of the plain module."""

import numpy as np
import pytest
import torch

from autoshard.engine.torch.formats import Formats
from autoshard.errors import InputError
from autoshard.modules.decoder.arguments import planned_data
from autoshard.modules.decoder.ends import trained_end
from autoshard.modules.decoder.reading import read_decoder
from autoshard.modules.decoder.segments import stack_of
from autoshard.modules.training.packing import Packing
from autoshard.modules.training.reading import traced_code
from autoshard.spec.workload import Precision
from tests.kit import local_plan
from tests.modules.training.own_samples import SAMPLES, contrastive
from tests.modules.training.sample_cases import hold_samples
from tests.slower import covering, rest_is_slow

LAYOUTS = [
    ("tp=2,pp=2,dp=1,mbs=2", 4),
    ("tp=1,pp=1,dp=2,mbs=2", 2),
    ("tp=1,pp=2,vp=2,dp=1,mbs=2,schedule=interleaved,recompute=full", 2),
    ("tp=2,pp=1,dp=2,mbs=2,zero=3", 4),
    ("tp=1,pp=2,dp=2,mbs=2,zero=1,schedule=zb_h1", 4),
]
COMBINED = covering(list(SAMPLES), LAYOUTS)


@pytest.mark.parametrize(("name", "layout"), COMBINED, ids=lambda value: value if isinstance(value, str) else value[0])
def test_steps_are_those_of_the_plain_module(name: str, layout: tuple[str, int]):
    hold_samples(SAMPLES[name], *layout)


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
