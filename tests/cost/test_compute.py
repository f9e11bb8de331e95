"""How long kernels take: rooflines, full tiles, masked pairs, launches, formats of products; each counted by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.compute import KernelWork, Rates, kernel_time
from autoshard.plan.recompute import Recompute
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, block_price, only, priced, rates, setting

HIDDEN, FFN, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128  # llama3-8b
AMOUNT = st.floats(0, 1e15)
RATE = st.floats(1e3, 1e15)

works = st.builds(
    KernelWork,
    matrix_flops=AMOUNT, products_flops=AMOUNT, attention_flops=AMOUNT, vector_flops=AMOUNT, moved_bytes=AMOUNT,
    launches=st.integers(0, 20), in_turn=st.booleans(),
)  # fmt: skip
rates_of_all = st.builds(
    Rates,
    matrix_flops_per_s=RATE, vector_flops_per_s=RATE, memory_bytes_per_s=RATE, products_ratio=st.floats(0.5, 4),
    attention_ratio=st.floats(0.1, 2), launch_s=st.floats(0, 1e-3), host_computes=st.booleans(),
)  # fmt: skip


def work(**changes):
    """A kernel that does nothing but what is given."""
    names = ("matrix_flops", "products_flops", "attention_flops", "vector_flops", "moved_bytes")
    return KernelWork(**{**dict.fromkeys(names, 0.0), "launches": 0, "in_turn": False, **changes})


def seconds_of(question, text, pass_, *ops, kind="layer", **changes):
    """Seconds of single kernels, with endless rates but for those given."""
    here = setting(question, text)
    sharded = only(here.blocks.block(kind, Recompute()), pass_, *ops)
    return float(block_price(sharded, sharded, here, rates(**changes)).part_s("compute"))


class TestKernelTime:
    @given(works, rates_of_all)
    def test_is_that_of_the_slowest_unit_and_no_less_than_its_launches(self, kernel, speed):
        products = [
            kernel.matrix_flops / speed.matrix_flops_per_s,
            kernel.products_flops / (speed.products_ratio * speed.matrix_flops_per_s),
            kernel.attention_flops / (speed.attention_ratio * speed.matrix_flops_per_s),
        ]
        others = [kernel.vector_flops / speed.vector_flops_per_s, kernel.moved_bytes / speed.memory_bytes_per_s]
        busy = sum(products) + max(others) if kernel.in_turn else max(sum(products), *others)
        work_s, waiting_s = kernel_time(kernel, speed)
        assert work_s == pytest.approx(busy)
        started = kernel.launches * speed.launch_s
        assert work_s + waiting_s == pytest.approx(busy + started if speed.host_computes else max(busy, started))
        assert waiting_s >= 0

    def test_a_processor_starts_kernels_when_it_does_not_compute(self):
        assert ask("tiny-llama", "local", 1).rates.host_computes and not ask(cluster_name="h100-80").rates.host_computes
        speed = Rates(
            matrix_flops_per_s=10.0, vector_flops_per_s=5.0, memory_bytes_per_s=2.0, launch_s=2.5, host_computes=True
        )
        assert kernel_time(work(matrix_flops=60.0, launches=2), speed) == (6.0, 5.0)


class TestRates:
    def test_every_efficiency_acts_on_its_own_unit(self):
        question = ask(cluster_name="trn2.48xlarge")
        shares = {"matrix_efficiency": 0.9, "attention_efficiency": 0.3, "vector_efficiency": 0.5,
                  "memory_efficiency": 0.6, "launch_s": 1e-6}  # fmt: skip
        precision = replace(Precision.named("bf16"), products="fp8")
        found = Rates.of(question.cluster, precision, replace(question.calibration, **shares))
        # a quarter of a chip: 667 TFLOP/s in bf16, 1299 in fp8, 2.21 elementwise, 2.9 TB/s; 128 x 128 tiles
        assert found.matrix_flops_per_s == pytest.approx(0.9 * 667e12 / 4)
        assert found.products_ratio == pytest.approx(1299 / 667)
        assert found.attention_ratio * found.matrix_flops_per_s == pytest.approx(0.3 * 667e12 / 4)
        assert found.vector_flops_per_s == pytest.approx(0.5 * 2.21e12 / 4)
        assert found.memory_bytes_per_s == pytest.approx(0.6 * 2.9e12 / 4)
        assert (found.matrix_tile, found.launch_s) == (128, 1e-6)

    @pytest.mark.parametrize(("name", "tflops"), [("bf16", 989.5), ("fp16", 989.5)])
    def test_without_a_format_of_their_own_products_run_in_that_of_activations(self, name, tflops):
        question = ask(cluster_name="h100-80", nodes=1)
        found = Rates.of(question.cluster, Precision.named(name), question.calibration)
        assert (found.products_ratio, found.matrix_tile) == (1.0, 1)
        assert found.matrix_flops_per_s == pytest.approx(0.7 * tflops * 1e12)


class TestTiles:
    """A systolic array holds 128 x 128 of one factor, summed dims along one side, and streams the other through it."""

    @settings(max_examples=8)
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
            found = seconds_of(question, text, pass_, op, matrix_flops_per_s=1.0, matrix_tile=128)
            assert found == pytest.approx(expected), pass_

    def test_attention_is_not_padded(self):
        for tile in (1, 128):
            found = seconds_of(ask(kernels="te"), "tp=8", "F", "attend", matrix_flops_per_s=1.0, matrix_tile=tile)
            assert found == pytest.approx(4 * 8192 * 8193 / 2 * HEADS // 8 * HEAD)


def met(queries, keys_until, tile):
    """Count the (query, key) pairs of whole tiles that hold any that is seen, one query tile after the other."""
    return sum(min(keys_until, -(-(start + tile) // tile) * tile) * tile for start in queries)


class TestMasks:
    @pytest.mark.parametrize(("seq", "cp"), [(8192, 1), (8192, 4), (2048, 1)])
    def test_nxd_skips_tiles_of_2048_and_the_last_of_contiguous_stretches_has_the_most(self, seq, cp):
        piece = seq // cp
        slowest = max(met(range(rank * piece, (rank + 1) * piece, 2048), seq, 2048) for rank in range(cp))
        found = seconds_of(ask(seq_len=seq), f"tp=32,cp={cp},dp={4 // cp}", "F", "attend", matrix_flops_per_s=1.0)
        assert found == pytest.approx(4 * slowest * HEAD)

    @pytest.mark.parametrize("cp", [1, 2, 4, 8])
    def test_zigzag_gives_every_rank_the_first_and_the_last_of_its_pieces(self, cp):
        seq, piece = 8192, 8192 // (2 * cp)
        pairs = {
            rank: sum(
                query + 1 for start in (rank, 2 * cp - 1 - rank) for query in range(start * piece, (start + 1) * piece)
            )
            for rank in range(cp)
        }
        assert len(set(pairs.values())) == 1, "all have the same"
        order = ",cp_order=zigzag" if cp > 1 else ""
        text = f"tp=8,cp={cp},dp={16 // cp}{order}"
        found = seconds_of(ask(kernels="te"), text, "F", "attend", matrix_flops_per_s=1.0)
        assert found == pytest.approx(4 * pairs[0] * HEADS // 8 * HEAD)
        assert sum(pairs.values()) == seq * (seq + 1) // 2

    def test_elementwise_work_skips_what_products_skip_and_a_fused_backward_makes_products_again(self):
        pairs = 8192 * 8193 / 2 * HEADS // 8
        for pass_, flops, products in (("F", 5, 2), ("I", 7, 5)):
            question, text = ask(kernels="te"), "tp=8"
            assert seconds_of(question, text, pass_, "attend", vector_flops_per_s=1.0) == pytest.approx(flops * pairs)
            found = seconds_of(question, text, pass_, "attend", matrix_flops_per_s=1.0)
            assert found == pytest.approx(products * 2 * pairs * HEAD)


class TestUnfusedAttention:
    """Megatron-LM of 2021 writes scores: products and passes over memory one after the other, over all pairs."""

    question, text = ask(kernels="megatron", seq_len=2048), "tp=8"
    pairs, tokens = 2048**2 * HEADS // 8, 2048 * HEAD // 8

    def test_its_products_skip_nothing_and_backward_makes_none_again(self):
        for pass_, products in (("F", 2), ("I", 4)):
            found = seconds_of(self.question, self.text, pass_, "attend", matrix_flops_per_s=1.0)
            assert found == pytest.approx(2 * products * self.pairs * HEAD)

    def test_it_moves_what_it_keeps_of_the_scores_and_what_it_passes_on(self):
        inputs = 2 * self.tokens * (HEADS + 2 * KV_HEADS) + 2 * 8 * 2048  # queries, keys, values; positions
        result = 2 * self.tokens * HEADS
        forward = inputs + result + (2 + 1 + 2) * self.pairs + 8 * self.pairs
        found = seconds_of(self.question, self.text, "F", "attend", memory_bytes_per_s=1.0)
        assert found == pytest.approx(forward, rel=1e-3)  # but for the log of the denominator, which nobody keeps
        gradients = inputs - 2 * 8 * 2048
        backward = inputs + 2 * result + gradients + (2 + 1 + 2) * self.pairs + 14 * self.pairs
        found = seconds_of(self.question, self.text, "I", "attend", memory_bytes_per_s=1.0)
        assert found == pytest.approx(backward, rel=1e-2)

    def test_it_takes_both_in_turn_where_fused_attention_takes_the_longer(self):
        for kernels, both in (("megatron", sum), ("te", max)):
            question = ask(kernels=kernels, seq_len=2048)
            alone = (
                seconds_of(question, self.text, "F", "attend", matrix_flops_per_s=1e12),
                seconds_of(question, self.text, "F", "attend", memory_bytes_per_s=1e10),
            )
            found = seconds_of(question, self.text, "F", "attend", matrix_flops_per_s=1e12, memory_bytes_per_s=1e10)
            assert found == pytest.approx(both(alone))


class TestSingleOperations:
    """What plain PyTorch moves, counted operation by operation, forward and backward together."""

    @pytest.mark.parametrize(
        ("kind", "op", "numbers", "forward", "backward"),
        [
            # Forward: cast 2 + 4, square 4 + 4, mean 4, product 4 + 4, cast 4 + 2, product 2 + 2. Backward: product
            # with the weight 2 + 2, 2 + 2 + 2 and its sum 2, cast 2 + 4, product with the statistic 4 + 4, 4 + 4 + 4
            # and its sum 4, square 4 + 4 twice, sum 4 + 4 + 4, cast 4 + 2.
            ("layer", "attn_norm", 8192 // 8 * HIDDEN, 36, 76),
            # casts 2 + 4 and 4 + 2, a product 4 + 4 between them, each way
            ("layer", "q_rotary", 8192 * HEADS // 8 * HEAD, 20, 20),
            # Forward: cast 2 + 4, log-softmax 4 + 4, loss 4; backward: of log-softmax 4 + 4, of the loss 4, cast 4 + 2.
            ("head", "loss", 8192 * 128256 // 8, 18, 18),
        ],
    )
    def test_they_move_as_often_what_one_kernel_would(self, kind, op, numbers, forward, backward):
        question = ask(kernels="torch_cuda")
        moved = [seconds_of(question, "tp=8", pass_, op, kind=kind, memory_bytes_per_s=1.0) for pass_ in "FI"]
        if kind == "layer" and op.endswith("norm"):  # the sum of its weights' gradients is no part of this
            moved[1] -= (2 + 4 + 4) * HIDDEN
        assert sum(moved) == pytest.approx((forward + backward) * numbers, rel=1e-2)


class TestLaunches:
    """Kernels of a Llama layer, counted by hand."""

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
            ("nxd_core", 0, 0, 0),
        ],
    )
    def test_a_device_waits_for_a_host_to_start_each(self, kernels, forward, inputs, weights):
        cost = priced(ask(kernels=kernels), "tp=8", rates=rates(launch_s=1.0))
        assert [float(cost.seconds[name]["waiting"]) for name in "FIW"] == pytest.approx([forward, inputs, weights])


class TestProducts:
    """Float8 changes the products of a layer's activations with its weights, nothing else."""

    def flops(self, pass_, op, ratio, kind="layer"):
        question = ask(cluster_name="h100-80", nodes=1, kernels="torch_cuda")
        return seconds_of(question, "tp=8", pass_, op, kind=kind, matrix_flops_per_s=1.0, products_ratio=ratio)

    @pytest.mark.parametrize("op", ["q", "down"])
    @pytest.mark.parametrize("pass_", ["F", "I", "W"])
    def test_those_of_layers_are_as_much_faster_both_ways(self, op, pass_):
        assert self.flops(pass_, op, 2.0) == pytest.approx(self.flops(pass_, op, 1.0) / 2)

    def test_those_of_the_output_head_and_of_attention_are_not(self):
        for pass_ in "FIW":
            assert self.flops(pass_, "unembed", 2.0, "head") == pytest.approx(self.flops(pass_, "unembed", 1.0, "head"))
        for pass_ in "FI":
            assert self.flops(pass_, "attend", 2.0) == pytest.approx(self.flops(pass_, "attend", 1.0))
