"""``autoshard explore``: who may ask, that each answer is the command's, what is refused, and what replaces what."""

import json
import math
import os
import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from flask.testing import FlaskClient
from hypothesis import given, strategies as st

from autoshard.command_line.reading import read_options
from autoshard.commands.exploring import answering
from autoshard.commands.exploring.asking import Controls, controls_of, read_question
from autoshard.commands.exploring.searching import Searches
from autoshard.commands.exploring.serving import explorer_app
from autoshard.commands.plan import plan
from autoshard.search.bound.watch import SearchProgress
from autoshard.spec.recipe import QuestionOptions
from tests.conftest import Typed
from tests.slower import rest_is_slow

TOKEN = "a-token"
ROOT = Path(__file__).parents[2]
FIRST = Controls(model="tiny-llama", cluster="trn1.32xlarge")
LONG = {"model": "mixtral-8x7b", "cluster": "h100-80", "nodes": "8"}
CHANGES = {  # control -> texts
    "model": ("tiny-llama", "tiny-mixtral", "tiny-gpt"),
    "cluster": ("trn1.32xlarge", "h100-80", "trn1"),
    "nodes": ("", "1", "2"),
    "seq_len": ("", "128", "256"),
    "global_batch": ("", "64", "16k"),
    "fix": ("", "tp=2", "pp=2,zero=1", "dp=32"),
    "tokens": ("", "1B"),
    "choose": ("", "fastest", "2"),
    "more": ("", "--headroom 0.2", "--engine torch --precision fp16"),
}

LIKELY = {  # control -> texts of questions that mostly have an answer
    "model": ("tiny-llama", "tiny-gpt"),
    "cluster": ("h100-80", "a100", "b200"),
    "global_batch": ("", "64", "128"),
    "fix": ("", "tp=2", "pp=2,zero=1", "tp=3"),
    "more": ("", "--headroom 0.2", "--precision fp16 --top 2"),
    **{name: CHANGES[name] for name in ("nodes", "seq_len", "tokens", "choose")},
}


@pytest.fixture(scope="module")
def client() -> Iterator[FlaskClient]:
    with closing(Searches()) as searches:
        searches.warm_up()
        yield explorer_app(TOKEN, FIRST, searches).test_client()


def asked(client: FlaskClient, pane: str = "a", **controls: str) -> list[dict[str, Any]]:
    """The events that answer a question."""
    response = client.post(f"/{TOKEN}/{pane}/answer", json={"model": "tiny-llama", "cluster": "h100", **controls})
    assert response.status_code == 200
    return list(map(json.loads, response.text.splitlines()))


def refused(client: FlaskClient, **controls: str) -> list[str]:
    event = asked(client, **controls)[-1]
    assert event["kind"] == "refused" and event["final"], event
    return event["lines"]


def test_only_who_knows_the_token_may_ask_and_only_under_the_name_of_this_machine(client: FlaskClient):
    assert client.get(f"/{TOKEN}/").status_code == 200
    for address in ("/", "/another/", "/another/page.css", "/another/a/plan.json", "/nowhere", f"/{TOKEN[:-1]}/"):
        assert client.get(address).status_code == 403, address
    assert client.post("/another/a/answer", json={}).status_code == 403
    for host in ("example.org", "127.0.0.1.example.org", "localhost.example.org:80"):
        assert client.get(f"/{TOKEN}/", headers={"Host": host}).status_code == 403, host
    assert client.get(f"/{TOKEN}/", headers={"Host": "127.0.0.1:8000"}).status_code == 200


def test_a_browser_is_told_to_ask_nobody_else_and_to_keep_the_address_to_itself(client: FlaskClient):
    asked(client, fix="pp=1")
    for name in ("", "page.css", "explorer.js", "a/plan.json", "a/report.html"):
        response = client.get(f"/{TOKEN}/{name}")
        assert response.status_code == 200, name
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';") and "http" not in policy and "*" not in policy
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers
    page = client.get(f"/{TOKEN}/").text
    assert "http" not in page and 'value="tiny-llama" selected' in page
    assert "sha256-" in client.get(f"/{TOKEN}/a/report.html").headers["Content-Security-Policy"]


