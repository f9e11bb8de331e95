import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.kinds.indexing import Lookup, Pick, Place, ScatterAdd, random_document_starts
from autoshard.graph.kinds.pointwise import Multiply
from autoshard.graph.op import Call, Op, Tensor
from autoshard.layout.interpret import evaluate_local, joined_attention
from autoshard.layout.program import Compute

SIZES = {"batch": 3, "seq": 4, "vocab": 7, "hidden": 2}
TOKENS = ("batch", "seq")
# kind, dims of the values, dims of the result
INDEXING = {
    "lookup": (Lookup(), ("vocab", "hidden"), (*TOKENS, "hidden")),
    "scatter_add": (ScatterAdd(dims=("vocab", "hidden")), (*TOKENS, "hidden"), ("vocab", "hidden")),
    "pick": (Pick(over="vocab"), (*TOKENS, "vocab"), TOKENS),
    "place": (Place(over="vocab", dims=(*TOKENS, "vocab")), TOKENS, (*TOKENS, "vocab")),
}


def computed(kind, dims, index_dims, out):
    """A block of one operation on values and indices, and its instruction."""
    named = {"x": dims, "index": index_dims, "y": out}
    tensors = {name: Tensor(name=name, dims=its, dtype="fp32", role="input") for name, its in named.items()}
    op = Op(name="y", kind=kind, inputs=("x", "index"), outputs=("y",), source="y")
    block = Block(
        kind="one", repeat=1, tensors=tensors, ops=(op,), fused=(), saved=(), carry_in=None, carry_out=None
    )  # fmt: skip
    return block, Compute(op=op, cuts={}, reads=(), writes=())


@pytest.mark.parametrize(("kind", "dims", "out"), INDEXING.values(), ids=INDEXING)
@given(edges=st.lists(st.integers(0, SIZES["vocab"]), max_size=3), seed=st.integers(0, 9))
def test_blocks_of_what_is_indexed_add_up_or_lie_side_by_side(kind, dims, out, edges, seed):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=[SIZES[dim] for dim in dims])
    index = generator.integers(0, SIZES["vocab"], [SIZES[dim] for dim in TOKENS])
    block, compute = computed(kind, dims, TOKENS, out)
    (whole,) = evaluate_local(block, compute, SIZES, {}, (values, index))
    cuts = [0, *sorted(edges), SIZES["vocab"]]
    parts = []
    for start, stop in itertools.pairwise(cuts):
        local = values.take(range(start, stop), axis=dims.index("vocab")) if "vocab" in dims else values
        parts += evaluate_local(block, compute, SIZES, {"vocab": (start, stop)}, (local, index))
    found = np.concatenate(parts, axis=out.index("vocab")) if "vocab" in out else sum(parts)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)


def test_other_operations_just_run_on_their_block():
    block, compute = computed(Multiply(), ("seq",), ("seq",), ("seq",))
    left, right = np.arange(2.0), np.array([3.0, 5.0])
    (found,) = evaluate_local(block, compute, SIZES, {"seq": (1, 3)}, (left, right))
    assert found.tolist() == [0.0, 5.0]


@given(
    edges=st.lists(st.integers(0, 6), max_size=3), window=st.sampled_from([None, 2]), seed=st.integers(0, 9),
    apart=st.booleans(),
)  # fmt: skip
def test_attention_to_parts_of_the_keys_joins_to_the_whole(edges, window, seed, apart):
    generator = np.random.default_rng(seed)
    query = generator.normal(size=(1, 6, 2, 1, 4))
    key, value = generator.normal(size=(2, 1, 6, 2, 4))
    positions, kind = np.arange(6), Attend(window=window)
    starts = [random_document_starts(generator, (1, 6))] if apart else []
    call = Call(inputs=(), outputs=(), sizes={})
    expected = kind.evaluate(call, query, key, value, positions, positions, *starts)
    cuts = [0, *sorted(edges), 6]
    joined = None
    for start, stop in reversed(list(itertools.pairwise(cuts))):
        inside = slice(start, stop)
        part, lse = kind.evaluate(call, query, key[:, inside], value[:, inside], positions, positions[inside], *starts)
        joined = joined_attention(joined, (part, lse))
    assert joined is not None
    for found, whole in zip(joined, expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12)
