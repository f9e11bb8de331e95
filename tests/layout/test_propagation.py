import os
import random
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

import autoshard.layout
from autoshard.errors import InputError
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Differentiable, OpKind, Output
from autoshard.layout.layout import Layout
from autoshard.layout.legal import faults
from autoshard.layout.lower import lower
from autoshard.layout.pin import Pin
from autoshard.layout.propagation import propagate
from autoshard.layout.redistribute import bytes_price
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.layout.meshes import random_mesh

LLAMA = {
    "name": "tiny", "source": "made for this test", "num_layers": 2, "hidden": 16, "ffn": 32, "num_heads": 16,
    "num_kv_heads": 8, "head_dim": 4, "vocab": 64, "max_positions": 64, "norm": "rms", "norm_eps": 1e-5,
    "activation": "silu", "gated_mlp": True, "positions": "rotary",
}  # fmt: skip
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
OPTIONS = {
    "llama": {},
    "mixtral": {"num_experts": 4, "experts_per_token": 2},
    "gpt": {**BIASES, "norm": "layer", "gated_mlp": False, "positions": "learned", "tied_embeddings": True},
    "neox": {**BIASES, "parallel_residual": True, "rotary_fraction": 0.5, "num_kv_heads": 4},
    "qwen": {"qk_norm": True, "qkv_bias": True, "window": 3},
}
TENSOR_PARALLEL = {
    "q.weight": "[kv_heads/tp, q_group, head_dim, hidden]",
    "up.weight": "[ffn/tp, hidden]",
}
HEADS = ["q", "k", "v", "q_rotary", "k_rotary", "attend", "o"]
INNER = ["up", "gate", "act", "product", "down"]
NORMS = ["attn_norm", "attn_add", "mlp_norm", "mlp_add"]
NUM_CASES = 500 if os.environ.get("CI") else 60
WORST_ERROR = 1e-9


def graph_of(options="llama", batch=4, seq=16):
    model = ModelSpec(**{**LLAMA, **OPTIONS[options]})
    capacity = 4.0 if model.num_experts else None
    workload = Workload(seq_len=seq, global_batch=8, precision=Precision.named("fp32"), expert_capacity=capacity)
    return decoder_graph(model, workload, load_kernels("torch_cpu"), micro_batch=batch)


def real(cuts):
    """Which ops are cut, and how; what is whole is left out."""
    held = {name: {dim: cut for dim, cut in dims.items() if cut} for name, dims in cuts.items()}
    return {name: dims for name, dims in held.items() if dims}


def collectives(graph, found, kind="layer"):
    price = bytes_price(1e6, found.atoms)
    block = graph.block(kind)
    program = lower(block, found.cuts[kind], found.atoms, price, boundary=found.boundary, keeps_gathered=True)
    return Counter((entry.pass_, entry.entry, str(entry.collective)) for entry in program.collectives())


def test_megatrons_block_follows_from_one_weight_of_attention_and_one_of_the_mlp():
    graph = graph_of()
    found = propagate(graph, {"tp": 4}, TENSOR_PARALLEL)
    assert real(found.cuts["layer"]) == {
        **{name: {"kv_heads": ("kv",)} for name in HEADS},
        **{name: {"ffn": ("kv",)} for name in INNER},
    }
    assert str(found.layouts["layer"]["o.weight"]) == "[hidden, kv_heads/tp, q_group, head_dim]"
    assert str(found.layouts["layer"]["down"]) == "[batch, seq, hidden] +tp"
    assert collectives(graph, found) == Counter([
        ("F", "attn_out", "all_reduce /kv"), ("F", "mlp_out", "all_reduce /kv"),
        ("I", "attn_in", "all_reduce /kv"), ("I", "mlp_in", "all_reduce /kv"),
    ])  # fmt: skip


def test_keys_and_values_are_held_several_times_where_only_query_groups_are_cut_further():
    pins = {"q.weight": "[kv_heads/kv, q_group/rep, head_dim, hidden]"}
    found = propagate(graph_of(), {"kv": 8, "rep": 2}, pins)
    layouts = found.layouts["layer"]
    assert str(layouts["k.weight"]) == "[kv_heads/kv, head_dim, hidden]"
    assert str(layouts["o.weight"]) == "[hidden, kv_heads/kv, q_group/rep, head_dim]"