def test_the_page_names_every_control_for_whoever_cannot_see_it(client: FlaskClient):
    page = client.get(f"/{TOKEN}/").text
    ids = re.findall(r'<(?:input|select)[^>]* id="([ab]-\w+)"', page)
    assert len(ids) == 2 * len(CHANGES) and len(set(ids)) == len(ids)
    assert set(re.findall(r'<label for="([ab]-\w+)"', page)) == set(ids)


@given(st.fixed_dictionaries({name: st.sampled_from(texts) for name, texts in CHANGES.items()}))
def test_controls_are_read_as_the_command_reads_its_line(texts: dict[str, str]):
    controls = Controls(**texts)
    values = read_options("plan", plan, shlex.split(shlex.join(controls.words)))
    if not controls.fix and controls.choose != "2":
        question = read_question(controls.words)
        same = values["options"].requests(values["question"], values["nodes"])
        assert [question.request] == same and question.options == values["options"]
    again = controls_of(values["question"], values["nodes"], values["to"].tokens, values["choose"])
    assert read_options("plan", plan, again.words) == values


def test_what_has_no_control_of_its_own_stands_among_further_options():
    question = QuestionOptions(model="tiny-gpt", precision="fp16", pins={"up": "[batch/dp, seq, ffn/tp]"})
    controls = controls_of(question, (2,), None, None)
    assert controls.more == "--precision fp16 --pin 'up=[batch/dp, seq, ffn/tp]'" and controls.nodes == "2"
    assert read_options("plan", plan, controls.words)["question"] == question
    assert controls_of(QuestionOptions(), (), None, None).words == ["llama3-70b", "--nodes", "16"]


def is_command_s(client: FlaskClient, typed: Typed, texts: dict[str, str]) -> bool:
    """Ask in a pane and on the command line; say whether there is an answer, which must be the same."""
    events = asked(client, **texts)
    words = events[0]["words"]
    code, out, err = typed(shlex.join(["plan", *words, "--out", "plan.json", "--force"]))
    last = events[-1]
    assert last["final"] and (last["kind"] == "answer") == (code == 0), (words, last["kind"], out, err)
    if code:
        lines = [line.removeprefix("autoshard: ") for line in err.splitlines()]
        assert [line.strip() for line in lines] == [line.strip() for line in last["lines"]]
        return False
    assert client.get(f"/{TOKEN}/a/plan.json").text == Path("plan.json").read_text()
    return True


@pytest.mark.parametrize(
    "texts",
    rest_is_slow(
        [
            {"fix": "tp=3", "nodes": "2"},
            {"fix": "tp=2"},
            {"model": "tiny-gpt", "fix": "pp=1", "seq_len": "128", "more": "--headroom 0.2"},
        ],
        slow=2,
    ),
)
def test_an_answer_is_that_of_the_command_that_stands_above_it(
    client: FlaskClient, typed: Typed, texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert is_command_s(client, typed, texts) == (texts.get("fix") != "tp=3")


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "seed"), [(3, 2), pytest.param(50, 44, marks=pytest.mark.thorough)])
def test_after_each_of_many_random_changes_the_answer_is_that_of_the_command(
    changes: int, seed: int, client: FlaskClient, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    texts = {"model": "tiny-llama", "cluster": "h100-80"}
    answered, choose = 0, random.Random(seed)
    for _ in range(changes):
        name = choose.choice(sorted(LIKELY))
        texts[name] = choose.choice([text for text in LIKELY[name] if text != texts.get(name)])
        answered += is_command_s(client, typed, texts)
    assert answered > 0.2 * changes, "most questions have no answer"
    assert not is_command_s(client, typed, texts | {"fix": "tp=3"}), "three ranks divide no heads"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"model": "tiny-lama"}, "--model: 'tiny-lama' is not a known model. Did you mean tiny-llama"),
        ({"model": ""}, "--model: missing. Choose a model"),
        ({"nodes": "none"}, "--nodes: expected a whole number"),
        ({"nodes": "1,2"}, "--nodes: takes several numbers"),
        ({"cluster": "trn1,h100"}, "--cluster: names several clusters"),
        ({"fix": "tp"}, "--fix"),
        ({"tokens": "many"}, "--tokens: 'many' is not a number of tokens"),
        ({"choose": "worst"}, "--choose worst: type fastest"),
        (
            {"more": "--out x.json"},
            "--out: has no place on this page, which asks for one plan. Type it to autoshard plan",
        ),
        ({"more": "--deadline=30d"}, "--deadline: has no place on this page"),
        ({"more": "--dedline 30d"}, "--dedline: unknown option"),
        ({"more": "--headroom '0.1"}, "more options: no closing quotation. Close every quote"),
        ({"more": "--extend=x.py"}, "more options: --extend=x.py: belongs to the line that opens the page"),
        ({"fix": "x" * 3000}, "fix: is longer than 2000 letters"),
        ({"another": "1"}, "another: unknown key"),
    ],
)
def test_what_is_wrong_is_one_message(client: FlaskClient, texts: dict[str, str], said: str):
    lines = refused(client, **texts)
    assert len(lines) == 1 and lines[0].startswith(said), lines


