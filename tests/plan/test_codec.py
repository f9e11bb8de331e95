import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings

import autoshard.plan
from autoshard.errors import InputError
from autoshard.plan.build import build_plan
from autoshard.plan.codec import MIGRATIONS, dump, fingerprint, load
from tests.json_schema import schema_text
from tests.plan.cases import ask, plan_of, shaped, with_prediction

GOLDEN = Path(__file__).parents[1] / "golden"
SHIPPED_SCHEMA = Path(autoshard.plan.__file__).with_name("plan.schema.json")


def plan():
    return with_prediction(plan_of(ask(), "tp=32,pp=8,recompute=selective[CoreAttention]"))


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
        again = load(text)
        assert again == one
        assert dump(again) == text


@given(shaped())
@settings(max_examples=10)
def test_dumped_plans_satisfy_the_shipped_json_schema(case):
    question, candidate = case
    made = with_prediction(build_plan(candidate, *question.facts))
    jsonschema.validate(json.loads(dump(made)), json.loads(SHIPPED_SCHEMA.read_text()))


def test_the_shipped_json_schema_is_the_generated_one(request):
    if request.config.getoption("--update-golden"):
        SHIPPED_SCHEMA.write_text(schema_text())
    assert SHIPPED_SCHEMA.read_text() == schema_text(), "run pytest --update-golden and read the difference"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


def test_a_whole_plan_file_is_golden(golden):
    golden("plan/llama3-70b-16-nodes.json", dump(plan()))


def test_explicit_action_lists_are_written_as_text():
    base = plan_of(ask(nodes=2, global_batch=2), "tp=32,pp=2")
    schedule = dataclasses.replace(base.schedule, actions=base.schedule.action_lists())
    explicit = dataclasses.replace(base, schedule=schedule)
    assert json.loads(dump(explicit))["schedule"]["actions"][1] == ["F1.0", "B1.0", "F1.1", "B1.1"]
    assert load(dump(explicit)) == explicit


def test_files_are_read_by_path_and_named_in_every_fault(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(dump(plan()))
    assert load(path) == plan()
    path.write_text(edited(kernels=3, extra=1))
    assert set(faults_of(path)) == {f"{path}: kernels", f"{path}: extra"}
    path.write_bytes(b"\xff\xfe{")
    assert "UTF-8" in faults_of(path)[str(path)]
    assert "cannot be read" in faults_of(tmp_path / "none.json")[str(tmp_path / "none.json")]
    assert "cannot be read" in faults_of(tmp_path)[str(tmp_path)]


def test_all_faults_are_reported_at_once():
    found = faults_of(
        edited(engine="tpu", micro_bach=1, sp="yes", zero=2, stages=[{"rank": -1, "chunk": 0}], mesh="pp=2")
    )
    assert set(found) == {
        "micro_bach", "engine", "sp", "zero", "mesh", "stages[0].rank", "stages[0].first_layer",
        "stages[0].num_layers", "stages[0].recompute",
    }  # fmt: skip
    assert "Did you mean micro_batch" in found["micro_bach"]


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "plan", "is empty"),
        ('{\n  "schema": 2,\n  oops\n}', "plan", "in line 3, column 3"),
        ("[]", "plan", "must be a JSON object"),
        ("null", "plan", "must be a JSON object"),
        ("[" * 100_000, "plan", "nested too deeply"),
        ('{"schema": ' + "9" * 5000 + "}", "plan", "not usable JSON"),
        ("{}", "schema", "missing"),
        ('{"schema": "1"}', "schema", "whole number"),
        ('{"schema": true}', "schema", "whole number"),
        ('{"schema": 0}', "schema", "0 cannot be read; this version reads schemas 1 to 2"),
        ('{"schema": 3}', "schema", "Use an autoshard that knows schema 3 or later"),
        ('{"schema": 3, "provenance": {"autoshard": "9.1"}}', "schema", "Use autoshard 9.1 or later"),
        ('{"schema": 2, "stages": [{"rank": 0, "rank": 1}]}', "plan", "the key 'rank' stands twice"),
    ],
)
def test_files_that_are_no_plan_are_refused_where_they_go_wrong(text, where, says):
    found = faults_of(text)
    assert says in found[where]


def test_older_files_go_through_every_migration():
    migrations = {
        -1: lambda data: {**data, "kernels": data["kernel_table"]},
        0: lambda data: {key: value for key, value in data.items() if key != "kernel_table"},
        **MIGRATIONS,
    }
    old = json.loads(dump(plan()))
    old["kernel_table"] = old.pop("kernels")
    assert load(json.dumps({**old, "schema": -1}), migrations) == plan()
    found = faults_of(json.dumps({"schema": -2}), migrations=migrations)
    assert "this version reads schemas -1 to 2" in found["schema"]


def test_a_plan_of_schema_1_is_read_as_it_was_meant():
    old = (GOLDEN / "plan" / "schema-1.json").read_text()
    read = load(old)
    assert read.workload.documents == "joined"
    assert read.prediction and read.prediction.of == fingerprint(read), "nobody has edited it"
    seal = json.loads(old)["prediction"]["of"]
    last = '    "expert_capacity": null\n'
    expected = old.replace(last, last.replace("null", 'null,\n    "documents": "joined"'))
    assert dump(read) == expected.replace('"schema": 1', '"schema": 2').replace(seal, read.prediction.of)


def test_an_edited_plan_of_schema_1_stays_edited():
    old = (GOLDEN / "plan" / "schema-1.json").read_text()
    read = load(old.replace('"global_batch": 1024', '"global_batch": 2048'))
    assert read.prediction and read.prediction.of != fingerprint(read)


def test_values_that_no_other_field_can_make_right_are_refused():
    assert faults_of(edited(micro_batch=0)) == {"micro_batch": "must be at least 1, not 0"}
    assert faults_of(edited(stages=[])) == {"stages": "must hold at least one stage"}
    assert faults_of(edited(padding={"vocab": 0})) == {"padding.vocab": "must be at least 1, not 0"}
    buckets = {"reduce_scatter_bytes": 0, "all_gather_bytes": 0}
    assert set(faults_of(edited(buckets=buckets))) == {f"buckets.{name}" for name in buckets}


def test_the_fingerprint_names_all_but_the_prediction():
    made = plan()
    assert made.prediction is not None
    assert fingerprint(made) == fingerprint(dataclasses.replace(made, prediction=None)) == made.prediction.of
    assert fingerprint(dataclasses.replace(made, micro_batch=2)) != made.prediction.of