def test_norms_follow_a_hidden_state_that_is_cut_along_the_sequence():
    graph = graph_of()
    pins = {**TENSOR_PARALLEL, "layer.x": "[batch, seq/tp, hidden]"}
    found = propagate(graph, {"tp": 4}, pins)
    assert {name: real(found.cuts["layer"])[name] for name in NORMS} == {name: {"seq": ("kv",)} for name in NORMS}
    assert found.boundary == {"batch": (), "seq": ("kv",), "hidden": ()}
    kinds = Counter()
    for (_, _, text), count in collectives(graph, found).items():
        kinds[text] += count
    assert kinds == {"all_gather seq/kv": 4, "reduce_scatter seq/kv": 4}


def test_without_pinned_weights_the_whole_model_is_cut_along_the_sequence():
    graph = graph_of()
    found = propagate(graph, {"cp": 4}, {"x": "[batch, seq/cp, hidden]"})
    assert all(cuts["seq"] == ("cp",) for block in found.cuts.values() for cuts in block.values())
    assert found.cuts["layer"]["attend"]["kv_seq"] == ("cp",)
    assert not collectives(graph, found)


@pytest.mark.parametrize("options", sorted(OPTIONS))
def test_data_parallelism_everywhere_follows_from_the_tokens(options):
    graph = graph_of(options)
    found = propagate(graph, {"dp": 2}, {"tokens": "[batch/dp, seq]"})
    for block in found.cuts.values():
        for name, cuts in block.items():
            assert all(cuts.get(dim, ("edp",)) == ("edp",) for dim in ("batch", "slots")), name
            assert not any(cut for dim, cut in cuts.items() if dim not in ("batch", "slots")), name
    assert not collectives(graph, found)


def test_the_vocabulary_of_the_loss_is_never_gathered():
    found = propagate(graph_of(), {"tp": 4}, {"unembed.weight": "[vocab/tp, hidden]"})
    uses = ["unembed", "top", "shifted", "power", "total", "picked"]
    assert real(found.cuts["head"]) == {name: {"vocab": ("kv",)} for name in uses}
    assert str(found.layouts["head"]["top"]) == "[batch, seq] ^tp"


def test_tied_embeddings_are_cut_alike():
    found = propagate(graph_of("gpt"), {"tp": 4}, {"embed.weight": "[vocab/tp, hidden]"})
    assert str(found.layouts["head"]["unembed.weight"]) == "[vocab/tp, hidden]"


def test_experts_stay_with_their_weights_and_tokens_travel_to_them():
    pins = {"tokens": "[batch/dp, seq]", "layer.gate.weight": "[experts/ep, ffn, hidden]"}
    found = propagate(graph_of("mixtral"), {"edp": 2, "ep": 2}, pins)
    cuts = real(found.cuts["layer"])
    assert cuts["dispatch"] == cuts["combine"] == {"batch": ("edp", "ep"), "slots": ("edp", "ep")}
    for name in ("gate", "up", "act", "product", "down"):
        assert cuts[name] == {"experts": ("ep",), "slots": ("edp",)}


def test_tokens_stay_whole_wherever_their_places_are_counted_if_one_reader_of_the_places_has_no_atom_left():
    pins = {"tokens": "[batch/dp, seq]", "down.weight": "[experts, hidden/dp, ffn]"}
    cuts = real(propagate(graph_of("mixtral"), {"dp": 2}, pins).cuts["layer"])
    assert cuts["combine"] == {"hidden": ("edp",)}
    assert cuts["choose"] == cuts["share"] == {"batch": ("edp",)}
    assert "queue" not in cuts
    assert "batch" not in cuts.get("dispatch", {})


def test_what_moves_with_tokens_goes_before_what_cuts_one_operation_alone():
    pins = {"share": "[batch/dp, seq, choices]", "down": "[experts, slots, hidden/dp]"}
    cuts = real(propagate(graph_of("mixtral"), {"dp": 2}, pins).cuts["layer"])
    assert cuts["combine"] == cuts["dispatch"] == {"batch": ("edp",), "slots": ("edp",)}


