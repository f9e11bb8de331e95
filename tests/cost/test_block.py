"""One block: kernels by their roofline, messages by their rings, what is kept."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.block_memory import memory_timeline
from autoshard.cost.collective import Ring
from autoshard.cost.setting import PASSES, setting_of
from autoshard.plan.recompute import Recompute
from autoshard.search.priced_layouts import ring_column
from autoshard.spec.kernels import kernels_names, load_kernels
from tests.cost.cases import ENDLESS, ask, block_price, candidate_of, distinct_models, only, priced, rates, setting

HIDDEN, FFN, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128  # llama3-8b
TP = 8
COMMUNICATION = ("tp", "cp", "ep", "dp")


def part_of(question, text, pass_, *ops, **changes):
    """Seconds of single kernels of a layer, with endless rates but for those given."""
    here = setting(question, text)
    sharded = only(here.blocks.block("layer", Recompute()), pass_, *ops)
    return block_price(sharded, sharded, here, rates(**changes)).part_s("compute")


def moved_bytes(question, text, pass_, *ops):
    return part_of(question, text, pass_, *ops, memory_bytes_per_s=1.0)


def flops(question, text, pass_, *ops):
    return part_of(question, text, pass_, *ops, matrix_flops_per_s=1.0)


def windowed():
    question = ask(kernels="te")
    return replace(question, model=replace(question.model, window=4096))


class TestRoofline:
    text, tokens = "tp=8,dp=16,mbs=2", 2 * 8192

    def test_a_product_takes_its_flops_where_memory_is_endless(self):
        expected = 2 * self.tokens * HIDDEN * (FFN // TP)
        for pass_ in PASSES:
            assert flops(ask(), self.text, pass_, "down") == pytest.approx(expected)
            # one product on NxD, of a tensor that holds both weights
            assert flops(ask(), self.text, pass_, "gate") == pytest.approx(2 * expected)

    def test_a_product_takes_its_traffic_where_flops_are_free(self):
        expected = 2 * (self.tokens * FFN // TP + HIDDEN * FFN // TP + self.tokens * HIDDEN)
        assert moved_bytes(ask(), self.text, "F", "down") == pytest.approx(expected)

    def test_a_sum_of_gradients_reads_the_gradient_and_the_sum_and_writes_the_sum(self):
        weights = HIDDEN * FFN // TP
        product = 2 * (self.tokens * HIDDEN + self.tokens * FFN // TP) + 2 * weights
        assert moved_bytes(ask(), self.text, "W", "down") == pytest.approx(product + (2 + 4 + 4) * weights)

    def test_an_activation_runs_on_the_vector_unit(self):
        elements = self.tokens * FFN // TP
        seconds = part_of(ask(), self.text, "F", "act", vector_flops_per_s=1.0)
        assert seconds == pytest.approx(elements)
        assert flops(ask(), self.text, "F", "act") == pytest.approx(0)


class TestKernels:
    def test_a_fused_kernel_moves_less_than_its_parts(self):
        # te runs activation and product as one kernel: the activation's result never reaches memory
        fused = moved_bytes(ask(kernels="te"), "tp=8", "F", "act")
        alone = moved_bytes(ask(kernels="nxd"), "tp=8", "F", "act", "product")
        inner = 2 * 8192 * FFN // TP
        assert (fused, alone) == (pytest.approx(3 * inner), pytest.approx(5 * inner))

    def test_a_fused_loss_moves_the_logits_and_what_it_keeps_only(self):
        for kernels, kept in (("te", 2), ("nxd", 4)):
            question = ask(kernels=kernels)
            here = setting(question, "tp=8")
            vocab = question.model.vocab // TP
            for pass_ in ("F", "I"):  # forward reads logits and writes a copy; backward reads it, writes a gradient
                loss = only(setting(question, "tp=8").blocks.block("head", Recompute()), pass_, "logits_fp32", "loss")
                moved = block_price(loss, loss, here, rates(memory_bytes_per_s=1.0)).part_s("compute")
                assert moved == pytest.approx(8192 * vocab * (2 + kept), rel=1e-3)

    def test_a_window_hides_pairs_too(self):
        visible = 4096 * 4097 // 2 + 4096 * 4096  # pairs of the first half of the queries, and of the others
        assert flops(windowed(), "tp=8", "F", "attend") == pytest.approx(4 * visible * (HEADS // TP) * HEAD)


class TestOrderOfTheSequence:
    @pytest.mark.parametrize("question", [ask(kernels="te"), windowed()], ids=["whole", "windowed"])
    @pytest.mark.parametrize("cp", [1, 2, 4])
    def test_in_contiguous_order_the_last_rank_has_the_most_to_do(self, question, cp):
        window, piece = question.model.window or 8192, 8192 // cp
        seen = [sum(min(query + 1, window) for query in range(rank * piece, (rank + 1) * piece)) for rank in range(cp)]
        slowest = flops(question, f"tp=8,cp={cp}", "F", "attend")
        assert slowest == pytest.approx(4 * max(seen) * (HEADS // TP) * HEAD)


@pytest.mark.parametrize("name", distinct_models())
@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
def test_with_every_atom_of_size_1_no_message_costs_anything(name, kind):
    question = ask(name, "h100-80", 1, kernels="te", seq_len=1024)
    here = setting(question, "tp=1,dp=8")
    alone = replace(
        here,
        atoms=dict.fromkeys(here.atoms, 1),
        rings={atoms: replace(ring, size=1, latency_s=0.0, bandwidth_bytes_per_s=ENDLESS)
               for atoms, ring in here.rings.items()},
    )  # fmt: skip
    for sp in (False, True):
        many = setting(question, "tp=2,dp=4,sp=" + str(sp).lower())
        sharded = many.blocks.block(kind, Recompute())
        lonely = {atoms: Ring(size=1, bandwidth_bytes_per_s=1e9, latency_s=0.0) for atoms in many.rings}
        cost = block_price(sharded, sharded, replace(alone, rings=lonely), question.rates)
        assert sum(cost.part_s(part) for part in COMMUNICATION) == 0
        assert sum(cost.sent_bytes.values()) == 0


def test_replicas_of_keys_and_values_cost_nothing_where_there_are_none():
    none, some = priced(ask(), "tp=8,dp=16"), priced(ask(), "tp=32,dp=4")
    hidden_state = 8192 * HIDDEN * 2
    ten = 4 + 4 + 2  # gathers and scatters of the hidden state; see the layout's tests
    assert none.sent_bytes["tp"] == pytest.approx(ten * hidden_state * 7 / 8)
    one_head = 8192 * HEAD * 2
    assert some.sent_bytes["tp"] == pytest.approx(ten * hidden_state * 31 / 32 + 2 * 2 * one_head * 3 / 4)


def test_a_ring_of_attention_sends_keys_and_values_to_all_and_brings_gradients_back():
    cost = priced(ask(kernels="te"), "tp=8,cp=4,cp_order=zigzag")
    piece = 8192 // 4 * (KV_HEADS // TP) * HEAD * 2
    assert cost.sent_bytes["cp"] == 3 * (2 + 4) * piece


def test_each_of_them_is_a_send_of_its_own():
    question = ask(kernels="te")
    slow = replace(question, calibration=replace(question.calibration, collective_s=1e-3))
    once, later = (priced(one, "tp=8,cp=4,cp_order=zigzag").part_s("cp") for one in (question, slow))
    assert later - once == pytest.approx(3 * (2 + 4) * 1e-3)


def test_experts_get_the_tokens_that_chose_them():
    question = ask("mixtral-8x7b", "h100-80", 1, kernels="te", seq_len=4096)
    cost = priced(question, "tp=1,dp=8,ep=8")
    copies = 4096 * 2 * 4096 * 2  # tokens, choices, hidden, bf16
    assert cost.sent_bytes["ep"] == pytest.approx(4 * copies * 7 / 8)


class TestMemory:
    def test_a_kernel_needs_room_for_what_is_neither_kept_nor_a_state(self):
        # The output head on te, while the weights' gradient is made: the input as gathered again, and the input's
        # gradient before it is scattered. The logits became their gradient, and the weights' is added to its sum.
        cost = priced(ask(kernels="te"), "tp=8", kind="head")
        assert cost.memory.working_bytes == 2 * (2 * 8192 * HIDDEN)

    @pytest.mark.parametrize("tp", [1, 2])
    def test_the_backward_of_the_activation_is_the_fullest_moment_of_a_layer(self, tp):
        # On te: the gradient that came in, that of the second product's input, and those of both of its halves; the
        # second product's input is free by then.
        cost = priced(ask(kernels="te"), f"tp={tp},dp={128 // tp}")
        piece, inner = 2 * 8192 // tp * HIDDEN, 2 * 8192 * FFN // tp
        ids = 2 * 8 * 8192  # positions of queries and keys
        assert cost.memory.working_bytes == piece + inner + 2 * inner - inner + ids

    def test_products_that_add_to_the_sums_leave_a_buffer_for_each_shape_of_weights(self):
        question = ask(kernels="te")
        query, key = HIDDEN * HEADS * HEAD, HIDDEN * KV_HEADS * HEAD
        shapes = (query + 2 * key, query, 2 * HIDDEN * FFN, FFN * HIDDEN)
        assert priced(question, "tp=8").memory.placeholder_bytes == 2 * sum(shapes) // TP
        vocab = question.model.vocab // TP
        assert priced(question, "tp=8", kind="head").memory.placeholder_bytes == 2 * HIDDEN * vocab
        assert priced(ask(kernels="nxd"), "tp=8").memory.placeholder_bytes == 0

    def test_all_experts_have_weights_of_one_shape(self):
        question = ask("mixtral-8x7b", "h100-80", 1, kernels="te", seq_len=4096)
        attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
        one = 3 * 4096 * 14336
        for ep in (1, 8):
            assert priced(question, f"tp=1,dp=8,ep={ep}").memory.placeholder_bytes == 2 * (attention + one)

    def test_what_is_kept_anyway_needs_no_room_again(self):
        # Forward attention finds queries kept, and makes what is kept: beside are positions, and those keys and values
        # that a ring of cp brings; there is none here.
        layer = setting(ask(kernels="te"), "tp=8").blocks.block("layer", Recompute())
        attend = only(layer, "F", "attend")
        kept = frozenset(layer.sharding.kept_cuts)
        (moment,) = memory_timeline(layer.block, attend.runs, layer.sharding, kept, frozenset())
        beside = [tensor.name for _, tensor, _ in moment.takes]
        assert (beside, moment.frees) == (["k_in", "v_in", "positions", "key_positions"], frozenset())
        here = setting(ask(kernels="te"), "tp=8")
        alone = block_price(replace(layer, moments=(moment,)), layer, here, ask(kernels="te").rates)
        assert alone.memory.working_bytes == 2 * 8192 * 8

    def test_recompute_brings_back_while_a_layer_is_in_backward_what_it_dropped(self):
        plain, full = priced(ask(), "tp=8"), priced(ask(), "tp=8", drop="full")
        assert full.memory.saved_bytes + full.memory.remade_bytes == plain.memory.saved_bytes
        assert (plain.memory.remade_bytes, full.memory.saved_bytes) == (0, 8192 // 8 * HIDDEN * 2)

    @given(st.sampled_from([1, 2, 4, 8, 16, 32]))
    def test_more_tp_never_gives_a_rank_more_weights_or_activations(self, tp):
        wide, narrow = priced(ask(), f"tp={tp}"), priced(ask(), f"tp={min(32, 2 * tp)}")
        assert sum(narrow.memory.weights.values()) <= sum(wide.memory.weights.values())
        assert narrow.memory.saved_bytes <= wide.memory.saved_bytes

    def test_only_tied_weights_are_counted_apart(self):
        tied, own = ask("gpt2-xl", "h100-80", 1, seq_len=1024, kernels="te"), ask(kernels="te")
        head = priced(tied, "tp=1", kind="head")
        assert list(head.memory.tied_weights.values()) == [tied.model.vocab * tied.model.hidden]
        assert list(head.memory.weights.values()) == [2 * tied.model.hidden]
        assert not priced(own, "tp=1", kind="head").memory.tied_weights
        assert not priced(tied, "tp=1", kind="embed").memory.tied_weights


class TestRecompute:
    @settings(max_examples=12)
    @given(st.sampled_from(kernels_names()), st.data())
    def test_it_takes_time_and_never_memory(self, kernels, data):
        names = sorted(load_kernels(kernels).selective)
        chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
        question = ask(kernels=kernels)
        plain = priced(question, "tp=8")
        selective = priced(question, "tp=8", drop=f"selective[{','.join(chosen)}]")
        full = priced(question, "tp=8", drop="full")
        assert full.memory.saved_bytes <= selective.memory.saved_bytes <= plain.memory.saved_bytes
        assert total(plain) <= total(selective) * (1 + 1e-12)
        assert total(selective) <= total(full) * (1 + 1e-12)

    def test_full_is_one_more_forward_where_clones_run_to_the_end(self):
        question = ask(kernels="te")
        plain, full = priced(question, "tp=8"), priced(question, "tp=8", drop="full")
        for part in ("compute", "tp"):
            more = full.part_s(part) - plain.part_s(part)
            assert more == pytest.approx(plain.seconds["F"][part], rel=1e-9)

    @pytest.mark.parametrize("kernels", ["torch_cuda", "nxd"])
    def test_full_is_less_than_one_more_forward_where_clones_stop_early(self, kernels):
        question = ask(kernels=kernels)
        plain, full = priced(question, "tp=8"), priced(question, "tp=8", drop="full")
        more = sum(full.seconds[name]["compute"] - plain.seconds[name]["compute"] for name in "IW")
        # the last product and the sum after it are not needed again
        last = only(setting(question, "tp=8").blocks.block("layer", Recompute()), "F", "down", "mlp_add")
        end = block_price(last, last, setting(question, "tp=8"), question.rates).part_s("compute")
        assert more == pytest.approx(plain.seconds["F"]["compute"] - end, rel=1e-9)
        # what is dropped need not be written, which is no more than a norm's copies here
        assert 0.85 * plain.seconds["F"]["compute"] < full.seconds["F"]["compute"] <= plain.seconds["F"]["compute"]

    def test_scores_that_a_compiler_makes_again_are_neither_written_nor_read(self):
        # NxD's CoreAttention: without recompute, forward writes the softmax in FP32 and bf16, and backward reads both.
        question, text = ask(kernels="nxd_core"), "tp=8"
        here = setting(question, text)
        whole = here.blocks.block("layer", Recompute())
        again = here.blocks.block("layer", Recompute.parse("selective[CoreAttention]"))
        plain, less = (
            sum(
                block_price(only(sharded, pass_, "attend"), whole, here, rates(memory_bytes_per_s=1.0)).part_s(
                    "compute"
                )
                for pass_ in "FI"
            )
            for sharded in (whole, again)
        )
        scores = 8192**2 * HEADS // TP * (4 + 2)
        # The clone reads queries, keys, values and positions, and gives the result. The copies of keys and values for
        # every query head are written and read once either way: by the clone, where forward does not keep them.
        clone = 2 * 8192 * HEAD * (2 * HEADS + 2 * KV_HEADS) // TP + 2 * 8 * 8192
        assert plain - less == pytest.approx(2 * scores - clone, rel=1e-3)


class TestExposed:
    @pytest.mark.parametrize("kernels", kernels_names())
    def test_tensor_parallel_traffic_hides_behind_the_compute_of_its_own_pass_as_the_table_says(self, kernels):
        question, text = ask(kernels=kernels), "tp=8"
        share = load_kernels(kernels).hides.get("tp", 0.0) * 7 / 8  # of 8 pieces the first stays in sight
        assert share == pytest.approx({"mcore": 7 / 8, "torch_async_tp": 0.36}.get(kernels, 0.0), rel=0.01)
        here, layer = setting(question, text), setting(question, text).blocks.block("layer", Recompute())
        bare = replace(layer, hides_tp=0.0)
        for speed in (question.rates, rates(), replace(question.rates, matrix_flops_per_s=1e15)):
            found, alone = (block_price(one, one, here, speed).seconds for one in (layer, bare))
            for pass_ in PASSES:
                traffic, covering = alone[pass_]["tp"], alone[pass_]["compute"] + alone[pass_]["waiting"]
                assert found[pass_]["tp"] == pytest.approx(traffic - min(share * traffic, covering))
                assert found[pass_]["compute"] == alone[pass_]["compute"]

    def test_kernels_that_wait_for_hosts_hide_as_much_as_kernels_that_work_as_long(self):
        layer = setting(ask(kernels="mcore"), "tp=8").blocks.block("layer", Recompute())
        here = setting(ask(kernels="mcore"), "tp=8")
        slow, waits = (
            block_price(layer, layer, here, rates(memory_bytes_per_s=speed, launch_s=launch_s))
            for speed, launch_s in ((1e11, 0.0), (1e30, 1e-3))
        )
        assert waits.part_s("waiting") > waits.part_s("tp") >= 0
        assert slow.part_s("compute") > 0
        for cost in (slow, waits):
            for parts in cost.seconds.values():
                assert parts["tp"] >= 0
        whole = block_price(replace(layer, hides_tp=0.0), layer, here, rates()).part_s("tp")
        assert waits.part_s("tp") == pytest.approx((1 - 7 / 8) * whole)

    def test_sums_everywhere_do_not_hide_because_no_product_waits_for_a_piece_of_them(self):
        here = setting(ask(kernels="mcore"), "tp=8,sp=false")
        layer = here.blocks.block("layer", Recompute())
        sums = tuple(one for one in layer.sharding.messages if one.collective.kind == "all_reduce")
        alone = replace(layer, sharding=replace(layer.sharding, messages=sums))
        slow = rates(memory_bytes_per_s=1e9)
        found, bare = (block_price(one, one, here, slow).part_s("tp") for one in (alone, replace(alone, hides_tp=0.0)))
        assert found == bare > 0


def total(cost):
    return sum(cost.part_s(part) for part in ("compute", "waiting", *COMMUNICATION))


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
    sharded = everywhere.block("layer", Recompute())
    together = block_price(sharded, sharded, column, question.rates)
    for row, here in enumerate(singles):
        alone = block_price(sharded, sharded, here, question.rates)
        assert np.asarray(total(together))[row] == pytest.approx(total(alone), rel=1e-12)
        assert together.memory.saved_bytes[row] == alone.memory.saved_bytes
        assert together.memory.working_bytes[row] == alone.memory.working_bytes
