"""Blocks as lines of text: every card's lines give its blocks again, and faults of lines are told."""

from dataclasses import replace

import pytest

from autoshard.errors import InputError
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.written import WrittenOp, block_lines
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.model_parts import TracedDecoder
from autoshard.spec.workload import Documents, Precision, Workload
from tests.engine.small_models import distinct_cards
from tests.slower import each_third_is_fast


def graph(model: ModelSpec, table: str, documents: Documents = "joined", capacity: float | None = None) -> OpGraph:
    work = Workload(
        seq_len=64, global_batch=8, precision=Precision.named("bf16"), documents=documents, expert_capacity=capacity
    )
    return decoder_graph(model, work, load_kernels(table), micro_batch=2)


def lines(block: Block, last: str = "") -> tuple[str, ...]:
    ops = block_lines(block)
    names = [op.name for op in ops]
    return tuple(map(str, ops[: names.index(last) + 1] if last else ops))


def as_lines(model: ModelSpec) -> ModelSpec:
    """The same model, carried as lines."""
    embed, layer, head = graph(model, "te").blocks
    traced = TracedDecoder(
        embed=lines(embed), layer=lines(layer), head=lines(head, "unembed"), sizes={},
        num_parameters=model.num_parameters,
    )  # fmt: skip
    return replace(model, traced=traced)


def has_lines(name: str) -> bool:
    """Lines are those of layers that are alike, and of routers that are the softmax of the chosen logits."""
    model = load_model(name)
    return not model.order and model.router is None


@pytest.mark.parametrize(
    "name",
    each_third_is_fast(filter(has_lines, distinct_cards())),
)
@pytest.mark.parametrize(("table", "documents"), [("te", "joined"), ("nxd", "joined"), ("torch_engine", "separate")])
def test_the_lines_of_a_card_give_its_graph_again(name: str, table: str, documents: Documents):
    model = load_model(name)
    capacity = 2.0 if model.num_experts and table == "nxd" else None
    of_card, of_lines = (graph(one, table, documents, capacity) for one in (model, as_lines(model)))
    assert of_card == of_lines


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-xl", "mixtral-8x7b"])
def test_a_line_is_read_as_it_was_written(name: str):
    for block in graph(load_model(name), "te").blocks[:2]:
        for line in lines(block):
            assert str(WrittenOp.parse(line)) == line


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("act of gate", "cannot read 'act of gate'; write NAME = KIND {options} of OPERAND, OPERAND"),
        ("act = Unray of gate", "act: there is no kind Unray. Did you mean Unary?"),
        ('act = Unary {"function": "silo"} of gate', "act.function: expected one of silu"),
        ("act = Unary {function} of gate", "act: is not JSON"),
        (f'act = Unary {{"function": {"[" * 5000}}} of gate', "act: is nested too deeply"),
        ("mlp_add = Add of x, down[", "mlp_add: cannot read down[; write name, weight[dim dim] or input[dim]:int64"),
    ],
)
def test_a_faulty_line_is_told(line: str, told: str):
    with pytest.raises(InputError) as refused:
        WrittenOp.parse(line)
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (("of gate", "of gates"), "model.traced.act: reads gates, which no line before gives. Did you mean gate"),
        (("Multiply of act, up", "Multiply of act, x"), "model.traced.product: multiply cannot read these operands"),
    ],
)
def test_an_edited_line_that_does_not_fit_is_told(edit: tuple[str, str], told: str):
    model = as_lines(load_model("llama3-8b"))
    assert model.traced
    layer = tuple(line.replace(*edit) for line in model.traced.layer)
    with pytest.raises(InputError) as refused:
        graph(replace(model, traced=replace(model.traced, layer=layer)), "te")
    assert str(refused.value).startswith(told)
