"""Whatever is done to a plan file, it is read or refused by an InputError, and verified to an answer."""

import dataclasses
import json

from hypothesis import given, settings, strategies as st

from autoshard.errors import InputError
from autoshard.plan.codec import dump, load
from autoshard.plan.verify import notices, verify
from tests.plan.cases import ask, plan_of, with_prediction


def explicit():
    plan = plan_of(ask(nodes=2, global_batch=2), "tp=32,pp=2")
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, actions=plan.schedule.action_lists()))


PLANS = [
    dump(explicit()),
    dump(with_prediction(plan_of(ask(), "tp=32,pp=8,recompute=full:2"))),
    dump(plan_of(ask("gpt2-xl", "h100-80", 2, seq_len=1024), "tp=2,pp=2,vp=2,schedule=interleaved")),
    dump(plan_of(ask(cluster_name="trn2.48xlarge", nodes=1), "tp=16,pp=2,stages=39/41")),
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 7, 10**9, 2**62, 10**30, 10**400, 1e308, 5e-324, 0.5, -1.5]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from(["", "x", "full:3", "1f1b", "0-7", "pp=999999999999 on 0-7", "pp=2,tp=8 on 0-7", "\ud800"]),
    st.text(max_size=6),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def survives(text):
    try:
        plan = load(text)
    except InputError as error:
        assert error.faults
        assert all(fault.where and fault.message for fault in error.faults), error.faults
        return
    dump(plan)
    assert all(rejection.message and rejection.source for rejection in verify(plan))
    notices(plan)


def slots(data):
    """List every object or list of a JSON value with each of its keys."""
    pairs = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    return [(data, key) for key, _ in pairs] + [slot for _, item in pairs for slot in slots(item)]


@st.composite
def edited(draw):
    """A plan file with a few values deleted, replaced, renamed or written twice."""
    data = json.loads(draw(st.sampled_from(PLANS)))
    for _ in range(draw(st.integers(1, 3))):
        parent, key = draw(st.sampled_from(slots(data)))
        change = draw(st.sampled_from(["delete", "replace", "replace", "rename", "repeat"]))
        if change == "delete":
            del parent[key]
        elif change == "replace":
            parent[key] = draw(VALUES)
        elif isinstance(parent, list):
            parent.insert(key, parent[key])
        else:
            parent["new" if change == "rename" else f"{key}s"] = parent[key]
    return json.dumps(data)


@given(edited())
@settings(max_examples=200)
def test_edited_values_never_end_in_anything_but_an_answer(text):
    survives(text)


@given(st.data())
@settings(max_examples=200)
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


@given(st.sampled_from(PLANS), st.data())
def test_a_key_written_twice_is_named(text, data):
    lines = text.splitlines()
    keyed = [index for index, line in enumerate(lines) if '": ' in line and line.endswith(",") and "[" not in line]
    index = data.draw(st.sampled_from(keyed))
    key = lines[index].split('"')[1]
    lines.insert(index, lines[index])
    try:
        load("\n".join(lines))
    except InputError as error:
        assert f"the key {key!r} stands twice" in str(error)
    else:
        raise AssertionError(f"{key} was accepted twice")
