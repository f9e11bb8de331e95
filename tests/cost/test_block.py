"""One block: its messages by their rings, what hides, what is kept and computed again, and columns of layouts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost import setting as priced_in
from autoshard.cost.collective import Ring
from autoshard.cost.compute import kernel_time
from autoshard.cost.kernel_run import rank_sizes, saved_bytes
from autoshard.cost.setting import PASSES, block_work, setting_of
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.layout import DimSizes
from autoshard.plan.recompute import Recompute
from autoshard.search.bound.mesh_columns import ring_column
from autoshard.spec.kernels import kernels_names, load_kernels
from autoshard.spec.workload import Precision
from tests.cost.cases import (
    NO_WORK,
    ask,
    block_price,
    candidate_of,
    distinct_models,
    lowered,
    only,
    priced,
    rates,
    setting,
)
from tests.slower import rest_is_slow

FFN, HEAD, HEADS, HIDDEN, KV_HEADS = 14336, 128, 32, 4096, 8  # of llama3-8b
TP = 8
COMMUNICATION = ("tp", "cp", "ep", "dp")
SMALL_MIXTRAL = ("mixtral-8x7b", "h100-80", 1, "te")


def total(cost):
    return sum(cost.part_s(part) for part in ("compute", "waiting", *COMMUNICATION))


class TestMessages:
    @pytest.mark.parametrize("name", rest_is_slow(reversed(distinct_models()), 3, 3))
    def test_with_every_atom_of_size_1_none_costs_anything(self, name):
        question = ask(name, "h100-80", 1, kernels="te", seq_len=1024)
        alone = setting(question, "tp=1,dp=8")
        for sp in ("false", "true"):
            many = setting(question, f"tp=2,dp=4,sp={sp}")
            rings = {atoms: Ring(size=1, bandwidth_bytes_per_s=1e9, latency_s=0.0) for atoms in many.rings}
            here = replace(alone, atoms=dict.fromkeys(alone.atoms, 1), rings=rings)
            for kind in ("embed", *question.model.layer_counts, "head"):
                sharded = many.blocks.block(kind, NO_WORK)
                cost = block_price(sharded, sharded, here, question.rates)
                assert sum(cost.part_s(part) for part in COMMUNICATION) == sum(cost.sent_bytes.values()) == 0

    def test_replicas_of_keys_and_values_cost_nothing_where_there_are_none(self):
        none, some = priced(ask(), "tp=8,dp=16"), priced(ask(), "tp=32,dp=4")
        hidden_state = 8192 * HIDDEN * 2
        ten = 4 + 4 + 2  # gathers and scatters of the hidden state; see the layout's tests
        assert none.sent_bytes["tp"] == pytest.approx(ten * hidden_state * 7 / 8)
        one_head = 8192 * HEAD * 2
        assert some.sent_bytes["tp"] == pytest.approx(ten * hidden_state * 31 / 32 + 2 * 2 * one_head * 3 / 4)

    def test_a_ring_sends_keys_and_values_to_all_and_brings_gradients_back_each_with_a_start(self):
        question, text = ask(kernels="te"), "tp=8,cp=4,cp_order=zigzag"
        slow = replace(question, calibration=replace(question.calibration, collective_s=1e-3))
        once, later = (priced(one, text) for one in (question, slow))
        assert once.sent_bytes["cp"] == 3 * (2 + 4) * 8192 // 4 * (KV_HEADS // TP) * HEAD * 2
        assert later.part_s("cp") == once.part_s("cp"), "a host runs ahead of its device"
        waits = replace(question.rates, host_computes=True)
        alone = "tp=1,cp=4,cp_order=zigzag"
        once, later = (priced(one, alone, rates=waits) for one in (question, slow))
        starts_s = 3 * (2 + 4) * (1e-3 - question.calibration.collective_s)
        assert later.part_s("waiting") - once.part_s("waiting") == pytest.approx(starts_s)

    def test_experts_get_the_tokens_that_chose_them(self):
        copies = 4096 * 2 * 4096 * 2  # tokens, choices, hidden, bf16
        for ep in (2, 8):
            even = priced(ask(*SMALL_MIXTRAL, seq_len=4096, expert_imbalance=0.0), f"tp=1,dp=8,ep={ep}")
            assert even.sent_bytes["ep"] == pytest.approx(4 * copies * (ep - 1) / ep), "forth and back in both passes"

    @pytest.mark.parametrize(("ep", "share"), [(1, 0.0), (2, (1 / 7) ** 0.5), (8, 1.0)])
    def test_the_busiest_rank_computes_sends_and_keeps_as_much_more_as_its_experts_get(self, ep: int, share: float):
        even, uneven, half = (
            priced(ask(*SMALL_MIXTRAL, seq_len=4096, expert_imbalance=one), f"tp=1,dp=8,ep={ep}")
            for one in (0.0, 0.5, 0.25)
        )
        if ep > 1:
            assert uneven.sent_bytes["ep"] == pytest.approx((1 + 0.5 * share) * even.sent_bytes["ep"], rel=1e-2)
        more = [
            [one.part_s("compute"), one.memory.saved_bytes, one.memory.working_bytes] for one in (even, half, uneven)
        ]
        for first, second, third in zip(*more, strict=True):
            assert third - first == pytest.approx(2 * (second - first), rel=1e-2, abs=1e-9)
            assert (third > first) == (ep > 1), "a single rank has all tokens, however they are spread"
        dropped = [priced(ask(*SMALL_MIXTRAL, expert_capacity=1.0, expert_imbalance=one), f"tp=1,dp=8,ep={ep}")
                   for one in (0.0, 0.5)]  # fmt: skip
        assert dropped[0].sent_bytes == dropped[1].sent_bytes


def test_some_candidates_of_many_keep_how_busy_their_experts_are():
    sizes = DimSizes({"experts": 4, "slots": np.array([8.0, 16.0])}, 0.5)
    assert priced_in.only(sizes, np.array([1])).slots(4).tolist() == [24.0]


class TestMemory:
    def test_products_that_add_to_the_sums_leave_a_buffer_for_each_shape_of_weights(self):
        question = ask(kernels="te")
        query, key = HIDDEN * HEADS * HEAD, HIDDEN * KV_HEADS * HEAD
        shapes = (query + 2 * key, query, 2 * HIDDEN * FFN, FFN * HIDDEN)
        assert priced(question, "tp=8").memory.placeholder_bytes == 2 * sum(shapes) // TP
        head = priced(question, "tp=8", kind="head")
        assert head.memory.placeholder_bytes == 2 * HIDDEN * (question.model.vocab // TP)
        assert priced(ask(kernels="nxd"), "tp=8").memory.placeholder_bytes == 0
        experts = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336  # all have weights of one shape
        for ep in (1, 8):
            found = priced(ask(*SMALL_MIXTRAL, seq_len=4096), f"tp=1,dp=8,ep={ep}")
            assert found.memory.placeholder_bytes == 2 * experts


class TestRecompute:
    @settings(max_examples=8)
    @given(st.sampled_from(kernels_names()), st.data())
    def test_it_takes_time_and_never_memory_and_brings_back_what_it_dropped(self, kernels, data):
        names = data.draw(st.lists(st.sampled_from(sorted(load_kernels(kernels).selective)), unique=True, min_size=1))
        drops = ("none", f"selective[{','.join(names)}]", "full")
        plain, selective, full = (priced(ask(kernels=kernels), "tp=8", drop=drop) for drop in drops)
        assert full.memory.saved_bytes <= selective.memory.saved_bytes <= plain.memory.saved_bytes
        assert total(plain) <= total(selective) * (1 + 1e-12) and total(selective) <= total(full) * (1 + 1e-12)
        for cost in (plain, selective, full):
            assert cost.memory.saved_bytes + cost.memory.remade_bytes == plain.memory.saved_bytes

    def test_full_is_one_more_forward_where_clones_run_to_the_end(self):
        plain, full = (priced(ask(kernels="te"), "tp=8", drop=drop) for drop in ("none", "full"))
        for part in ("compute", "tp"):
            assert full.part_s(part) - plain.part_s(part) == pytest.approx(plain.seconds["F"][part], rel=1e-9)

    @pytest.mark.parametrize("kernels", ["torch_cuda", "nxd"])
    def test_full_is_less_than_one_more_forward_where_clones_stop_early(self, kernels):
        question = ask(kernels=kernels)
        plain, full = (priced(question, "tp=8", drop=drop) for drop in ("none", "full"))
        assert full.memory.saved_bytes == 8192 // 8 * HIDDEN * 2
        more = sum(full.seconds[name]["compute"] - plain.seconds[name]["compute"] for name in "IW")
        # the last product and the sum after it are not needed again
        last = only(lowered(question, "tp=8"), "F", "down", "mlp_add")
        end = block_price(last, last, setting(question, "tp=8"), question.rates).part_s("compute")
        assert more == pytest.approx(plain.seconds["F"]["compute"] - end, rel=1e-9)
        # what is dropped need not be written, which is no more than a norm's copies here
        assert 0.85 * plain.seconds["F"]["compute"] < full.seconds["F"]["compute"] <= plain.seconds["F"]["compute"]

    def test_scores_that_a_compiler_makes_again_are_neither_written_nor_read(self):
        # NxD's CoreAttention: without recompute, forward writes the softmax in FP32 and bf16, and backward reads both.
        question, text = ask(kernels="nxd_core"), "tp=8"
        here, whole = setting(question, text), lowered(question, text)
        plain, less = (
            sum(
                block_price(only(one, pass_, "attend"), whole, here, rates(memory_bytes_per_s=1.0)).part_s("compute")
                for pass_ in "FI"
            )
            for one in (whole, lowered(question, text, drop="selective[CoreAttention]"))
        )
        scores = 8192**2 * HEADS // TP * (4 + 2)
        # The clone reads queries, keys, values and positions, and gives the result. The copies of keys and values for
        # every query head are written and read once either way: by the clone, where forward does not keep them.
        clone = 2 * 8192 * HEAD * (2 * HEADS + 2 * KV_HEADS) // TP + 2 * 8 * 8192
        assert plain - less == pytest.approx(2 * scores - clone, rel=1e-3)


class TestHiddenTraffic:
    def test_three_tables_hide_traffic_of_tensor_parallelism(self):
        shares = {name: load_kernels(name).hides.get("tp", 0.0) * 7 / 8 for name in kernels_names()}
        hiding = {"mcore": 7 / 8, "torch_async_tp": 0.36, "nanotron": 0.35}
        assert shares == pytest.approx(dict.fromkeys(shares, 0.0) | hiding, rel=0.01)

    @pytest.mark.parametrize("kernels", ["mcore", "torch_async_tp", "te"])
    def test_tensor_parallel_traffic_hides_behind_the_compute_of_its_own_pass_as_the_table_says(self, kernels):
        question, text = ask(kernels=kernels), "tp=8"
        share = load_kernels(kernels).hides.get("tp", 0.0) * 7 / 8  # of 8 pieces the first stays in sight
        here, layer = setting(question, text), lowered(question, text)
        bare = replace(layer, hides_tp=0.0)
        for speed in (question.rates, rates(), replace(question.rates, matrix_flops_per_s=1e15), rates(launch_s=1e-3)):
            found, alone = (block_price(one, one, here, speed).seconds for one in (layer, bare))
            for pass_ in PASSES:
                traffic, covering = alone[pass_]["tp"], alone[pass_]["compute"]
                assert found[pass_]["tp"] == pytest.approx(traffic - min(share * traffic, covering))
                assert found[pass_]["compute"] == alone[pass_]["compute"]

    def test_sums_everywhere_do_not_hide_because_no_product_waits_for_a_piece_of_them(self):
        here, layer = setting(ask(kernels="mcore"), "tp=8,sp=false"), lowered(ask(kernels="mcore"), "tp=8,sp=false")
        sums = tuple(one for one in layer.sharding.messages if one.collective.kind == "all_reduce")
        alone = replace(layer, sharding=replace(layer.sharding, messages=sums))
        slow = rates(memory_bytes_per_s=1e9)
        found, bare = (block_price(one, one, here, slow).part_s("tp") for one in (alone, replace(alone, hides_tp=0.0)))
        assert found == bare > 0


def test_columns_of_layouts_give_what_single_layouts_give():
    question = ask()
    texts = ["tp=8,dp=16,mbs=2", "tp=32,dp=4", "tp=8,cp=4,dp=4,mbs=4"]
    everywhere = setting(question, texts[1]).blocks
    singles = [setting_of(question, candidate_of(question, text), everywhere) for text in texts]
    column = replace(
        singles[0],
        sizes={**singles[0].sizes, "batch": np.array([here.sizes["batch"] for here in singles], dtype=float)},
        atoms={atom: np.array([here.atoms[atom] for here in singles], dtype=float) for atom in singles[0].atoms},
        rings={atoms: ring_column([here.rings[atoms] for here in singles]) for atoms in singles[0].rings},
    )
    sharded = everywhere.block("layer", NO_WORK)
    together = block_price(sharded, sharded, column, question.rates)
    for row, here in enumerate(singles):
        alone = block_price(sharded, sharded, here, question.rates)
        assert np.asarray(total(together))[row] == pytest.approx(total(alone), rel=1e-12)
        assert together.memory.saved_bytes[row] == alone.memory.saved_bytes
        assert together.memory.working_bytes[row] == alone.memory.working_bytes


def test_a_policy_keeps_outputs_alone_and_makes_the_inputs_of_other_products_again():
    ops = "attn_norm,q_rotary,k_rotary,o,attn_add,mlp_norm,up,act,product"  # what torchtitan's policy does not keep
    question = ask("llama3-8b", "h100-80", 1, kernels="torch_cuda", seq_len=1024)
    price = priced(question, "tp=1,dp=8", drop=f"selective[{ops}]").memory
    plain = priced(question, "tp=1,dp=8").memory
    token = 1024 * 2  # bytes of a number of every token, in bf16
    attention = 4096 + 2 * 1024 + 4096  # queries, keys, values and what attention gives
    assert price.saved_bytes == token * (4096 + attention + 14336) + 1024 * 32 * 4  # and x, gate; logs of attention
    assert price.saved_bytes + price.remade_bytes == plain.saved_bytes


TABLES = ("nxd", "te", "torch_cuda", "torch_engine_gpu")
MODELS = ("llama3-8b", "mixtral-8x7b")


def memory_of(block):
    """Under which name each tensor's memory is known: others are handed on, or added into the first of a sum."""
    names = {name: name for name in block.tensors}
    for op in block.ops:
        if isinstance(op.kind, Deliver | Collect):
            target = names[op.inputs[0]]
            for name in (*op.inputs, *op.outputs):
                old = names[name]
                names = {key: target if value == old else value for key, value in names.items()}
    return names


