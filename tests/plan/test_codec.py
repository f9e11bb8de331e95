"""Plan files: the same bytes twice, every fault at once, and whatever is done to a file ends in an answer."""

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st

import autoshard.plan
from autoshard.errors import InputError
from autoshard.plan.build import build_plan
from autoshard.plan.codec import MIGRATIONS, dump, load, plan_hash
from autoshard.plan.plan import Plan
from autoshard.plan.verify import notices, verify
from tests.json_schema import schema_text
from tests.plan.cases import ask, plan_of, shaped, with_prediction

GOLDEN = Path(__file__).parents[1] / "golden"
SHIPPED_SCHEMA = Path(autoshard.plan.__file__).with_name("plan.schema.json")


def plan():
    return with_prediction(plan_of(ask(), "tp=32,pp=8,recompute=selective[CoreAttention]"))


def explicit():
    made = plan_of(ask(nodes=2, global_batch=2), "tp=32,pp=2")
    return dataclasses.replace(made, schedule=dataclasses.replace(made.schedule, actions=made.schedule.action_lists()))


def edited(**changes):
    return json.dumps({**json.loads(dump(plan())), **changes})


def faults_of(text, **options):
    with pytest.raises(InputError) as caught:
        load(text, **options)
    return {fault.where: fault.message for fault in caught.value.faults}


@given(shaped())
def test_plans_round_trip_and_are_the_same_bytes_twice(case):
    question, candidate = case
    plain = build_plan(candidate, *question.facts, provenance={"autoshard": "0.1.0", "calibration": "none"})
    for one in (plain, with_prediction(plain)):
        text = dump(one)
        assert load(text) == one and dump(load(text)) == text
        assert plan_hash(one) == plan_hash(plain) != plan_hash(dataclasses.replace(one, micro_batch=7))


def test_the_shipped_json_schema_is_the_generated_one_and_plans_satisfy_it(request):
    if request.config.getoption("--update-golden"):
        SHIPPED_SCHEMA.write_text(schema_text())
    assert SHIPPED_SCHEMA.read_text() == schema_text(), "run pytest --update-golden and read the difference"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))
    for one in (plan(), explicit()):
        jsonschema.validate(json.loads(dump(one)), json.loads(schema_text()))


def test_a_whole_plan_file_is_golden(golden):
    golden("plan/llama3-70b-16-nodes.json", dump(plan()))
    assert json.loads(dump(explicit()))["schedule"]["actions"][1] == ["F1.0", "B1.0", "F1.1", "B1.1"]


def test_files_are_read_by_path_and_named_in_every_fault(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(dump(plan()))
    assert load(path) == plan()
    path.write_text(edited(kernels=3, extra=1))
    assert set(faults_of(path)) == {f"{path}: kernels", f"{path}: extra"}
    path.write_bytes(b"\xff\xfe{")
    assert "UTF-8" in faults_of(path)[str(path)]
    assert "there is no such file" in faults_of(tmp_path / "none.json")[str(tmp_path / "none.json")]


def test_all_faults_are_reported_at_once():
    found = faults_of(
        edited(engine="tpu", micro_bach=1, sp="yes", zero=2, stages=[{"rank": -1, "chunk": 0}], mesh="pp=2")
    )
    assert set(found) == {
        "micro_bach", "engine", "sp", "zero", "mesh", "stages[0].rank", "stages[0].first_layer",
        "stages[0].num_layers", "stages[0].recompute",
    }  # fmt: skip
    assert "Did you mean micro_batch" in found["micro_bach"]
    buckets = {"reduce_scatter_bytes": 0, "all_gather_bytes": 0}
    assert set(faults_of(edited(buckets=buckets))) == {f"buckets.{name}" for name in buckets}
    wrong = faults_of(edited(micro_batch=0, stages=[], padding={"vocab": 0}))
    assert set(wrong) == {"micro_batch", "stages", "padding.vocab"}


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "plan", "is empty"),
        ('{\n  "schema": 2,\n  oops\n}', "plan", "in line 3, column 3"),
        ("[]", "plan", "must be a JSON object"),
        ("[" * 100_000, "plan", "nested too deeply"),
        ('{"schema": ' + "9" * 5000 + "}", "plan", "not usable JSON"),
        ("{}", "schema", "missing"),
        ('{"schema": "1"}', "schema", "whole number"),
        ('{"schema": true}', "schema", "whole number"),
        ('{"schema": 0}', "schema", "0 cannot be read; this version reads schemas 1 to 6"),
        ('{"schema": 7}', "schema", "Install an autoshard that knows schema 7"),
        (
            '{"schema": 7, "provenance": {"autoshard": "9.1"}}',
            "schema",
            "It was written by autoshard 9.1. Install an autoshard that knows schema 7",
        ),
        ('{"schema": 2, "stages": [{"rank": 0, "rank": 1}]}', "plan", "the key 'rank' appears twice"),
    ],
)
def test_files_that_are_no_plan_are_refused_where_they_go_wrong(text, where, says):
    assert says in faults_of(text)[where]


def test_older_files_go_through_every_migration():
    migrations = {
        -1: lambda data: {**data, "kernels": data["kernel_table"]},
        0: lambda data: {key: value for key, value in data.items() if key != "kernel_table"},
        **MIGRATIONS,
    }
    old = json.loads(dump(plan()))
    assert load(json.dumps({**old, "kernel_table": old.pop("kernels"), "schema": -1}), migrations) == plan()
    assert "reads schemas -1 to 6" in faults_of(json.dumps({"schema": -2}), migrations=migrations)["schema"]


