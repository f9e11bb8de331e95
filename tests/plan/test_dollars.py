"""What a step costs: hours times nodes times price, counted another way, and nothing where no price is known."""

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from autoshard.plan.codec import dump, load
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from tests.plan.cases import ask, plan_of, with_prediction


def priced(nodes=16, price: float | None = 21.5, date: str | None = "2026-06-25", step_time_s=10.0):
    """A plan that takes so long for a step, on nodes of this price."""
    made = plan_of(ask(nodes=nodes), "tp=32,pp=1")
    sources = {**made.cluster.sources, "price_usd_per_node_hour": "the bill"}
    cluster = dataclasses.replace(
        made.cluster, price_usd_per_node_hour=price, price_date=date if price else None, sources=sources
    )
    return with_prediction(
        dataclasses.replace(made, cluster=cluster),
        step_time_s=step_time_s,
        low_s=step_time_s,
        high_s=step_time_s,
        time_parts={"compute": step_time_s},
        tokens_per_s=made.workload.tokens_per_step / step_time_s,
    )


def test_an_hour_of_steps_costs_an_hour_of_nodes():
    found = priced(nodes=16, price=21.5, step_time_s=36.0).dollars
    assert found is not None
    assert found.usd_per_step * 100 == pytest.approx(16 * 21.5)  # 100 steps an hour
    # 100 steps of 1024 x 8192 tokens are 0.8388608 billion tokens.
    assert found.usd_per_billion_tokens == pytest.approx(16 * 21.5 / 0.8388608)
    assert (found.price_usd_per_node_hour, found.price_date) == (21.5, "2026-06-25")


@given(st.sampled_from([1, 2, 4, 16]), st.floats(0.01, 1000), st.floats(1e-3, 1e6))
def test_dollars_are_hours_times_nodes_times_price(nodes: int, price: float, step_time_s: float):
    plan = priced(nodes, price, step_time_s=step_time_s)
    found = plan.dollars
    assert found is not None
    hours = Fraction(step_time_s) / (60 * 60)
    step = hours * nodes * Fraction(price)
    tokens = plan.workload.global_batch * plan.workload.seq_len
    assert found.usd_per_step == pytest.approx(float(step), rel=1e-8)
    assert found.usd_per_billion_tokens == pytest.approx(float(step * 10**9 / tokens), rel=1e-8)


def test_without_a_price_or_a_prediction_there_is_no_cost():
    assert priced(price=None).dollars is None
    assert dataclasses.replace(priced(), prediction=None).dollars is None
    undated = priced(date=None).dollars
    assert undated is not None and undated.price_date is None


def test_the_date_is_read_back_from_the_file():
    plan = priced()
    assert load(dump(plan)).dollars == plan.dollars


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