@pytest.mark.parametrize(
    ("pins", "site", "dim"),
    [
        # What comes with an input goes before what readers want.
        ({"shifted": "[batch, seq/cp, vocab]", "power_out": "[batch/cp, seq, vocab]"}, "head.power", "seq"),
        # An earlier input goes before a later one: the residual stream before what is added to it.
        ({"x": "[batch, seq/cp, hidden]", "o": "[batch/cp, seq, hidden]"}, "layer.attn_add", "seq"),
        # The maker of a tensor goes before its other readers.
        ({"shifted": "[batch, seq/cp, vocab]", "picked": "[batch/cp, seq]"}, "head.power", "seq"),
        # An earlier dim of a tensor goes before a later one, whatever the two are called.
        ({"attn_norm": "[batch, seq/cp, hidden]", "attn_add": "[batch, seq, hidden/cp]"}, "head.final_norm", "seq"),
        # What cuts a weight goes before what does not, though it comes from farther away.
        (
            {"q_in": "[batch, seq, kv_heads/cp, q_group, head_dim]", "x": "[batch, seq/cp, hidden]"},
            "layer.k",
            "kv_heads",
        ),
    ],
)
def test_of_several_offers_the_documented_one_wins(pins, site, dim):
    kind, _, name = site.partition(".")
    assert real(propagate(graph_of(), {"cp": 2}, pins).cuts[kind])[name] == {dim: ("cp",)}


def test_an_inner_cut_does_not_spread_without_the_outer_one():
    pins = {**TENSOR_PARALLEL, "x": "[batch, seq/kv.cp, hidden]"}
    found = propagate(graph_of(), {"cp": 2, "kv": 2}, pins)
    assert found.cuts["layer"]["attn_norm"]["seq"] == ("kv", "cp")
    assert found.cuts["layer"]["q"]["seq"] == ()


def test_nothing_is_cut_finer_than_it_is_unless_sizes_are_unknown():
    pins = {"tokens": "[batch/dp, seq]"}
    graph = graph_of("mixtral", batch=4, seq=4)
    tight = replace(graph, sizes={**graph.sizes, "slots": 2})
    assert propagate(graph, {"dp": 4}, pins).cuts["layer"]["dispatch"]["slots"] == ("edp",)
    assert propagate(tight, {"dp": 4}, pins).cuts["layer"]["dispatch"]["slots"] == ()
    block = propagate(graph.block("layer"), {"dp": 64}, {"x": "[batch/dp, seq, hidden]"})
    assert block.cuts["layer"]["q"]["batch"] == ("edp",)


def test_without_pins_everything_stays_whole():
    found = propagate(graph_of(), {"dp": 2, "tp": 2})
    assert not any(real(block) for block in found.cuts.values())
    assert str(found) == ""


def test_a_pinned_sum_is_summed_along_the_first_dim_unless_something_says_along_which():
    pins = {"o": "[batch, seq, hidden] +tp"}
    assert propagate(graph_of(), {"tp": 2}, pins).cuts["layer"]["o"]["kv_heads"] == ("kv",)
    grouped = {**pins, "q.weight": "[kv_heads, q_group/tp, head_dim, hidden]"}
    assert propagate(graph_of(), {"tp": 2}, grouped).cuts["layer"]["o"]["q_group"] == ("kv",)


def test_a_sum_that_no_dim_has_room_for_is_refused():
    with pytest.raises(InputError, match="up has no dim left along which a sum over kv could stay pending"):
        propagate(graph_of(), {"tp": 32}, {"up": "[batch, seq, ffn] +tp"})


def test_slots_that_are_pinned_say_how_tokens_are_cut():
    found = propagate(graph_of("mixtral"), {"dp": 2, "cp": 2}, {
        "dispatch": "[experts, slots/dp.cp, hidden]", "choose": "[batch/dp, seq/cp, choices]",
        "share": "[batch, seq, choices]", "queue": "[batch/dp, seq/cp, choices]",
    })  # fmt: skip
    assert found.cuts["layer"]["combine"]["slots"] == ("edp", "cp")
    assert found.cuts["layer"]["share"]["batch"] == ()
    alone = propagate(graph_of("mixtral"), {"dp": 2, "cp": 2}, {"dispatch": "[experts, slots/dp.cp, hidden]"})
    assert alone.cuts["layer"]["queue"] == {"batch": ("edp", "cp"), "seq": (), "choices": (), "slots": ("edp", "cp")}


