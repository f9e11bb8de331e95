"""How long kernels take: rooflines, full tiles, masked pairs, launches, formats of products; each counted by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.compute import KernelWork, Rates, kernel_time, waiting_time
from autoshard.cost.setting import PASSES
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, flops, moved_bytes, priced, rates, seconds_of

FFN, HEAD, HEADS, HIDDEN, KV_HEADS = 14336, 128, 32, 4096, 8  # of llama3-8b
AMOUNT, RATE = st.floats(0, 1e15), st.floats(1e3, 1e15)
works = st.builds(
    KernelWork,
    matrix_flops=AMOUNT, products_flops=AMOUNT, attention_flops=AMOUNT, vector_flops=AMOUNT, moved_bytes=AMOUNT,
    launches=st.integers(0, 20), in_turn=st.booleans(), factors=AMOUNT, of_experts=st.sampled_from(["", *"FIW"]),
)  # fmt: skip
rates_of_all = st.builds(
    Rates,
    matrix_flops_per_s=RATE, vector_flops_per_s=RATE, memory_bytes_per_s=RATE, products_ratio=st.floats(0.5, 4),
    attention_ratio=st.floats(0.1, 2), launch_s=st.floats(0, 1e-3), host_computes=st.booleans(),
    cast_bytes=st.integers(0, 33), expert_passes=st.sampled_from(["", "FI", "FIW"]),
)  # fmt: skip


@given(works, rates_of_all)
def test_a_kernel_takes_as_long_as_the_slowest_unit_after_its_factors_were_cast(kernel, speed):
    in_fp8 = not kernel.of_experts or kernel.of_experts in speed.expert_passes
    products = [
        kernel.matrix_flops / speed.matrix_flops_per_s,
        kernel.products_flops / ((speed.products_ratio if in_fp8 else 1) * speed.matrix_flops_per_s),
        kernel.attention_flops / (speed.attention_ratio * speed.matrix_flops_per_s),
    ]
    others = [kernel.vector_flops / speed.vector_flops_per_s, kernel.moved_bytes / speed.memory_bytes_per_s]
    busy = sum(products) + max(others) if kernel.in_turn else max(sum(products), *others)
    casts = in_fp8 * speed.cast_bytes * kernel.factors / speed.memory_bytes_per_s
    assert kernel_time(kernel, speed) == pytest.approx(casts + busy)


@given(st.floats(0, 10), st.floats(0, 1), st.integers(1, 1000), rates_of_all)
def test_launches_run_ahead_of_a_device_and_never_shorten_what_it_does(busy_s, more_s, launches, speed):
    started_s = launches * speed.launch_s
    found, later = (one + waiting_time(one, started_s, speed) for one in (busy_s, busy_s + more_s))
    assert found <= later + 1e-12, "who has more to do is done no sooner"
    if speed.host_computes:
        assert found == pytest.approx(busy_s + started_s)
    else:
        assert max(busy_s, started_s) * (1 - 1e-12) <= found <= busy_s + started_s + 1e-12
        assert waiting_time(0.0, started_s, speed) == pytest.approx(started_s)


class TestRates:
    def test_every_efficiency_acts_on_its_own_unit(self):
        precision = replace(Precision.named("bf16"), products="fp8")
        question = ask(cluster_name="trn2.48xlarge", precision=precision)
        shares = {"matrix_efficiency": 0.9, "attention_efficiency": 0.3, "vector_efficiency": 0.5,
                  "memory_efficiency": 0.6, "launch_s": 1e-6}  # fmt: skip
        found = replace(question, calibration=replace(question.calibration, **shares)).rates
        # a quarter of a chip: 667 TFLOP/s in bf16, 1299 in fp8, 2.21 elementwise, 2.9 TB/s; 128 x 128 tiles
        assert found.matrix_flops_per_s == pytest.approx(0.9 * 667e12 / 4)
        assert found.products_ratio == pytest.approx(1299 / 667)
        assert found.attention_ratio * found.matrix_flops_per_s == pytest.approx(0.3 * 667e12 / 4)
        assert found.vector_flops_per_s == pytest.approx(0.5 * 2.21e12 / 4)
        assert found.memory_bytes_per_s == pytest.approx(0.6 * 2.9e12 / 4)
        assert (found.matrix_tile, found.launch_s, found.host_computes) == (128, 1e-6, False)


class TestRoofline:
    text, tokens = "tp=8,dp=16,mbs=2", 2 * 8192
    weights = HIDDEN * FFN // 8

    def test_a_product_takes_its_flops_or_its_traffic(self):
        expected = 2 * self.tokens * self.weights
        for pass_ in PASSES:
            assert flops(ask(), self.text, pass_, "down") == pytest.approx(expected)
            # one product on NxD, of a tensor that holds both weights
            assert flops(ask(), self.text, pass_, "gate") == pytest.approx(2 * expected)
        traffic = 2 * (self.tokens * FFN // 8 + self.weights + self.tokens * HIDDEN)
        assert moved_bytes(ask(), self.text, "F", "down") == pytest.approx(traffic)
        # a sum of gradients reads the gradient and the sum and writes the sum
        assert moved_bytes(ask(), self.text, "W", "down") == pytest.approx(traffic + (2 + 4 + 4) * self.weights)

    def test_a_fused_kernel_moves_less_than_its_parts(self):
        # te runs activation and product as one kernel: the activation's result never reaches memory
        inner = 2 * 8192 * FFN // 8
        assert moved_bytes(ask(kernels="te"), "tp=8", "F", "act") == pytest.approx(3 * inner)
        assert moved_bytes(ask(kernels="nxd"), "tp=8", "F", "act", "product") == pytest.approx(5 * inner)

    @pytest.mark.parametrize(("kernels", "kept"), [("te", 2), ("nxd", 4)])
    def test_a_fused_loss_moves_the_logits_and_what_it_keeps_only(self, kernels, kept):
        for pass_ in "FI":  # forward reads logits and writes a copy; backward reads it, writes a gradient
            moved = moved_bytes(ask(kernels=kernels), "tp=8", pass_, "logits_fp32", "loss", kind="head")
            assert moved == pytest.approx(8192 * 128256 // 8 * (2 + kept), rel=1e-3)


class TestTiles:
    """A systolic array holds 128 x 128 of one factor, summed dims along one side, and streams the other through it."""

    @pytest.mark.slow
    @settings(max_examples=6)
    @given(st.sampled_from([1, 8, 32]), st.integers(1, 40), st.sampled_from(["gate", "down", "o"]))
    def test_as_many_tiles_are_held_as_cover_a_factor_and_the_other_is_streamed(self, tp, pieces, op):
        seq = 32 * pieces
        local_ffn, heads = FFN // tp, HEADS * HEAD // tp
        sides = {"gate": (HIDDEN, local_ffn), "down": (local_ffn, HIDDEN), "o": (heads, HIDDEN)}
        question, text = ask(seq_len=seq), f"tp={tp},dp={128 // tp}"
        summed, out = sides[op]
        count = 2 if op == "gate" else 1  # gate and up are one kernel
        for pass_, (inner, rows, columns) in {
            "F": (summed, seq, out), "I": (out, seq, summed), "W": (seq, summed, out),
        }.items():  # fmt: skip

            def cycles(held, streamed, inner=inner):
                return len(range(0, inner, 128)) * len(range(0, held, 128)) * streamed

            expected = count * 2 * 128 * 128 * min(cycles(rows, columns), cycles(columns, rows))
            assert flops(question, text, pass_, op, matrix_tile=128) == pytest.approx(expected), pass_


class TestMasks:
    @pytest.mark.parametrize("window", [None, 4096])
    @pytest.mark.parametrize("cp", [1, 4])
    def test_in_contiguous_order_the_last_rank_has_the_most_to_do(self, window, cp):
        question, piece = ask(kernels="te"), 8192 // cp
        question = replace(question, model=replace(question.model, window=window))
        seen = [
            sum(min(query + 1, window or 8192) for query in range(rank * piece, (rank + 1) * piece))
            for rank in range(cp)
        ]
        slowest = flops(question, f"tp=8,cp={cp}", "F", "attend")
        assert slowest == pytest.approx(4 * max(seen) * (HEADS // 8) * HEAD)

    @pytest.mark.parametrize(("seq", "cp"), [(8192, 1), (8192, 4), (2048, 1)])
    def test_nxd_skips_tiles_of_2048_and_the_last_of_contiguous_stretches_has_the_most(self, seq, cp):
        def met(rank):
            """Count the (query, key) pairs of whole tiles that hold any that is seen, one query tile at a time."""
            starts = range(rank * (seq // cp), (rank + 1) * (seq // cp), 2048)
            return sum(min(seq, -(-(start + 2048) // 2048) * 2048) * 2048 for start in starts)

        found = flops(ask(seq_len=seq), f"tp=32,cp={cp},dp={4 // cp}", "F", "attend")
        assert found == pytest.approx(4 * max(map(met, range(cp))) * HEAD)

    @pytest.mark.parametrize("cp", [1, 2, 8])
    def test_zigzag_gives_every_rank_as_much_as_any_other(self, cp):
        text = f"tp=8,cp={cp},dp={16 // cp}" + (",cp_order=zigzag" if cp > 1 else "")
        found = flops(ask(kernels="te"), text, "F", "attend")
        assert found == pytest.approx(4 * 8192 * 8193 / 2 / cp * HEADS // 8 * HEAD)


class TestUnfusedAttention:
    """Megatron-LM of 2021 writes scores: products and passes over memory one after the other, over all pairs."""

    question, text = ask(kernels="megatron", seq_len=2048), "tp=8"
    pairs, tokens = 2048**2 * HEADS // 8, 2048 * HEAD // 8

    def test_its_products_skip_nothing_and_backward_makes_none_again(self):
        for pass_, products in (("F", 2), ("I", 4)):
            found = flops(self.question, self.text, pass_, "attend")
            assert found == pytest.approx(2 * products * self.pairs * HEAD)

    def test_it_moves_what_it_keeps_of_the_scores_and_what_it_passes_on(self):
        gradients = 2 * self.tokens * (HEADS + 2 * KV_HEADS)  # of queries, keys, values
        inputs, result = gradients + 2 * 8 * 2048, 2 * self.tokens * HEADS  # with positions
        forward = inputs + result + (2 + 1 + 2) * self.pairs + 8 * self.pairs
        found = moved_bytes(self.question, self.text, "F", "attend")
        assert found == pytest.approx(forward, rel=1e-3)  # but for the log of the denominator, which nobody keeps
        backward = inputs + 2 * result + gradients + (2 + 1 + 2) * self.pairs + 14 * self.pairs
        assert moved_bytes(self.question, self.text, "I", "attend") == pytest.approx(backward, rel=1e-2)

    def test_it_takes_both_in_turn_where_fused_attention_takes_the_longer(self):
        for kernels, both in (("megatron", sum), ("te", max)):
            question, matrix, memory = ask(kernels=kernels, seq_len=2048), 1e12, 1e10
            alone = (flops(question, self.text, "F", "attend") / matrix,
                     moved_bytes(question, self.text, "F", "attend") / memory)  # fmt: skip
            found = seconds_of(question, self.text, "F", "attend", matrix_flops_per_s=matrix, memory_bytes_per_s=memory)
            assert found == pytest.approx(both(alone))


@pytest.mark.parametrize(
    ("kind", "op", "numbers", "both"),
    [
        # Forward: cast 2 + 4, square 4 + 4, mean 4, product 4 + 4, cast 4 + 2, product 2 + 2. Backward: product
        # with the weight 2 + 2, 2 + 2 + 2 and its sum 2, cast 2 + 4, product with the statistic 4 + 4, 4 + 4 + 4
        # and its sum 4, square 4 + 4 twice, sum 4 + 4 + 4, cast 4 + 2.
        ("layer", "attn_norm", 8192 // 8 * HIDDEN, 36 + 76),
        # casts 2 + 4 and 4 + 2, a product 4 + 4 between them, each way
        ("layer", "q_rotary", 8192 * HEADS // 8 * HEAD, 20 + 20),
        # Forward: cast 2 + 4, log-softmax 4 + 4, loss 4; backward: of log-softmax 4 + 4, of the loss 4, cast 4 + 2.
        ("head", "loss", 8192 * 128256 // 8, 18 + 18),
    ],
)
def test_single_operations_of_plain_pytorch_move_as_often_what_one_kernel_would(kind, op, numbers, both):
    moved = sum(moved_bytes(ask(kernels="torch_cuda"), "tp=8", pass_, op, kind=kind) for pass_ in "FI")
    if op == "attn_norm":  # the sum of its weights' gradients is no part of this
        moved -= (2 + 4 + 4) * HIDDEN
    assert moved == pytest.approx(both * numbers, rel=1e-2)


@pytest.mark.parametrize(
    ("kernels", "forward", "inputs", "weights"),
    [
        # Two norms, qkv, two rotations, attention, o, two sums, gate and up, activation, down. Backward: the sums
        # have none, but the weights of norms add to their sums; products add theirs themselves.
        ("te", 12, 10 + 2, 4),
        # No fused products or activation; norms of 7 and 12 single operations, rotations of 4; gradients of weights
        # are made and then added.
        ("torch_cuda", 2 * 7 + 2 * 4 + 1 + 7 + 2 + 2, 2 * 12 + 2 * 4 + 1 + 7 + 2 + 2, 2 * 7),
        # One kernel for both rotations, for activation and product, and for each norm.
        ("torch_compiled", 2 + 1 + 1 + 7 + 1 + 2, 2 + 1 + 1 + 7 + 1 + 2, 2 * 7),
        ("nxd", 0, 0, 0),
    ],
)
def test_a_device_waits_for_a_host_to_start_each_kernel_of_a_layer(kernels, forward, inputs, weights):
    cost = priced(ask(kernels=kernels), "tp=8", rates=rates(launch_s=1.0))
    waiting = [float(cost.seconds[name]["waiting"]) for name in "FIW"]
    assert waiting == pytest.approx([forward, inputs, weights], abs=0.01), "hardly less than if it did nothing else"


@pytest.mark.parametrize("pass_", PASSES)
def test_float8_changes_the_products_of_a_layer_s_activations_with_its_weights_and_nothing_else(pass_):
    def speedup(op, kind="layer"):
        question = ask(cluster_name="h100-80", nodes=1, kernels="torch_cuda")
        slow, quick = (flops(question, "tp=8", pass_, op, kind=kind, products_ratio=ratio) for ratio in (1.0, 2.0))
        return slow / quick

    assert [speedup("q"), speedup("down"), speedup("unembed", "head")] == pytest.approx([2, 2, 1])
    assert pass_ == "W" or speedup("attend") == pytest.approx(1)