def in_order(sharded):
    """The kernels as autograd runs them: a sum of gradients as soon as its weight gradient is there."""
    sums = {run.ops[0].inputs[1]: run for run in sharded.runs if isinstance(run.ops[0].kind, Accumulate)}
    for run in sharded.runs:
        if run not in sums.values():
            yield run
            yield from (sums[name] for op in run.ops for name in op.outputs if name in sums)


def walked(sharded, here, unmade):
    """Make what each kernel makes, free what nobody reads later, and write down the most that was there at a time."""
    block, names = sharded.block, memory_of(sharded.block)
    sizes_of = rank_sizes(here.sizes, here.atoms)
    kept = saved_bytes(block, sharded.sharding, sizes_of, here.atoms)
    over = {entry.over: entry.storage for entry in block.saved if entry.over}
    over |= {f"{name.removesuffix('.copy0')}.d0": name for name in over.values()}
    runs = list(in_order(sharded))
    where: list[dict[str, Any]] = []
    for run in runs:
        known = [(names.get(tensor.name, tensor.name), op, tensor) for op, tensor, _ in run.fresh]
        where.append({over.get(name, name): (op, tensor) for name, op, tensor in known})
    used = [{*touched, *run.keeps} for run, touched in zip(runs, where, strict=True)]
    reads = Counter(name for names_used in used for name in names_used)
    handed_back = names.get(f"d.{block.carry_out}")
    alive: dict[str, float] = {}
    most, freed, backward = 0.0, 0.0, False
    for run, touched, names_used in zip(runs, where, used, strict=True):
        if run.pass_ != "F" and not backward:
            backward = True
            if handed_back:
                size = next(one[handed_back] for one in where if handed_back in one)
                alive[handed_back] = sizes_of(sharded.sharding.op_cuts[size[0]]).num_bytes(size[1])
        for name, (op, tensor) in touched.items():
            if name not in kept and name not in unmade:
                alive[name] = sizes_of(sharded.sharding.op_cuts[op]).num_bytes(tensor)
        most = max(most, sum(alive.values()) - freed)
        reads.subtract(names_used)
        for name in names_used:
            if not reads[name] and name != handed_back:
                alive.pop(name, None)
                freed += kept.get(name, 0) if backward else 0
    return most


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
def test_the_fullest_moment_is_that_of_a_walk(model, kernels, kind):
    question, text = ask(model, "h100-80", 1, kernels=kernels, seq_len=1024), "tp=1,dp=8"
    unmade = {f"{name}.d1" for names in load_kernels(kernels).placeholders for name in names}
    expected = walked(lowered(question, text, kind), setting(question, text), unmade)
    assert float(priced(question, text, kind=kind).memory.working_bytes) == expected


