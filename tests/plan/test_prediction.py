import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.codec import dump, load
from autoshard.plan.plan import StageMemory, rounded
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from tests.plan.cases import ask, plan_of, with_prediction


def predicted(**changes):
    prediction = with_prediction(plan_of(ask(), "tp=32,pp=8"), **changes).prediction
    assert prediction is not None
    return prediction


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"step_time_s": 0.0, "time_parts": {}}, "step_time_s"),
        ({"low_s": 11.0}, "low_s"),
        ({"high_s": 9.0}, "low_s"),
        ({"time_parts": {"compute": 10.1}}, "time_parts"),
        ({"time_parts": {}}, "time_parts"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"tokens_per_s": 0.0}, "tokens_per_s"),
        ({"mfu": -0.1}, "mfu"),
        ({"basis": ""}, "basis"),
        ({"communication_bytes": {"tp": -1}}, "communication_bytes.tp"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, where):
    with pytest.raises(InputError) as caught:
        predicted(**changes)
    assert where in [fault.where for fault in caught.value.faults]


def test_parts_may_differ_from_the_sum_by_their_rounding():
    parts = {"compute": 6.5 + 4e-6, "bubble": 3.5}
    assert predicted(time_parts=parts).time_parts == parts


def test_memory_adds_up_and_is_never_negative():
    assert StageMemory(num_weights=1, parts={"weights": 3, "activations": 4}).total == 7
    assert predicted().peak_bytes == 4 * 2**30
    with pytest.raises(InputError, match=r"parts\.weights: must not be negative"):
        StageMemory(num_weights=1, parts={"weights": -1})


@given(st.floats(1e-12, 1e15))
def test_rounding_keeps_nine_digits_and_is_done_once(value):
    assert rounded(rounded(value)) == rounded(value) == pytest.approx(value, rel=1e-8)


def priced(nodes=16, price: float | None = 21.5, date: str | None = "2026-06-25", step_time_s=10.0):
    """A plan that takes so long for a step, on nodes of this price."""
    made = plan_of(ask(nodes=nodes), "tp=32,pp=1")
    sources = {**made.cluster.sources, "price_usd_per_node_hour": "the bill"}
    date = date if price else None
    cluster = dataclasses.replace(made.cluster, price_usd_per_node_hour=price, price_date=date, sources=sources)
    time = {"step_time_s": step_time_s, "low_s": step_time_s, "high_s": step_time_s}
    tokens_per_s = made.workload.tokens_per_step / step_time_s
    made = dataclasses.replace(made, cluster=cluster)
    return with_prediction(made, **time, time_parts={"compute": step_time_s}, tokens_per_s=tokens_per_s)


@given(st.sampled_from([1, 2, 4, 16]), st.floats(0.01, 1000), st.floats(1e-3, 1e6))
def test_dollars_are_hours_times_nodes_times_price(nodes: int, price: float, step_time_s: float):
    plan = priced(nodes, price, step_time_s=step_time_s)
    found = plan.dollars
    assert found is not None and (found.price_usd_per_node_hour, found.price_date) == (price, "2026-06-25")
    step = Fraction(step_time_s) / (60 * 60) * nodes * Fraction(price)
    tokens = plan.workload.global_batch * plan.workload.seq_len
    assert found.usd_per_step == pytest.approx(float(step), rel=1e-8)
    assert found.usd_per_billion_tokens == pytest.approx(float(step * 10**9 / tokens), rel=1e-8)
    assert load(dump(plan)).dollars == found


def test_without_a_price_or_a_prediction_there_is_no_cost():
    assert priced(price=None).dollars is None
    assert dataclasses.replace(priced(), prediction=None).dollars is None
    undated = priced(date=None).dollars
    assert undated is not None and undated.price_date is None


@pytest.mark.parametrize("name", [name for name in cluster_names() if name.endswith("xlarge")])
def test_a_price_of_the_catalogue_says_whether_its_source_has_a_date(name: str):
    cluster = load_cluster(name)
    source = cluster.sources.get("price_usd_per_node_hour", "")
    if cluster.price_usd_per_node_hour is None:
        assert name.startswith("trn2") and cluster.price_date is None
    elif cluster.price_date is None:
        assert "carries no date" in source
    else:
        assert cluster.price_date in source
