"""What a rank of Llama-3 70B, cut to 12 layers, holds on 8 B200 under Megatron-LM and TransformerEngine.

The runs and their measured peaks are published: MooreThreads/SimuMax docs/b200/b200_release_v1.2_summary.json
(sequence 4096, one sequence a micro-batch; the peaks do not change with the number of micro-batches). The parts
below are read off the sources of Megatron-LM 23e00ed and TransformerEngine v2.11.
"""

from dataclasses import replace

import pytest

from autoshard.spec.kernels import load_kernels
from tests.cost.cases import ask, predicted_of

MIB = 2**20
HIDDEN, VOCAB = 8192, 128256
SEQ = 4096

# candidate, pipeline rank, parameters, weights MiB, gradients MiB, optimizer MiB, MiB kept per layer,
# layers, micro-batches in flight, padded vocabulary of the measured run
ROWS = {
    "tp2": ("tp=2,dp=4", 0, 6_184_706_048, 11796.39, 23592.78, 17694.59, 536.516, 12, 1, 128256),
    "tp1pp2-first": ("tp=1,pp=2,dp=4", 0, 6_184_599_552, 11796.19, 23592.38, 17694.28, 1073.031, 6, 2, 128256),
    "tp1pp2-last": ("tp=1,pp=2,dp=4", 1, 6_184_607_744, 11796.20, 23592.41, 17694.30, 1073.031, 6, 1, 128256),
    "tp4": ("tp=4,dp=2", 0, 3_093_504_000, 5900.39, 11800.78, 17701.17, 268.258, 12, 1, 128512),
    "tp8": ("tp=8,dp=1", 0, 1_547_902_976, 2952.39, 5904.78, 17714.34, 134.129, 12, 1, 129024),
}
PEAKS = {  # GiB by pipeline rank
    "tp=2,dp=4": (60.680,),
    "tp=1,pp=2,dp=4": (66.552, 62.968),
    "tp=4,dp=2": (39.072,),
    "tp=8,dp=1": (28.286,),
}


def stage_memory(text):
    question = ask("llama3-70b", "b200", 1, seq_len=SEQ, global_batch=32)
    assert question.kernels == "te"
    return predicted_of(replace(question, model=replace(question.model, num_layers=12)), text).stage_memory


@pytest.fixture(params=ROWS)
def row(request):
    text, rank, *numbers = ROWS[request.param]
    return text, rank, stage_memory(text)[rank], numbers


def tp_of(text):
    return int(text.partition(",")[0].removeprefix("tp="))


def test_parameters_and_states_equal_megatrons_but_for_padding_of_the_vocabulary(row):
    text, _, memory, (parameters, weights, gradients, optimizer, _, _, _, vocab) = row
    # Megatron pads the vocabulary to a multiple of 128 * tp, autoshard to one of tp.
    added = 2 * (vocab - VOCAB) // tp_of(text) * HIDDEN
    assert memory.num_weights == parameters - added
    assert (memory.parts["weights"] + 2 * added) / MIB == pytest.approx(weights, abs=0.0051)
    assert (memory.parts["gradients"] + 4 * added) / MIB == pytest.approx(gradients, abs=0.0051)
    states = memory.parts["masters"] + memory.parts["optimizer"]
    assert (states + 12 * added / int(text.rpartition("dp=")[2])) / MIB == pytest.approx(optimizer, abs=0.0051)


def test_kept_activations_equal_transformer_engines(row):
    text, rank, memory, (*_, per_layer, layers, in_flight, _) = row
    tp, is_last = tp_of(text), "pp" not in text or rank == 1
    # The last norm keeps input, output and a statistic; the loss keeps the logits' gradient in bf16.
    head = 2 * SEQ // tp * HIDDEN * 2 + SEQ // tp * 4 + SEQ * (VOCAB // tp) * 2 if is_last else 0
    assert memory.parts["logits"] == head
    assert memory.parts["activations"] / (layers * in_flight) / MIB == pytest.approx(per_layer, abs=0.0005)


def test_every_stage_is_within_one_percent_of_its_published_peak(row):
    text, rank, memory, _ = row
    counted = memory.without(load_kernels("te").uncounted)
    assert counted / 2**30 == pytest.approx(PEAKS[text][rank], rel=0.01)
