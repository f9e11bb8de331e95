import pytest

from autoshard.errors import InputError
from autoshard.graph.decoder import decoder_graph
from autoshard.layout.layout import Layout
from autoshard.layout.pin import Pin, parse_pin, pin_constraints, pins_of
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import Precision, Workload
from tests.kit import tiny

WORKLOAD = Workload(seq_len=8, global_batch=8, precision=Precision.named("fp32"))
QUERIES = "q.weight=[kv_heads/tp, q_group, head_dim, hidden]"


@pytest.fixture(scope="module")
def graph():
    return decoder_graph(tiny(), WORKLOAD, load_kernels("torch_cuda"), micro_batch=4)


@pytest.fixture(scope="module")
def mixtral():
    return decoder_graph(tiny("mixtral"), WORKLOAD, load_kernels("torch_cuda"), micro_batch=4)


def refusal(graph, *pins):
    with pytest.raises(InputError) as caught:
        pin_constraints(graph, [parse_pin(pin, origin) for origin, pin in pins])
    return [str(fault) for fault in caught.value.faults]


def python_refusal(graph, *pins):
    return refusal(graph, *(("Python", pin) for pin in pins))


def test_a_pin_is_read_from_the_text_of_an_option():
    layout = Layout.parse("[batch/dp, seq, hidden/tp]")
    pin = Pin(tensor="attn_in", layout=layout, origin="--pin")
    assert parse_pin(" attn_in = [batch/dp, seq, hidden/tp]", "--pin") == pin
    assert pins_of({"attn_in": layout}, "--pin") == (pin,)


@pytest.mark.parametrize("text", ["attn_in", "=[seq]", "", "attn_in [seq]"])
def test_what_is_no_pin_is_refused_with_an_example(text):
    with pytest.raises(InputError, match=r"^--pin: .* is not a pin\. Write it like 'NAME=\[batch/dp, hidden/tp\]'"):
        parse_pin(text, "--pin")


def test_every_pin_of_a_recipe_that_cannot_be_read_is_told_at_once():
    with pytest.raises(InputError) as caught:
        pins_of({"x": "[batch", "y": "[seq]", "z": "[seq/cp, hidden/cp]"}, "pins of tiny.yaml")
    assert [str(fault) for fault in caught.value.faults] == [
        "pins of tiny.yaml x: '[batch' is not a layout. Write it like '[batch/dp, seq/cp.tp, hidden] +ep'",
        "pins of tiny.yaml z: an atom cuts twice in ['cp', 'cp']",
    ]


def test_every_fault_of_every_pin_is_told_at_once(graph):
    assert python_refusal(
        graph, "attn_inn=[batch, seq, hidden]", "attn_in=[batch, sec, hidden]", "attn_norm=[batch, seq/up, hidden/kv]",
        "o=[batch, seq/rep, hidden] +tp",
    ) == [
        "Python attn_inn: no tensor of the forward pass has this name. "
        "Did you mean attn_in or attn_norm or layer.attn_in?",
        "Python attn_in: has the dims [batch, seq, hidden], not [batch, sec, hidden]",
        "Python attn_norm: layer.attn_norm needs hidden whole: it cannot be cut over kv. Pin hidden without atoms",
        "Python attn_norm: unknown atom 'up'. Known: cp, dp, edp, ep, kv, rep, tp.",
        "Python o: an atom both cuts and is pending: ['rep']",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        ("attn_norm=[batch, seq, hidden] +tp", "layer.attn_norm leaves nothing pending as +tp. Leave it out"),
        ("o=[batch, seq, hidden] ^tp", "layer.o leaves nothing pending as ^tp. Leave it out"),
        ("q.d0=[batch, seq, hidden]", "no tensor of the forward pass has this name"),
        ("top=[batch, seq] +tp", "head.top leaves nothing pending as +tp. Leave it out"),
        ("x=[batch, seq, hidden] +tp", "boundary leaves nothing pending as +tp. Leave it out"),
        ("mlp_in=[batch, seq, hidden] +tp", "layer.gate leaves nothing pending as +tp. Leave it out"),
    ],
)
def test_only_what_an_operation_sums_over_can_be_pinned_as_pending(graph, pin, reason):
    assert any(line.startswith(f"Python {pin.partition('=')[0]}: {reason}") for line in python_refusal(graph, pin))


