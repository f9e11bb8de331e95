"""Memory of Llama-3 70B on a rank, by hand and as published.

First tp 32, pp 8, dp 2 on 16 trn1 nodes: the calculation takes nothing from the package, only the published numbers of
the architecture, the operations that neuronx-distributed keeps tensors for, and arithmetic. Then 12 layers on 8 B200
under Megatron-LM and TransformerEngine, runs whose measured peaks are published: MooreThreads/SimuMax
docs/b200/b200_release_v1.2_summary.json (sequence 4096, one sequence a micro-batch; the peaks do not change with the
number of micro-batches). The parts below are read off the sources of Megatron-LM 23e00ed and TransformerEngine v2.11.
"""

from dataclasses import replace

import pytest

from autoshard.spec.kernels import load_kernels
from tests.cost.cases import ask, predicted_of

HIDDEN, FFN, VOCAB, LAYERS = 8192, 28672, 128256, 80
QUERY_HEADS, KV_HEADS, HEAD = 64, 8, 128
SEQ = 8192
TP, PP, DP = 32, 8, 2
BF16, FP32 = 2, 4

LAYERS_A_RANK = LAYERS // PP  # 10
TOKENS = SEQ  # one sequence a micro-batch; attention and MLP see all of its tokens
PIECE = SEQ // TP  # 256 tokens: between them, each rank holds a piece of the sequence
QUERIES = QUERY_HEADS // TP  # 2 query heads a rank
KVS = KV_HEADS * 4 // TP  # each of the 8 KV heads is held 4 times, so every rank has a whole one
FFN_PIECE = FFN // TP  # 896
VOCAB_PIECE = VOCAB // TP  # 4008
IN_FLIGHT = [8, 7, 6, 5, 4, 3, 2, 1]  # 1F1B: a rank runs this many forwards before its first backward ends

LAYER_WEIGHTS = (
    2 * HIDDEN  # two norms, whole on every rank
    + HIDDEN * QUERIES * HEAD  # q
    + 2 * HIDDEN * KVS * HEAD  # k and v
    + QUERIES * HEAD * HIDDEN  # o
    + 3 * HIDDEN * FFN_PIECE  # gate, up, down
)
TABLE = VOCAB_PIECE * HIDDEN  # of the embedding, and again of the output head
WEIGHTS = {
    0: LAYERS_A_RANK * LAYER_WEIGHTS + TABLE,
    3: LAYERS_A_RANK * LAYER_WEIGHTS,
    7: LAYERS_A_RANK * LAYER_WEIGHTS + HIDDEN + TABLE,  # the last norm
}

# What is kept of a norm that is computed in FP32 by single operations.
NORM = (
    PIECE * HIDDEN * FP32  # its input, cast up
    + PIECE * FP32  # the statistic of each token
    + PIECE * HIDDEN * BF16  # the input made of unit size, before the weight
    + PIECE * HIDDEN * BF16  # its output, a piece of the sequence; the products gather it again
)
QUERY = TOKENS * QUERIES * HEAD * BF16  # rotated queries
EXPANDED = TOKENS * QUERIES * HEAD * BF16  # keys or values, repeated to the query heads
UNEXPANDED = TOKENS * KVS * HEAD * BF16
ATTENDED = TOKENS * QUERIES * HEAD * BF16  # output of attention, input of the o product
LSE = TOKENS * QUERIES * FP32  # log of the softmax's denominator
INNER = TOKENS * FFN_PIECE * BF16  # one tensor between the products of the MLP

LAYER = (
    NORM + QUERY + 2 * EXPANDED + ATTENDED + LSE
    + NORM + INNER + INNER + INNER + INNER  # gate, silu(gate), up, their product
)  # fmt: skip
HEAD_EXTRA = NORM + TOKENS * VOCAB_PIECE * FP32  # the last norm; the softmax over a piece of the vocabulary
# Only the input of the layer stays.
FULL = PIECE * HIDDEN * BF16
# The MLP is run again from the output of its norm. Flash attention keeps what it keeps: with it, NxD never calls the
# module CoreAttention, so naming it changes nothing.
SELECTIVE = NORM + QUERY + 2 * EXPANDED + ATTENDED + LSE + NORM


def predicted(suffix=""):
    question = ask("llama3-70b", nodes=16, global_batch=1024)
    assert question.kernels == "nxd"
    return predicted_of(question, f"tp=32,pp=8,dp=2{suffix}")


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_weights_gradients_and_optimizer_match_a_hand_calculation(rank):
    memory = predicted().stage_memory[rank]
    states = {
        "weights": WEIGHTS[rank] * BF16,
        "gradients": WEIGHTS[rank] * FP32,
        # FP32 masters and two moments, divided over the two data-parallel ranks
        "masters": WEIGHTS[rank] * FP32 // DP,
        "optimizer": WEIGHTS[rank] * 2 * FP32 // DP,
    }
    assert memory.num_weights == WEIGHTS[rank] and memory.parts.items() >= states.items()


