"""What people found for transformers must come out of costs alone: the solver knows sizes, rates and a few pins."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from autoshard.blocks.operators import OperatorSolution, solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.layout.layout import Cuts
from autoshard.layout.program import Compute
from autoshard.spec.model_catalogue import load_model
from tests.blocks.operator_cases import BANDWIDTH, RATES, collectives, lowered, model_problems, pinned, seconds_of

TP = {"tp": 8}
RESIDUAL_OPS = ("attn_norm", "attn_add", "mlp_norm", "mlp_add")
BY_HEADS = ("q", "k", "v", "q_rotary", "k_rotary", "attend", "o")
BY_FFN = ("up", "gate", "act", "product", "down")


def layer(model: str, atoms: Mapping[str, int], boundary: Cuts, **more: object) -> OperatorProblem:
    return model_problems(model, atoms, boundary, **more)["layer"]  # pyright: ignore[reportArgumentType]


def counted(problem: OperatorProblem, found: OperatorSolution) -> Counter[str]:
    return Counter(text.split()[2] for text in collectives(problem, found.cuts))


def test_megatron_one_pending_sum_for_attention_and_one_for_the_mlp() -> None:
    # The residual stream is whole on every rank, as before sequence parallelism was known.
    problem = layer("llama3-8b", TP, {}, batch=1, seq=2048, pins={name: {} for name in RESIDUAL_OPS})
    found = solve(problem)
    assert all(found.cuts[name] == {"kv_heads": ("tp",)} for name in BY_HEADS)
    assert all(found.cuts[name] == {"ffn": ("tp",)} for name in BY_FFN)
    assert sorted(collectives(problem, found.cuts)) == [
        "F attn_out all_reduce /tp",
        "F mlp_out all_reduce /tp",
        "I attn_in all_reduce /tp",
        "I mlp_in all_reduce /tp",
    ]


def test_sequence_parallelism_in_the_norm_regions() -> None:
    problem = layer("llama3-8b", TP, {"seq": ("tp",)}, batch=1, seq=2048)
    found = solve(problem)
    assert all(found.cuts[name] == {"seq": ("tp",)} for name in RESIDUAL_OPS)
    assert all(found.cuts[name] == {"kv_heads": ("tp",)} for name in BY_HEADS)
    assert counted(problem, found) == {"all_gather": 4, "reduce_scatter": 4}


def test_gathering_again_keeps_less_and_sends_more() -> None:
    pins: dict[str, Cuts] = {name: {"kv_heads": ("tp",)} for name in BY_HEADS}
    pins |= {name: {"ffn": ("tp",)} for name in BY_FFN}
    kept, again = (
        layer("llama3-8b", TP, {"seq": ("tp",)}, batch=1, seq=2048, pins=pins, keeps_gathered=keeps)
        for keeps in (True, False)
    )
    free, short = solve(kept), solve(again)
    assert counted(kept, free) == {"all_gather": 4, "reduce_scatter": 4}
    assert counted(again, short) == {"all_gather": 6, "reduce_scatter": 4}
    # Attention's and the MLP's gathered inputs, 2 x 2048 x 4096 numbers of two bytes, less the eighth that is kept.
    gathered_bytes = 2 * 2048 * 4096 * 2
    assert free.kept_bytes - short.kept_bytes == gathered_bytes - gathered_bytes // 8


def test_the_loss_never_gathers_logits() -> None:
    problem = model_problems("llama3-8b", {"dp": 8, "tp": 8}, {"batch": ("dp",), "seq": ("tp",)})["head"]
    found = solve(problem)
    for name in ("unembed", "logits_fp32", "top", "shifted", "power", "total", "picked"):
        assert found.cuts[name] == {"batch": ("dp",), "vocab": ("tp",)}
    assert not [text for text in collectives(problem, found.cuts) if "vocab" in text]


def test_the_table_of_the_embedding_is_cut_along_the_vocabulary_where_rows_stay_whole() -> None:
    # Cutting rows is cheaper still: an all-to-all moves 1/tp of what a reduce-scatter does. An engine whose tables hold
    # whole rows (tied to an unembedding that is cut along the vocabulary, for one) gets the vocabulary.
    problem = model_problems("llama3-8b", TP, {"seq": ("tp",)}, state_bytes_per_weight=18.0)["embed"]
    assert solve(problem).cuts["embed"] == {"hidden": ("tp",)}
    by = {dim: solve(pinned(problem, {"embed": {dim: ("tp",)}})) for dim in ("hidden", "vocab")}
    sent = {dim: sum(text.startswith("F") for text in collectives(problem, one.cuts)) for dim, one in by.items()}
    assert sent == {"hidden": 1, "vocab": 1}
    whole = solve(pinned(problem, {"embed": {"seq": ("tp",)}}))
    assert by["vocab"].kept_bytes == whole.kept_bytes / 8
    assert by["hidden"].cost_s < by["vocab"].cost_s


def test_keys_and_values_are_held_in_copies_when_tp_exceeds_their_heads() -> None:
    # 70B at tp 32: 8 key/value heads, so that 4 ranks hold each.
    problem = layer("llama3-70b", {"kv": 8, "rep": 4}, {"seq": ("kv", "rep")}, batch=1, seq=2048)
    found = solve(problem)
    assert found.cuts["attend"] == {"kv_heads": ("kv",), "q_group": ("rep",)}
    program = lowered(problem, found.cuts).instructions
    reads = next(one.reads for one in program if isinstance(one, Compute) and one.op.name == "attend")
    keys = dict(reads[1].layout.dims)
    assert keys["kv_heads"] == ("kv",) and "rep" not in {atom for cut in keys.values() for atom in cut}


def test_gradients_of_weights_are_summed_over_data_parallel_ranks_once_per_step() -> None:
    problem = layer("llama3-8b", {"dp": 8}, {"batch": ("dp",)}, batch=8, seq=4096)
    found = solve(problem)
    assert all(cuts == {"batch": ("dp",)} for cuts in found.cuts.values())
    assert collectives(problem, found.cuts) == []
    results = lowered(problem, found.cuts).results
    assert all(results[f"{tensor.name}.sum"].layout.sums == ("dp",) for tensor in problem.block.parameters)


def test_experts_lie_on_the_ranks_that_share_the_batch() -> None:
    problem = layer("mixtral-8x7b", {"ep": 8}, {"batch": ("ep",)}, batch=8, seq=4096)
    found = solve(problem)
    assert all(found.cuts[name] == {"experts": ("ep",)} for name in BY_FFN)
    assert found.cuts["dispatch"] == {"batch": ("ep",), "slots": ("ep",)}
    assert collectives(problem, found.cuts) == [
        "F expert_in all_to_all slots>experts/ep",
        "F expert_out all_to_all experts>slots/ep",
        "I expert_out all_to_all slots>experts/ep",
        "I expert_in all_to_all experts>slots/ep",
    ]


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "llama2-7b"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_where_keys_are_few_and_all_to_all_where_ranks_are_many(model: str, size: int) -> None:
    # Sent by a rank, in units of (size - 1) / size of the local keys: the ring shows them (and the values) to all
    # others, three times with backward and its gradients: 6 x size. An all-to-all moves queries, keys, values, results,
    # and their gradients: 4 x (group + 1). So the ring wins below 2/3 x (group + 1) ranks.
    spec = load_model(model)
    along: Cuts = {"seq": ("cp",)}
    problem = layer(model, {"cp": size}, along, batch=1, seq=65536)
    pins = {name: along for name in (*RESIDUAL_OPS, *BY_HEADS, *BY_FFN) if name != "attend"}
    found = solve(pinned(problem, pins)).cuts["attend"]
    crossover = 2 / 3 * (spec.queries_per_kv_head + 1)
    assert found == ({"seq": ("cp",), "kv_seq": ("cp",)} if size < crossover else {"kv_heads": ("cp",)})


@pytest.mark.parametrize("share", [0.5, 0.9, 1.1, 2.0])
def test_long_sequences_are_cut_and_short_ones_cut_the_weights(share: float) -> None:
    # Cut along the sequence, every rank adds up (10 bytes per weight: two sums in FP32 and a gradient in BF16) and
    # reduces (FP32, once in 8 micro-batches) the gradients of whole weights. Cut along ffn, activations are gathered
    # and scattered, forward and backward: that grows with the sequence.
    spec, size = load_model("llama3-8b"), 8
    weights = 3 * spec.hidden * spec.ffn
    reduce_s = 2 * (size - 1) / size * 4 * weights / BANDWIDTH / 8
    add_s = (1 - 1 / size) * 10 * weights / RATES.memory_bytes_per_s
    token_s = 4 * (size - 1) / size * 2 * spec.hidden / BANDWIDTH
    crossover = (reduce_s + add_s) / token_s
    along: Cuts = {"seq": ("tp",)}
    seq = round(share * crossover / 64) * 64
    pins = dict.fromkeys((*RESIDUAL_OPS, *BY_HEADS), along)
    found = solve(layer("llama3-8b", TP, along, batch=1, seq=seq, pins=pins))
    dim = "ffn" if share < 1 else "seq"
    assert all(found.cuts[name] == {dim: ("tp",)} for name in BY_FFN)


def test_weights_rest_in_pieces_where_memory_is_short() -> None:
    # 2 bytes of weight, 4 of gradient, 12 of optimizer state for each weight.
    problem = layer(
        "llama3-8b", {"dp": 8}, {"batch": ("dp",)}, batch=8, seq=4096, state_bytes_per_weight=18.0, cuts_rest=True
    )
    free = solve(problem)
    assert not free.rests
    short = solve(replace(problem, memory_limit_bytes=0.3 * free.kept_bytes))
    assert short.fits and short.gap == 0
    assert all(cuts == {"batch": ("dp",)} for cuts in short.cuts.values())
    assert {"q", "o", "up", "gate", "down"} <= set(short.rests)
    assert set(short.rests.values()) == {("dp",)}
    whole = replace(problem, memory_limit_bytes=0.3 * free.kept_bytes, cuts_rest=False)
    assert not solve(pinned(whole, short.cuts)).fits


def test_a_slow_link_is_left_to_the_batch() -> None:
    # 25 GB/s between nodes, 200 GB/s inside: nothing of a micro-batch crosses the slow one.
    atoms = {"slow": 8, "fast": 8}
    seconds = seconds_of(atoms, {"slow": 25e9, "fast": BANDWIDTH})
    boundary: Cuts = {"batch": ("slow",), "seq": ("fast",)}
    problem = layer("llama3-8b", atoms, boundary, seconds=seconds, num_micro_batches=64)
    found = solve(problem)
    assert not [text for text in collectives(problem, found.cuts) if "slow" in text]