def test_each_kernel_casts_the_factors_of_its_products_once():
    """Queries, keys and values are one product on GPUs, whose input is cast once; so are up and gate."""
    question, tokens = ask(kernels="torch_engine_gpu"), 8192
    free = replace(question.rates, host_computes=True)
    times = [total(priced(question, "tp=1,dp=128", rates=replace(free, cast_bytes=size))) for size in (0.0, 5.0)]
    weights = HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * HEAD + 3 * FFN)
    inputs, results = 3 * HIDDEN + FFN, HIDDEN + 2 * KV_HEADS * HEAD + HIDDEN + 2 * FFN + HIDDEN
    factors = 2 * tokens * (inputs + results) + 2 * weights  # two of three passes read each of them
    assert times[1] - times[0] == pytest.approx(5.0 * factors / question.rates.memory_bytes_per_s)


@pytest.mark.parametrize(("cluster_name", "kernels", "passes"), [
    ("h100-80", "torch_engine_gpu", "FI"), ("b200", "torch_engine_gpu", ""), ("b200", "te", "FIW"),
])  # fmt: skip
def test_experts_in_fp8_cost_what_runs_on_the_chip(cluster_name, kernels, passes):
    """The torch engine has grouped products in FP8 on Hopper alone, and none for gradients of experts' weights."""
    questions = [
        ask("mixtral-8x7b", cluster_name, 1, kernels=kernels, precision=Precision.named(name))
        for name in ("bf16", "bf16,products=fp8")
    ]
    rates = [replace(one.rates, memory_bytes_per_s=1e30, vector_flops_per_s=1e30, launch_s=0.0) for one in questions]
    here = setting(questions[1], "tp=1,dp=8,ep=8")
    layer = here.blocks.block("layer", Recompute())
    gains = {
        (op.source, run.pass_): kernel_time(kernel, rates[0]) / kernel_time(kernel, rates[1])
        for run, kernel in block_work(layer, layer, here, 1).kernels
        for op in run.ops
        if isinstance(op.kind, Einsum)
    }
    for name, in_fp8 in {"o": "FIW", "gate": passes, "up": passes, "down": passes, "router": ""}.items():
        assert [gains[name, pass_] for pass_ in "FIW"] == pytest.approx(
            [2.0 if pass_ in in_fp8 else 1.0 for pass_ in "FIW"], rel=0.01
        ), name
