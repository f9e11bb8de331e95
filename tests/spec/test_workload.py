"""Number formats and workloads: what they hold, that they survive JSON, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.record import decode, encode
from autoshard.spec.workload import DTYPE_BYTES, PRECISIONS as NAMED, Precision, Workload

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
PRECISIONS = st.builds(
    Precision, weights=DTYPES, activations=DTYPES, gradients=DTYPES, masters=st.none() | DTYPES, moments=DTYPES,
    products=st.none() | DTYPES,
)  # fmt: skip


@given(PRECISIONS)
def test_every_precision_survives_json(precision: Precision):
    assert decode(Precision, json.loads(json.dumps(encode(precision)))) == precision


@pytest.mark.parametrize("name", NAMED)
def test_no_precision_by_name_multiplies_in_a_format_of_its_own(name: str):
    assert Precision.named(name).products is None and Precision.named(name).name == name


def test_what_was_written_before_products_had_a_format_reads_as_without_one():
    plain = Precision.named("bf16")
    written: dict[str, Any] = dict(encode(plain))
    written.pop("products", None)
    assert decode(Precision, written) == plain


def test_a_format_of_products_that_nobody_knows_is_refused():
    with pytest.raises(InputError, match=r"products: expected one of bf16, fp16, fp32, fp64, fp8, int64"):
        decode(Precision, {**encode(Precision.named("bf16")), "products": "fp4"})


def test_a_chip_without_the_format_of_products_says_so():
    workload = Workload(seq_len=8, global_batch=1, precision=replace(Precision.named("bf16"), products="fp8"))
    assert workload.precision.products == "fp8"
    with pytest.raises(InputError, match=r"has no fp8 matrix rate. Known: "):
        load_cluster("a100-80").rank_matrix_flops_per_s("fp8")
    assert load_cluster("h100-80").rank_matrix_flops_per_s("fp8") == 1979e12