def test_the_pin_that_breaks_a_tie_is_named_and_not_its_neighbour(mixtral):
    (told,) = python_refusal(
        mixtral, "dispatch=[experts, slots/dp.cp, hidden]", "choose_out=[batch/dp, seq, choices]",
        "queue=[batch/dp, seq, choices]",
    )  # fmt: skip
    assert told.startswith("pins: Python dispatch=[experts, slots/dp.cp, hidden] and Python queue=[batch/dp, seq")
    assert "(layer.dispatch <- layer.queue)" in told


def test_conflicting_pins_are_told_with_both_origins_and_the_way_between_them(graph, mixtral, golden):
    cases = [
        (graph, ("--pin", "attn_in=[batch, seq/tp, hidden]"), ("pins of llama.yaml", QUERIES)),
        (graph, ("--pin", QUERIES), ("Python", "layer.q.weight=[kv_heads, q_group, head_dim, hidden]")),
        (graph, ("--pin", "layer.x=[batch, seq/cp, hidden]"), ("Python", "head.x=[batch/dp, seq, hidden]")),
        (graph, ("--pin", "q_in=[batch, seq, kv_heads, q_group, head_dim]"),
         ("Python", "v_in=[batch, kv_seq/cp, kv_heads, head_dim]")),
        (graph, ("--pin", "up=[batch, seq, ffn] +tp"), ("Python", "mlp_in=[batch, seq/tp, hidden]")),
        (graph, ("--pin", "up=[batch, seq, ffn] +tp"), ("Python", "up.weight=[ffn, hidden]")),
        (mixtral, ("--pin", "dispatch=[experts, slots/dp, hidden]"), ("Python", "share_out=[batch, seq/cp, choices]")),
        (mixtral, ("--pin", "queue=[batch/dp, seq, choices]"), ("Python", "combine=[batch, seq, hidden/dp]")),
    ]  # fmt: skip
    golden("layout/pin_conflicts.txt", "\n\n".join("\n".join(refusal(case, *pins)) for case, *pins in cases) + "\n")


def test_all_conflicts_are_told_and_each_once(graph):
    told = python_refusal(
        graph, QUERIES, "k.weight=[kv_heads/tp, head_dim, hidden]", "attn_in=[batch, seq/tp, hidden]",
        "down_in=[batch, seq, ffn/cp]", "down.weight=[hidden/cp, ffn]",
    )  # fmt: skip
    assert [line.split(" exclude each other")[0] for line in told] == [
        "pins: Python down_in=[batch, seq, ffn/cp] and Python down.weight=[hidden/cp, ffn]",
        "pins: Python k.weight=[kv_heads/tp, head_dim, hidden] and Python attn_in=[batch, seq/tp, hidden]",
        f"pins: Python {QUERIES} and Python attn_in=[batch, seq/tp, hidden]",
    ]


def test_pins_that_say_the_same_agree(graph):
    pins = pins_of({"q.weight": "[kv_heads/tp, q_group, head_dim, hidden]"}, "recipe")
    again = pins_of({"layer.q.weight": "[kv_heads/kv.rep, q_group, head_dim, hidden]"}, "--pin")
    assert pin_constraints(graph, [*pins, *again]) == pin_constraints(graph, pins)


def test_a_pin_of_slots_fixes_the_tokens_of_all_who_number_and_read_them(mixtral):
    found = pin_constraints(mixtral, pins_of({"dispatch": "[experts, slots/dp.cp, hidden]"}, "--pin")).of_block("layer")
    assert {"queue", "dispatch", "combine"} <= found.keys()
    assert found["queue"].cuts == {"slots": ("edp", "ep", "cp"), "batch": ("edp", "ep", "cp"), "seq": ()}
    assert found["queue"].leaves("cp", ("batch", "seq", "")) == ("batch",)
    assert found["queue"].leaves("kv", ("batch", "seq", "")) == ("",)


def test_a_pinned_sum_leaves_its_atom_the_dims_that_are_summed_over(graph):
    found = pin_constraints(graph, pins_of({"o": "[batch/dp, seq, hidden] +tp"}, "--pin")).of_block("layer")["o"]
    assert found.leaves("kv", ("hidden", "kv_heads", "q_group", "")) == ("kv_heads", "q_group")
    assert found.leaves("ep", ("batch", "hidden", "")) == ("batch",)