def test_a_spec_mesh_and_a_mapping_say_the_same():
    mesh = Mesh.parse("pp=2,dp=2,tp=4 on 0-15")
    by_mesh = propagate(graph_of(), mesh, TENSOR_PARALLEL)
    assert by_mesh == propagate(graph_of(), {"dp": 2, "tp": 4}, TENSOR_PARALLEL)
    assert "layer.q: [kv_heads/tp]" in str(by_mesh).splitlines()


def test_an_impossible_mesh_is_refused_with_all_its_faults():
    with pytest.raises(InputError) as caught:
        propagate(graph_of(), {"dp": 2, "ep": 2, "cp": 0})
    assert [str(fault) for fault in caught.value.faults] == [
        "mesh.cp: must be at least 1, not 0",
        "mesh: dp stands whole and in parts",
    ]


# Properties ------------------------------------------------------------------------------------------------------


def random_pins(graph, atoms, rng, count):
    """Pins that hold together: each is kept only if the others leave room for it."""
    blocks = [graph] if isinstance(graph, Block) else graph.blocks
    tensors = [
        (f"{block.kind}.{name}" if isinstance(graph, OpGraph) else name, block.tensors[name].dims)
        for block in blocks
        for op in block.select("micro_batch", "F")
        for name in (*op.inputs, *op.outputs)
    ]
    kept = []
    for _ in range(count):
        name, dims = rng.choice(tensors)
        cuts = {dim: [] for dim in dims}
        for atom in rng.sample(list(atoms), len(atoms)):
            dim = rng.choice([*dims, None])
            if dim:
                cuts[dim].append(atom)
        layout = Layout(dims=tuple((dim, tuple(cut)) for dim, cut in cuts.items()))
        pins = [*kept, Pin(tensor=name, layout=layout)]
        try:
            propagate(graph, atoms, pins)
        except InputError:
            continue
        kept = pins
    return kept


def compare_random_case(uncut, seed):
    rng = random.Random(seed)
    options = rng.choice(sorted(OPTIONS))
    kind = rng.choice(["layer"] * 4 + ["head"])
    again = rng.choice([(), None, ("attend",)]) if kind == "layer" else ()
    case = uncut(options, kind, batch=rng.randint(1, 4), seq=rng.choice([2, 3, 5, 6]), again=again, seed=seed)
    mesh = random_mesh(rng)
    atoms = dict(mesh.atoms)
    pins = random_pins(case.block, atoms, rng, rng.randint(1, 4))
    found = propagate(case.block, atoms, pins)
    cuts = found.cuts[case.block.kind]
    assert faults(case.block, cuts, atoms) == (), seed
    for pin in pins:
        wanted = tuple((dim, tuple(atom for atom in cut if atoms[atom] > 1)) for dim, cut in pin.layout.dims)
        assert found.layouts[case.block.kind][pin.tensor].dims == wanted, (seed, str(pin))
    program = case.lower(cuts, mesh, found.boundary, keeps_gathered=rng.random() < 0.5)
    assert case.error(program, mesh) < WORST_ERROR, (seed, [str(pin) for pin in pins])


@pytest.mark.parametrize("start", range(0, NUM_CASES, 20))
def test_whatever_follows_from_pins_computes_what_the_uncut_block_does(uncut, start):
    for seed in range(start, start + 20):
        compare_random_case(uncut, seed)