def test_files_of_the_line_that_opens_the_page_hold_for_each_question(tmp_path: Path):
    file = tmp_path / "broken.py"
    file.write_text("raise ValueError('on purpose')")
    line = f"autoshard plan --extend {file}"
    with closing(Searches((file,))) as searches:
        page = explorer_app(TOKEN, FIRST, searches, line).test_client()
        (message,) = refused(page)
        assert message.startswith(f"--extend {file}: ") and "on purpose" in message
        assert f'data-line="{line}"' in page.get(f"/{TOKEN}/").text


def test_what_is_no_question_at_all_is_one_message(client: FlaskClient):
    for body in ("", "[", "[]", '"text"', '{"model": 7}'):
        response = client.post(f"/{TOKEN}/a/answer", data=body, content_type="application/json")
        (event,) = map(json.loads, response.text.splitlines())
        assert event["kind"] == "refused" and len(event["lines"]) == 1, body
    assert client.post(f"/{TOKEN}/a/answer", data="x" * 100_000, content_type="application/json").status_code == 413
    assert client.get(f"/{TOKEN}/b/plan.json").status_code == 404


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_reason_and_what_would_help(client: FlaskClient):
    events = asked(client, model="llama3-70b", cluster="trn1", fix="tp=8,mbs=1")
    *earlier, last = (event for event in events if event["kind"] == "refused")
    assert last["final"] and last["lines"][0].startswith("no plan: ")
    assert any(line.startswith("  try ") for line in last["lines"])
    # A busy machine shows what was tried before the reason, and may know the remedies before the reason is shown.
    assert earlier and not any(event["final"] for event in earlier)
    reasons = [event["lines"] for event in earlier if event["lines"][0].startswith("no plan: ")]
    assert all(last["lines"][: len(reason)] == reason for reason in reasons)


@pytest.mark.slow
def test_an_answer_has_its_figures_its_drawings_and_its_sources(client: FlaskClient):
    final = asked(client, model="llama3-8b", cluster="trn1", fix="tp=8,mbs=1,cp=1,pp=4", tokens="1T")[-1]
    assert final["kind"] == "answer" and final["final"]
    sections = re.findall(r'<h2 id="(\w+)"', final["html"])
    assert sections == ["timeline", "memory", "pareto", "time", "others", "refused", "basis"]
    assert "all tokens: " in final["html"] and 'class="timeline"' in final["html"]