@pytest.mark.parametrize(
    ("suffix", "layers"),
    [
        ("", 10 * LAYER),
        (",recompute=full", 10 * FULL),
        (",recompute=full:4", 4 * FULL + 6 * LAYER),
        (",recompute=selective[CoreAttention,LlamaMLP]", 10 * SELECTIVE),
    ],
)
def test_activations_of_every_rank_match_a_hand_calculation(suffix, layers):
    memory = predicted(suffix).stage_memory
    assert [entry.parts["activations"] for entry in memory] == [count * layers for count in IN_FLIGHT]
    assert [entry.parts["logits"] for entry in memory] == [0] * (PP - 1) + [HEAD_EXTRA]


def test_communication_matches_a_hand_calculation():
    sent = predicted().communication_bytes
    micro_batches = 1024 // DP
    hidden_state = TOKENS * HIDDEN * BF16
    gathers = 4 + 4 + 2  # forward 2 + 2, input gradients 2 + 2, and the inputs of both runs of products again
    around = gathers * hidden_state * (TP - 1) // TP
    # dK and dV of each KV head are summed over the 4 ranks that hold it
    replicas = 2 * (2 * UNEXPANDED * 3 // 4)
    layers = LAYERS_A_RANK * (around + replicas)
    # The last rank also gathers the head's input twice and scatters its gradient; three sums over the vocabulary
    # (maximum, total, label) and two gradients go around as one FP32 number a token.
    number = TOKENS * FP32
    maximum = 2 * number * (TP - 1) // TP
    head = (3 * hidden_state + 4 * number) * (TP - 1) // TP + maximum
    norms = 2 * (2 * LAYERS_A_RANK + 1) * HIDDEN * FP32 * (TP - 1) // TP  # once a step
    assert sent["tp"] == micro_batches * (layers + head) + norms
    # half of the gradients and half of the weights go to the one other data-parallel rank
    assert sent["dp"] == WEIGHTS[7] * FP32 // 2 + WEIGHTS[7] * BF16 // 2
    # a piece of the hidden state forward and one backward
    assert sent["pp"] == micro_batches * 2 * PIECE * HIDDEN * BF16


MIB = 2**20
SHORT = 4096
PUBLISHED = [
    # candidate, pipeline rank, padded vocabulary of the measured run; peak GiB, parameters, MiB of weights, gradients,
    # optimizer, and kept per layer; layers times micro-batches in flight
    ("tp=2,dp=4", 0, 128256, (60.680, 6_184_706_048, 11796.39, 23592.78, 17694.59, 536.516), 12),
    ("tp=1,pp=2,dp=4", 0, 128256, (66.552, 6_184_599_552, 11796.19, 23592.38, 17694.28, 1073.031), 6 * 2),
    ("tp=1,pp=2,dp=4", 1, 128256, (62.968, 6_184_607_744, 11796.20, 23592.41, 17694.30, 1073.031), 6),
    ("tp=4,dp=2", 0, 128512, (39.072, 3_093_504_000, 5900.39, 11800.78, 17701.17, 268.258), 12),
    ("tp=8,dp=1", 0, 129024, (28.286, 1_547_902_976, 2952.39, 5904.78, 17714.34, 134.129), 12),
]


@pytest.mark.parametrize(("text", "rank", "vocab", "expected", "layers"), PUBLISHED)
def test_a_rank_holds_what_megatron_s_and_transformer_engine_s_sources_say_and_near_its_published_peak(
    text, rank, vocab, expected, layers
):
    question = ask("llama3-70b", "b200", 1, kernels="te", seq_len=SHORT, global_batch=32)
    question = replace(question, model=replace(question.model, num_layers=12))
    memory = predicted_of(question, text).stage_memory[rank]
    peak, parameters, weights, gradients, optimizer, per_layer = expected
    tp, dp = int(text.partition(",")[0].removeprefix("tp=")), int(text.rpartition("dp=")[2])
    # Megatron pads the vocabulary to a multiple of 128 * tp, autoshard to one of tp.
    added = 2 * (vocab - VOCAB) // tp * HIDDEN
    assert memory.num_weights == parameters - added
    assert (memory.parts["weights"] + 2 * added) / MIB == pytest.approx(weights, abs=0.0051)
    assert (memory.parts["gradients"] + 4 * added) / MIB == pytest.approx(gradients, abs=0.0051)
    states = memory.parts["masters"] + memory.parts["optimizer"]
    assert (states + 12 * added / dp) / MIB == pytest.approx(optimizer, abs=0.0051)
    # The last norm keeps input, output and a statistic; the loss keeps the logits' gradient in bf16.
    head = 2 * SHORT // tp * HIDDEN * 2 + SHORT // tp * 4 + SHORT * (VOCAB // tp) * 2
    assert memory.parts["logits"] == (head if "pp" not in text or rank == 1 else 0)
    assert memory.parts["activations"] / layers / MIB == pytest.approx(per_layer, abs=0.0005)
    assert memory.without(load_kernels("te").uncounted) / 2**30 == pytest.approx(peak, rel=0.01)