NOTHING_DROPPED = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def test_a_plan_of_schema_5_divides_states_over_all_ranks():
    old = (GOLDEN / "plan" / "schema-5.json").read_text()
    read, was = load(old), json.loads(old)
    assert read.zero_group is None and read.prediction
    assert read.prediction.of == plan_hash(read), "declare a new field with record.option, or write a migration"
    was["prediction"] |= {"of": read.prediction.of}
    assert json.loads(dump(read)) == {**was, "schema": 6, "zero_group": None}


def test_a_plan_of_schema_4_drops_nothing():
    old = (GOLDEN / "plan" / "schema-4.json").read_text()
    read, was = load(old), json.loads(old)
    assert read.prediction and read.prediction.of == plan_hash(read)
    was["model"] |= NOTHING_DROPPED
    was["prediction"] |= {"of": read.prediction.of}
    assert json.loads(dump(read)) == {**was, "schema": 6, "zero_group": None}


def test_a_plan_of_schema_3_is_that_of_a_card():
    old = (GOLDEN / "plan" / "schema-3.json").read_text()
    read, was = load(old), json.loads(old)
    assert read.model.traced is None and read.prediction and read.prediction.of == plan_hash(read)
    was["model"] |= {"traced": None, **NOTHING_DROPPED}
    was["prediction"] |= {"of": read.prediction.of}
    assert json.loads(dump(read)) == {**was, "schema": 6, "zero_group": None}


@pytest.mark.parametrize("schema", [1, 2])
def test_a_plan_of_an_old_schema_is_read_as_it_was_meant_and_stays_edited_if_it_was(schema):
    old = (GOLDEN / "plan" / f"schema-{schema}.json").read_text()
    read = load(old)
    assert (read.workload.documents, read.headroom) == ("joined", 0.0), "it filled all memory"
    assert read.prediction and read.prediction.of == plan_hash(read), "nobody has edited it"
    was, now = json.loads(old), json.loads(dump(read))
    neither = ("weight_group", "fold", "code")
    assert list(now) == [field.name for field in dataclasses.fields(Plan) if field.name not in neither]
    assert read.workload.expert_imbalance == 0, "and routed evenly"
    was["workload"] |= {"documents": "joined", "expert_imbalance": 0.0}
    added = {"peak_interval_bytes": None, "mfu_causal": None, "outside": {}}
    was["prediction"] |= {**added, "of": read.prediction.of}
    was["model"] |= {"traced": None, **NOTHING_DROPPED}
    assert now == {**was, "schema": 6, "headroom": 0.0, "zero_group": None}
    read = load(old.replace('"global_batch": 1024', '"global_batch": 2048'))
    assert read.prediction and read.prediction.of != plan_hash(read)


PLANS = [
    dump(explicit()),
    dump(with_prediction(plan_of(ask(), "tp=32,pp=8,recompute=full:2"))),
    dump(plan_of(ask("gpt2-xl", "h100-80", 2, seq_len=1024), "tp=2,pp=2,vp=2,schedule=interleaved")),
    dump(plan_of(ask(cluster_name="trn2.48xlarge", nodes=1), "tp=16,pp=2,stages=39/41")),
]
LEAVES = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 2, 3, 7, 10**9, 2**62, 10**30, 10**400, 1e308, 5e-324, 0.5, -1.5]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from(["", "x", "full:3", "1f1b", "0-7", "pp=999999999999 on 0-7", "pp=2,tp=8 on 0-7", "\ud800"]),
    st.text(max_size=6),
)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=3), LEAVES, max_size=2)


def survives(text):
    try:
        plan = load(text)
    except InputError as error:
        assert all(fault.where and fault.message for fault in error.faults), error.faults
        return
    dump(plan)
    assert all(rejection.message and rejection.source for rejection in verify(plan))
    notices(plan)


def slots(data):
    """List every object or list of a JSON value with each of its keys."""
    pairs = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    return [(data, key) for key, _ in pairs] + [slot for _, item in pairs for slot in slots(item)]


@given(st.data())
@settings(max_examples=max(30, settings().max_examples))
def test_edited_values_never_end_in_anything_but_an_answer(data):
    values = json.loads(data.draw(st.sampled_from(PLANS)))
    for _ in range(data.draw(st.integers(1, 3))):
        parent, key = data.draw(st.sampled_from(slots(values)))
        change = data.draw(st.sampled_from(["delete", "replace", "replace", "rename"]))
        if change == "delete":
            del parent[key]
        elif change == "replace":
            parent[key] = data.draw(VALUES)
        elif isinstance(parent, list):
            parent.insert(key, parent[key])
        else:
            parent["new"] = parent[key]
    survives(json.dumps(values))


@given(st.data())
@settings(max_examples=max(30, settings().max_examples))
def test_damaged_files_never_end_in_anything_but_an_answer(tmp_path_factory, data):
    text = data.draw(st.sampled_from(PLANS))
    start = data.draw(st.integers(0, len(text)))
    end = min(len(text), start + data.draw(st.sampled_from([0, 1, 5, 100, 10**6])))
    extra = ["", "{", "]", ",", '"', "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000, "\x00"]
    text = text[:start] + data.draw(st.sampled_from(extra)) + text[end:]
    survives(text)
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(0, 4)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_bytes(content)
    survives(path)