@pytest.mark.slow
def test_two_answers_are_compared_and_each_has_its_page(client: FlaskClient):
    assert asked(client, "a", fix="pp=1")[-1]["kind"] == "answer"
    assert asked(client, "b", fix="pp=2")[-1]["kind"] == "answer"
    event = client.post(f"/{TOKEN}/difference").get_json()
    assert event["kind"] == "difference" and "The plans differ in" in event["html"]
    page = client.get(f"/{TOKEN}/b/report.html").text
    assert page.startswith("<!doctype html>") and 'id="blocks"' in page
    assert asked(client, "b", fix="tp")[-1]["kind"] == "refused"
    assert client.get(f"/{TOKEN}/b/report.html").status_code == 404, "an older answer is not that of the question"
    assert client.post(f"/{TOKEN}/difference").get_json()["kind"] == "refused"


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_newer_question_of_a_pane_ends_the_search_of_the_older_one_and_of_no_other():
    with closing(Searches()) as searches:
        page = explorer_app(TOKEN, FIRST, searches).test_client()
        older = page.post(f"/{TOKEN}/a/answer", json=LONG)
        beside = page.post(f"/{TOKEN}/b/answer", json=LONG)
        lines = [iter(response.response) for response in (older, beside)]
        for stream in lines:
            assert json.loads(next(stream))["kind"] == "question"
            assert json.loads(next(stream))["kind"] == "progress"
        (group, other) = (search.process.pid or 0 for search in searches._running.values())
        assert not group_is_gone(group) and not group_is_gone(other)
        assert asked(page, "a", fix="pp=1")[-1]["kind"] == "answer"
        events = [json.loads(line) for line in lines[0]]
        assert events[-1]["kind"] == "replaced" and not any(event["final"] for event in events[:-1])
        assert group_is_gone(group) and not group_is_gone(other)
        beside.close()  # as a browser does that leaves
        assert group_is_gone(other) and not searches._running


def test_a_signal_to_end_that_comes_as_a_search_splits_ends_both_halves():
    fork = os.fork

    def fork_and_end() -> int:
        if process := fork():
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    def search_and_split() -> None:
        os.setpgid(0, 0)
        answering.os.fork = fork_and_end
        watch = answering._SplittingWatch(read_question(["tiny-llama"]), lambda _: None)
        with answering._halves_of(watch):
            watch._split(1.0)
            time.sleep(60.0)

    searching = get_context("fork").Process(target=search_and_split)
    searching.start()
    searching.join(30.0)
    assert searching.exitcode == answering._TERMINATED and group_is_gone(searching.pid or 0)


@pytest.mark.slow
def test_a_search_that_takes_long_shows_the_best_plan_so_far_and_goes_on(client: FlaskClient):
    events = asked(client, model="llama3-8b", cluster="h100-80", nodes="4")
    answers = [event for event in events if event["kind"] == "answer"]
    assert [event["final"] for event in answers] == [False] * (len(answers) - 1) + [True] and len(answers) > 1
    assert "The search was not finished (it goes on after " in answers[0]["html"]
    assert "The search was not finished" not in answers[-1]["html"]
    assert any(event["kind"] == "progress" and "layouts open" in event["text"] for event in events)


@pytest.mark.slow
def test_while_nothing_fits_the_page_says_by_how_much_the_smallest_that_was_tried_misses(client: FlaskClient):
    events = asked(client, model="gpt-oss-120b", cluster="h100-80", nodes="4", fix="pp=4", seq_len="32k")
    refused = [event["lines"] for event in events if event["kind"] == "refused"]
    assert [lines[0].partition(":")[0] for lines in refused] == ["no plan yet", "no plan", "no plan"]
    misses = [float(re.findall(r"([\d.]+) GiB more than the", lines[1])[0]) for lines in refused]
    assert misses[0] >= misses[1] == misses[2] > 0


