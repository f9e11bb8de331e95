"""``autoshard explore`` in a real browser: by keyboard, at every width, without a word on the console or to others."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from werkzeug.serving import make_server

from autoshard.commands.exploring.asking import Controls
from autoshard.commands.exploring.searching import Searches
from autoshard.commands.exploring.serving import ADDRESS, QuietRequestHandler, explorer_app
from tests.report.page.browser import PROGRAM, Tab, browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian's package chromium)"),
]
FIRST = Controls(model="tiny-llama", cluster="h100-80", fix="pp=1")
ANSWERED = "document.querySelector('#{pane} .status').textContent.startsWith('answered')"
FOCUS = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server that runs in a thread."""
    with closing(Searches()) as searches:
        searches.warm_up()
        app = explorer_app("a-token", FIRST, searches)
        server = make_server(ADDRESS, 0, app, threaded=True, request_handler=QuietRequestHandler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{ADDRESS}:{server.port}/a-token/"
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def window() -> Iterator[Tab]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(Path(folder)) as opened:
        yield opened


@pytest.fixture
def tab(window: Tab, address: str) -> Iterator[Tab]:
    """The page with its first answer; whatever it does, its console stays silent, and it asks its own server alone."""
    window.home = (address, "data:")
    window.visit("data:,")
    window.visit(address)
    window.wait_for(ANSWERED.format(pane="a"))
    yield window
    assert not window.errors


def typed(tab: Tab, keys: str) -> None:
    for key in keys:
        tab.press(key)


def go_to(tab: Tab, place: str) -> list[str]:
    """Press Tab until something has the focus; return what had it on the way."""
    way = list[str]()
    while (focus := tab.value(FOCUS)) != place:
        way.append(focus)
        assert len(way) < 60, f"{place} is not on the way: {way}"
        tab.press("Tab")
    return way


def fits(tab: Tab) -> None:
    for width, scheme in product((1440, 1280, 400), ("light", "dark")):
        tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.resize(width)
        assert tab.value("document.documentElement.scrollWidth") <= width, (width, scheme)
        assert tab.value("document.querySelectorAll('#a .stage path[data-stage]').length") > 0, (width, scheme)
        wide = "[...document.querySelectorAll('.pane, .pane section, form, .control')].filter((one) =>"
        assert tab.value(f"{wide} one.getBoundingClientRect().right > innerWidth).length") == 0, (width, scheme)
    tab.ask("Emulation.setEmulatedMedia", features=[])


def test_the_page_fits_its_window_with_one_question_and_with_two(tab: Tab):
    fits(tab)
    tab.value("document.getElementById('compare').click()")
    tab.wait_for(ANSWERED.format(pane="b"))
    tab.wait_for("!!document.querySelector('#difference section')")
    fits(tab)
    ids = "[...document.querySelectorAll('[id]')].map((one) => one.id)"
    assert tab.value(f"new Set({ids}).size === {ids}.length"), "two panes, and no id twice"


def test_a_question_is_asked_and_its_answer_read_by_keyboard_alone(tab: Tab):
    way = go_to(tab, "a-nodes")
    assert way[-2:] == ["a-model", "a-cluster"] and "skip" in way and "theme" in way
    typed(tab, "2")
    tab.wait_for("document.querySelector('#a h1').textContent.includes('on 2 x h100-80')")
    tab.wait_for(ANSWERED.format(pane="a"))
    command = tab.value("document.querySelector('#a .command').textContent")
    assert command == "autoshard plan tiny-llama --cluster h100-80 --nodes 2 --fix pp=1"
    assert tab.value(FOCUS) == "a-nodes", "an answer does not take the focus away"
    way = go_to(tab, "stage")
    assert {"a-seq_len", "a-global_batch", "a-fix", "a-tokens", "a-choose", "a-more", "command", "copy"} <= set(way)
    tab.press("+")
    assert tab.value("document.querySelector('#a .stage svg').viewBox.baseVal.x") > 0


def test_a_refusal_stands_where_readers_hear_it_and_goes_with_the_next_answer(tab: Tab):
    go_to(tab, "a-fix")
    typed(tab, ",tp=3")
    tab.press("End")
    typed(tab, ",tp=3")
    tab.wait_for("document.querySelector('#a .status').classList.contains('refused')")
    assert "tp=3" in tab.value("document.querySelector('#a [role=status]').textContent")
    assert tab.value("getComputedStyle(document.querySelector('#a .result')).display") == "none"
    for _ in range(16):
        tab.press("End")
        tab.press("Backspace")
    tab.wait_for(ANSWERED.format(pane="a"))
    assert tab.value("getComputedStyle(document.querySelector('#a .result')).display") == "block"


def test_a_reason_stays_while_the_search_looks_for_what_helps(tab: Tab):
    refused = "takes.refused(panes[0], {final: false, lines: ['no plan', 'try']})"
    said = tab.value(f"{refused}; takes.progress(panes[0], {{text: 'searching'}}); panes[0].status.textContent")
    assert said == "no plan\ntry\nsearching"


def test_two_questions_stand_side_by_side_and_come_back_when_the_page_is_loaded_again(tab: Tab, address: str):
    go_to(tab, "compare")
    tab.press("Enter")
    assert tab.value(FOCUS) == "b-model"
    go_to(tab, "b-nodes")
    typed(tab, "2")
    tab.wait_for("document.querySelector('#difference').textContent.includes('different questions')")
    tab.wait_for("!document.getElementById('difference').hasAttribute('data-stale')")
    boxes = tab.value("[...document.querySelectorAll('.pane')].map((one) => one.getBoundingClientRect().x)")
    assert boxes[0] < boxes[1]
    where = tab.value("location.href")
    assert where.startswith(f"{address}#") and "b.nodes=2" in where
    tab.visit("data:,")
    tab.visit(where)
    tab.wait_for(ANSWERED.format(pane="b"))
    assert tab.value("document.querySelector('#b h1').textContent.includes('on 2 x h100-80')")
    assert tab.value("document.querySelector('#a h1').textContent.includes('on 1 x h100-80')")


def test_everything_that_acts_has_a_name(tab: Tab):
    tab.value("document.getElementById('compare').click()")
    tab.wait_for(ANSWERED.format(pane="b"))
    tree = [one for one in tab.ask("Accessibility.getFullAXTree")["nodes"] if not one["ignored"]]
    roles = ("button", "link", "textbox", "combobox", "spinbutton", "form", "region", "image", "img")
    acting = [one for one in tree if one.get("role", {}).get("value") in roles]
    names = [one["name"]["value"] for one in acting]
    assert len(names) > 40 and all(names)
    controls = [one["name"]["value"] for one in acting if one["role"]["value"] in ("textbox", "combobox", "spinbutton")]
    assert controls[:3] == ["model", "cluster", "nodes"] and len(controls) == 18
    headings = [one["name"]["value"] for one in tree if one.get("role", {}).get("value") == "heading"]
    assert sum(name.startswith("tiny-llama") for name in headings) == 2
    assert sum(one.get("role", {}).get("value") == "status" for one in tree) == 2


def test_what_is_pointed_at_in_either_answer_says_its_figures(tab: Tab):
    tab.value("document.getElementById('compare').click()")
    tab.wait_for(ANSWERED.format(pane="b"))
    for pane in "ab":
        tips = [tab.point(f"#{pane} .stage path[data-stage]", place / 20) for place in range(20)]
        assert any("of micro-batch" in tip for tip in tips)


def test_the_whole_page_of_an_answer_works_under_the_policy_of_the_server(tab: Tab, address: str):
    links = tab.value("[...document.querySelectorAll('#a .file')].map((one) => one.href)")
    assert links == [f"{address}a/plan.json", f"{address}a/report.html"]
    tab.visit(links[1])
    assert tab.value("document.querySelectorAll('section').length") == 9
    assert tab.value("document.querySelectorAll('.ticks span').length") > 1, "its script has run"
    colour = tab.value("getComputedStyle(document.querySelector('.stage path.F')).stroke")
    assert colour != "none", "and its style holds"


def test_a_command_is_copied_or_selected(tab: Tab):
    go_to(tab, "copy")
    tab.press("Enter")
    tab.wait_for("document.querySelector('#a .copy').textContent !== 'copy'")
    if tab.value("document.querySelector('#a .copy').textContent") == "selected":
        assert tab.value("getSelection().toString()") == tab.value("document.querySelector('#a .command').textContent")
