"""A graph is printed for people, and building one costs the same for every size of model."""

import re
from collections.abc import Callable
from dataclasses import replace

from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.recompute import recompute
from autoshard.graph.text import graph_text
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Precision, Workload

GraphOf = Callable[..., OpGraph]
Golden = Callable[[str, str], None]
TENSOR = r"\S+\[[a-z_ ]*\]"
LINE = re.compile(rf"  (F|I|W|step) +{TENSOR}(, {TENSOR})* = [a-z0-9_]+\({TENSOR}(, {TENSOR})*\)")


def tiny_llama() -> OpGraph:
    workload = Workload(seq_len=64, global_batch=8, precision=Precision.named("bf16"))
    return decoder_graph(load_model("tiny-llama"), workload, load_kernels("torch_cpu"), micro_batch=1)


def num_ops(graph: OpGraph) -> int:
    return sum(len(block.ops) for block in (*graph.blocks, graph.update))


def test_the_text_of_tiny_llama_is_the_golden_one(golden: Golden):
    golden("graph/tiny-llama.txt", graph_text(tiny_llama()))


def test_the_text_of_a_recomputed_layer_is_the_golden_one(golden: Golden):
    graph = tiny_llama()
    embed, layer, head = graph.blocks
    again = recompute(layer, load_kernels("torch_cpu"), ("attention", "mlp"))
    golden("graph/tiny-llama-selective.txt", graph_text(replace(graph, blocks=(embed, again, head))))


def test_products_read_like_einsums():
    text = graph_text(tiny_llama())
    expected = (
        "q[batch seq kv_heads q_group head_dim] = "
        "einsum(attn_in[batch seq hidden], q.weight[kv_heads q_group head_dim hidden])"
    )
    assert expected in text


def test_every_line_of_an_operation_has_the_same_form(model: ModelSpec, graph_of: GraphOf):
    lines = [line for line in graph_text(graph_of(model, "te")).splitlines() if re.match("  [FIWs]", line)]
    assert len(lines) == num_ops(graph_of(model, "te"))
    assert [line for line in lines if not LINE.fullmatch(line)] == []


def test_the_same_question_gives_the_same_text_and_the_same_value(model: ModelSpec, graph_of: GraphOf):
    first, second = graph_of(model, "nxd"), graph_of(model, "nxd")
    assert graph_text(first) == graph_text(second)
    assert first == second


def test_a_graph_holds_one_layer_however_many_the_model_has():
    """Construction is cheap because it is the same few operations for 8 and for 405 billion parameters."""

    def size(model: ModelSpec, seq_len: int, micro_batch: int) -> int:
        workload = Workload(seq_len=seq_len, global_batch=64, precision=Precision.named("bf16"))
        return num_ops(decoder_graph(model, workload, load_kernels("nxd"), micro_batch=micro_batch))

    counted = {
        size(load_model(name), seq_len, micro_batch)
        for name, seq_len, micro_batch in (
            ("tiny-llama", 8, 1),
            ("llama3-8b", 8192, 4),
            ("llama3.1-405b", 131072, 64),
        )
    }
    assert counted == {num_ops(tiny_llama())}
    assert max(size(load_model(name), 128, 1) for name in model_names()) < 400