def shuffled(block, rng):
    """The block with its operations in another order that the data flow allows."""
    made = {output for op in block.ops for output in op.outputs}
    ready = set(block.tensors) - made
    left, order = list(block.ops), []
    while left:
        op = rng.choice([op for op in left if set(op.inputs) <= ready])
        left.remove(op)
        order.append(op)
        ready.update(op.outputs)
    return replace(block, ops=tuple(order))


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_operations_changes_nothing(seed):
    rng = random.Random(seed)
    graph = graph_of(sorted(OPTIONS)[seed % len(OPTIONS)])
    atoms = {"edp": 2, "cp": 2, "kv": 2}
    pins = random_pins(graph, atoms, rng, rng.randint(2, 8))
    other = replace(graph, blocks=tuple(shuffled(block, rng) for block in graph.blocks))
    assert [block.ops for block in other.blocks] != [block.ops for block in graph.blocks]
    assert propagate(other, atoms, pins) == propagate(graph, atoms, pins)
    assert propagate(graph, atoms, pins[::-1]) == propagate(graph, atoms, pins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed(Differentiable):
    """A kind that speaks of the same dims by other names."""

    kind: OpKind
    names: Mapping[str, str]

    def infer(self, inputs):
        back = {new: old for old, new in self.names.items()}
        plain = [replace(tensor, dims=tuple(back[dim] for dim in tensor.dims)) for tensor in inputs]
        return tuple(
            Output(dims=self.new(out.dims), dtype=out.dtype, suffix=out.suffix) for out in self.kind.infer(plain)
        )

    def evaluate(self, call, *arrays):
        raise AssertionError("nothing is computed here")

    def gradient(self, inputs, needed):
        raise AssertionError("nothing is derived here")

    def whole_dims(self):
        return self.new(self.kind.whole_dims())

    def tied_dims(self):
        return tuple((self.names[dim], self.new(others)) for dim, others in self.kind.tied_dims())

    def new(self, dims):
        return tuple(self.names[dim] for dim in dims)


def renamed_kind(kind, dims):
    if isinstance(kind, Accumulate):
        return kind
    if isinstance(kind, Deliver | Collect):
        return replace(kind, rename=tuple((dims[old], dims[new]) for old, new in kind.rename))
    return Renamed(kind=kind, names=dims)


def renamed(block, dims, words):
    """The block with every dim, tensor and operation called otherwise."""

    def name(text):
        first, dot, rest = text.partition(".")
        return f"{words[first]}{dot}{rest}"

    def names(texts):
        return tuple(name(text) for text in texts)

    return replace(
        block,
        tensors={
            name(old): replace(tensor, name=name(old), dims=tuple(dims[dim] for dim in tensor.dims))
            for old, tensor in block.tensors.items()
        },
        ops=tuple(
            replace(
                op,
                name=name(op.name),
                kind=renamed_kind(op.kind, dims),
                inputs=names(op.inputs),
                outputs=names(op.outputs),
                source=name(op.source),
            )
            for op in block.ops
            if op.phase == "micro_batch"
        ),
        carry_in=block.carry_in and name(block.carry_in),
        carry_out=block.carry_out and name(block.carry_out),
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_names_of_dims_tensors_and_operations_change_nothing(seed):
    rng = random.Random(seed)
    graph = graph_of(sorted(OPTIONS)[seed % len(OPTIONS)])
    block, atoms = graph.block(rng.choice(["layer", "layer", "head"])), {"a": 2, "b": 2, "c": 2}
    pins = random_pins(block, atoms, rng, rng.randint(2, 8))
    old = sorted({dim for tensor in block.tensors.values() for dim in tensor.dims} | {"experts", "slots", "choices"})
    dims = dict(zip(old, rng.sample(string.ascii_lowercase, len(old)), strict=True))
    words = sorted({name.partition(".")[0] for name in (*block.tensors, *(op.name for op in block.ops))})
    words = dict(zip(words, rng.sample(words, len(words)), strict=True))
    other_pins = [
        Pin(
            tensor=".".join([words[pin.tensor.partition(".")[0]], *pin.tensor.split(".")[1:]]),
            layout=Layout(dims=tuple((dims[dim], cut) for dim, cut in pin.layout.dims)),
        )
        for pin in pins
    ]
    found = propagate(block, atoms, pins).cuts[block.kind]
    other = propagate(renamed(block, dims, words), atoms, other_pins).cuts[block.kind]
    assert other == {words[name]: {dims[dim]: cut for dim, cut in cuts.items()} for name, cuts in found.items()}


def test_the_function_is_found_in_the_folder_which_stays_cheap_to_import():
    assert autoshard.layout.propagate is propagate
    with pytest.raises(AttributeError, match="no attribute 'propagat'"):
        _ = autoshard.layout.propagat
    code = "import sys, autoshard.layout; sys.exit('autoshard.layout.propagation' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