def test_a_better_plan_is_shown_whenever_a_search_that_goes_on_has_one(monkeypatch: pytest.MonkeyPatch):
    now_s, shown_s = 0.0, list[float]()
    monkeypatch.setattr(answering.time, "monotonic", lambda: now_s)
    watch = answering._SplittingWatch(read_question(["tiny-llama"]), lambda _: None)
    monkeypatch.setattr(watch, "_split", shown_s.append)
    better_at_s = {0.0: math.inf, 2.0: 3.94, 26.0: 3.7, 27.0: 3.6, 35.0: 3.37}
    for step in range(200):
        now_s = 0.5 * step
        best = min(best for after_s, best in better_at_s.items() if now_s >= after_s)
        watch(lambda best=best: SearchProgress(best=best))
    assert shown_s == [1.0, 3.0, 26.0, 33.0, 41.5], "at once or soon, and each but once"
    watch.stay_whole()
    now_s = 200.0
    watch(lambda: SearchProgress(best=1.0))
    assert len(shown_s) == 5, "what is searched for afterwards is not the answer"


def test_a_search_obeys_its_time_limit(client: FlaskClient):
    final = asked(client, **LONG, more="--time-limit 1")[-1]
    assert final["kind"] == "answer" and "stopped after 1 s" in final["html"]


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment."""
    found = list[int]()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile
            if mark.encode() in place.read_bytes():
                found.append(int(place.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are looked for in /proc")
@pytest.mark.parametrize("number", rest_is_slow([signal.SIGINT, signal.SIGTERM]))
def test_the_server_listens_here_alone_and_ends_with_all_that_it_has_started(number: signal.Signals, tmp_path: Path):
    mark = f"AUTOSHARD_TEST_{secrets.token_hex(8)}=1"
    env = {**os.environ, "PYTHONPATH": str(ROOT), mark.removesuffix("=1"): "1"}
    command = [sys.executable, "-m", "autoshard.cli", "explore"]
    quiet = [*command, "tiny-llama", "--no-open"]
    pipe = subprocess.PIPE
    with subprocess.Popen(quiet, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/[\w-]{20,}/)", process.stdout.readline().strip())
        assert found
        taken = subprocess.run([*command, "--port", found[2]], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert (taken.returncode, taken.stdout) == (2, "")
        assert taken.stderr.startswith(f"autoshard: --port {found[2]}: cannot be used: Address already in use")
        asks = Request(f"{found[1]}a/answer", json.dumps(LONG).encode(), {"Content-Type": "application/json"})
        with urlopen(asks) as answer:
            kinds = [json.loads(answer.readline())["kind"] for _ in range(2)]
        assert kinds == ["question", "progress"]
        with urlopen(asks) as answer:
            answer.readline()
            answer.readline()
            process.send_signal(number)
            _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
    end_s = time.monotonic() + 120
    while marked(mark) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert not marked(mark)


def test_without_flask_a_line_says_what_to_install(typed: Typed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "autoshard.commands.exploring.serving")
    monkeypatch.setitem(sys.modules, "flask", None)
    assert typed.refusal("explore") == "autoshard: explore: needs Flask. Type: pip install 'autoshard[page]'\n"


def test_a_port_that_cannot_be_is_refused(typed: Typed):
    assert typed.refusal("explore --port 70000") == "autoshard: --port: must be 0 to 65535, not 70000\n"


def show_two_early_answers(
    send: Callable[[Any], None], send_early: Callable[[Any], None], length: int, all_read: Path
) -> None:
    """As two halves of a search do that stopped at two moments, and have their answers at the same one."""
    for letter in "ab":
        if not os.fork():
            for _ in range(8):
                send_early({"kind": "answer", "final": False, "html": letter * length})
            os._exit(0)
    os.wait()
    os.wait()
    while not all_read.exists():
        time.sleep(0.01)
    send({"kind": "answer", "final": True, "html": "c"})


def test_early_answers_that_come_at_once_are_each_whole(tmp_path: Path):
    all_read, early = tmp_path / "all read", list[str]()
    with closing(Searches()) as searches:
        for event in searches.events("a", show_two_early_answers, 3_000_000, all_read):
            if not event["final"]:
                early.append(event["html"])
            if len(early) == 16:
                all_read.touch()
    assert sorted(early) == ["a" * 3_000_000] * 8 + ["b" * 3_000_000] * 8
