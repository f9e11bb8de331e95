"""Pages in a real browser: no error, no request, and what one points at, zooms, switches and prints works."""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from autoshard.cost.timeline import timeline_of
from autoshard.report.page.charts import Axis, Dot, Line, line_chart, scatter
from autoshard.report.page.document import document
from autoshard.report.page.elements import tag
from autoshard.units import format_seconds
from tests.report.page.browser import PROGRAM, Tab, browser
from tests.report.page.pages import QUESTIONS, page_of, plan_named, written_page
from tests.slower import covering

STYLES = resources.files("autoshard.report.page").joinpath("page.css").read_text(encoding="utf-8").splitlines()
LEAST_APART = 12  # of two colours in CIE Lab; 2 are just told apart side by side

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian's package chromium)"),
]


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(Path(folder)) as opened:
        yield opened


@pytest.fixture
def dense(tab: Tab, tmp_path: Path) -> Iterator[Tab]:
    """The page of the dense plan; whatever it does, its console stays silent."""
    tab.open(written_page("dense", tmp_path))
    yield tab
    assert not tab.errors


def seen(tab: Tab) -> tuple[float, float]:
    """Which part of the first timeline is in view: where it starts, and its length, as shares."""
    box = tab.value("(({x, width}) => [x, width])(document.querySelector('.stage svg').viewBox.baseVal)")
    units = tab.value("+document.querySelector('.timeline').dataset.units")
    return box[0] / units, box[1] / units


@pytest.mark.parametrize(("name", "width"), covering(QUESTIONS, [1280, 400]))
def test_a_page_opens_without_a_word_on_the_console_and_fits_its_window(
    name: str, width: int, tab: Tab, tmp_path: Path
):
    tab.open(written_page(name, tmp_path), width)
    assert tab.value("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    wide = "[...document.querySelectorAll('section > *')].filter(one => one.getBoundingClientRect().right > innerWidth)"
    assert tab.value(f"{wide}.length") == 0
    assert tab.value("document.querySelectorAll('section').length") == 9
    assert tab.value("document.querySelectorAll('.stage path[data-stage]').length") > 0
    assert not tab.errors


def test_a_long_word_is_broken_where_the_window_ends(tab: Tab, tmp_path: Path):
    plan, word = plan_named("dense"), "name_of_a_function_" * 5
    record = json.loads(plan.provenance["search"])
    for answer in record["answers"]:
        answer |= {"source": f"https://example.com/recipes.py ({word})", "why": word}
    long = replace(plan.model, name=word)
    page = tmp_path / "long.html"
    text = page_of(replace(plan, model=long, provenance={**plan.provenance, "search": json.dumps(record)}))[0]
    page.write_text(text, encoding="utf-8")
    assert f"({word})" in text
    tab.open(page, 400)
    assert tab.value("document.documentElement.scrollWidth") <= 400, "the page scrolls sideways"


def test_pointing_at_an_action_names_it_with_its_time(dense: Tab):
    plan = plan_named("dense")
    rank = timeline_of(plan).ranks[0]
    tips = [dense.point(".stage g[data-rank='0'] path[data-stage]", place / 20) for place in range(20)]
    assert sum(map(bool, tips)) > 10  # others lie between two actions
    for tip in filter(None, tips):
        found = re.match(r"([FB])0\.(\d+): (?:for|back)ward of micro-batch \2, stage 0, rank 0;.* from (.*) (m?s)", tip)
        assert found, tip
        which = [*zip(rank.kinds, rank.micro_batches.tolist(), strict=True)].index((found[1], int(found[2])))
        start_s = float(found[3]) * {"ms": 1e-3, "s": 1.0}[found[4]]
        assert start_s == pytest.approx(rank.start_s[which], rel=2e-3, abs=1e-2)
    first = dense.point(".stage g[data-rank='0'] path.F", 0.0005)
    assert first.startswith("F0.0: ") and first.endswith("from 0 s")
    assert plan.prediction
    compute = dense.point("#time ~ svg.bar rect.t-compute")
    assert compute.startswith(f"compute: {format_seconds(plan.prediction.time_parts['compute'])}")
    dense.ask("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert dense.value("document.getElementById('tip').hidden")


def test_pointing_at_a_rank_outlines_its_group(dense: Tab):
    plan = plan_named("dense")
    tip = dense.point(".cells i[data-rank='3']")
    assert tip.startswith("rank 3: ")
    chosen = dense.value("document.querySelector('[name=axis]:checked').parentNode.textContent.trim()")
    outlined = dense.value("[...document.querySelectorAll('.cells i.same')].map(one => +one.dataset.rank)")
    assert sorted(outlined) == sorted(plan.mesh.group_of(3, chosen))
    other = dense.value("[...document.querySelectorAll('[name=axis]')].find(one => !one.checked).click()")
    assert other is None
    dense.point(".cells i[data-rank='3']")
    chosen = dense.value("document.querySelector('[name=axis]:checked').parentNode.textContent.trim()")
    outlined = dense.value("[...document.querySelectorAll('.cells i.same')].map(one => +one.dataset.rank)")
    assert sorted(outlined) == sorted(plan.mesh.group_of(3, chosen))


def test_the_timeline_zooms_and_moves_by_buttons_keys_and_pointer(dense: Tab):
    assert seen(dense) == pytest.approx((0, 1))
    dense.value("document.querySelector('[data-zoom=in]').click()")
    assert seen(dense) == pytest.approx((0.25, 0.5))
    ticks = dense.value("[...document.querySelectorAll('.ticks span')].map(one => one.textContent)")
    assert len(ticks) >= 2 and len(set(ticks)) == len(ticks)
    dense.value("document.querySelector('.stage').focus()")
    dense.press("ArrowRight")
    assert seen(dense) == pytest.approx((0.375, 0.5))
    dense.press("-")
    assert seen(dense) == pytest.approx((0, 1))
    dense.press("+")
    dense.press("0")
    assert seen(dense) == pytest.approx((0, 1))
    box = dense.value("document.querySelector('.stage').getBoundingClientRect().toJSON()")
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 20}
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            dense.ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=count, **middle)
    assert seen(dense) == pytest.approx((0.3, 0.4), abs=1e-3)
    dense.ask("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **middle)
    moved = {**middle, "x": middle["x"] + box["width"] / 4}
    dense.ask("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **moved)
    dense.ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", **moved)
    assert seen(dense) == pytest.approx((0.2, 0.4), abs=1e-3)


def test_the_theme_switches_and_follows_the_system(dense: Tab):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = dense.value(colour)
    dense.value("document.getElementById('theme').click()")
    dark = dense.value(colour)
    assert light != dark
    dense.value("document.getElementById('theme').click()")
    assert dense.value(colour) == light
    dense.value("document.documentElement.className = ''")
    dense.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert dense.value(colour) == dark
    dense.ask("Emulation.setEmulatedMedia", features=[])


def test_a_page_is_printed_whole_without_its_buttons(dense: Tab):
    pdf = dense.printed()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    colour = "getComputedStyle(document.body).backgroundColor"
    light = dense.value(colour)
    dense.value("document.documentElement.className = 'dark'")
    dense.ask("Emulation.setEmulatedMedia", media="print")
    assert dense.value(colour) == light, "paper is white"
    dense.resize(718)  # A4 between its margins
    assert dense.value("document.documentElement.scrollWidth") <= 718, "paper does not scroll"
    assert dense.value("getComputedStyle(document.querySelector('header')).display") == "none"
    assert dense.value("getComputedStyle(document.querySelector('.zoom')).display") == "none"
    dense.ask("Emulation.setEmulatedMedia", media="")


def test_everything_that_acts_has_a_name_and_can_be_reached_by_keys(dense: Tab):
    tree = dense.ask("Accessibility.getFullAXTree")["nodes"]
    acting = [one for one in tree if one.get("role", {}).get("value") in ("button", "link", "radio", "image", "img")]
    assert acting and all(one["name"]["value"] for one in acting if not one["ignored"])
    assert dense.value("[...document.querySelectorAll('button, a, input, .stage')].every(one => one.tabIndex >= 0)")
    levels = dense.value("[...document.querySelectorAll('h1, h2')].map(one => one.tagName)")
    assert levels == ["H1"] + ["H2"] * 9


@pytest.mark.parametrize("width", [1280, 400])
def test_no_text_of_a_chart_lies_over_another_or_outside(width: int, tab: Tab, tmp_path: Path):
    few = Axis(name="the name of an axis", text=format_seconds)
    nodes = Axis(name="nodes", text="{:g}".format, ticks=tuple(range(1000, 1040)))
    dots = [Dot(x=1000 + place, y=1e-3 * (1.0 + place), tip="", label=f"plan {place}") for place in (0, 39)]
    places = {"fastest": (3.37, 77.4), "fsdp": (3.73, 78.1), "simple": (3.49, 79.0), "plan": (3.49, 79.0)}
    close = [Dot(x=x, y=y, tip="", label=name) for name, (x, y) in places.items()]
    drawn = [scatter("a", [replace(dots[0], label="four plans, " * 3), dots[1]], nodes, few),
             line_chart("b", [Line(name="one", points=dots)], few, few), scatter("c", close, few, few)]  # fmt: skip
    page = tmp_path / "page.html"
    page.write_text(document("charts", [("charts", "Charts", tag("div", drawn, class_="charts"))]), encoding="utf-8")
    tab.open(page, width)
    boxes = """[...document.querySelectorAll('.chart svg')].map((chart) => {
      const whole = chart.getBoundingClientRect(), texts = [...chart.querySelectorAll('text')];
      const all = texts.map((one) => [one.textContent, one.getBoundingClientRect()]);
      const across = (a, b) => a.left < b.right && b.left < a.right;
      const hit = ([, a], [, b]) => across(a, b) && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
      return all.filter((one, n) => one[1].left < whole.left || one[1].right > whole.right
        || all.some((other, m) => m > n && hit(one, other))).map(([text]) => text);
    })"""
    assert tab.value(boxes) == [[], [], []]
    assert tab.value("document.querySelectorAll('.chart')[2].querySelectorAll('circle').length") == 3


def test_a_step_of_128_micro_batches_stays_smooth(tab: Tab, tmp_path: Path):
    text, _ = page_of(plan_named("long", "fastest"), plan_named("dense", "fastest"))
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    tab.open(page)
    frames = tab.value("""new Promise((done) => {
      const times = []; let last = performance.now(), count = 0;
      const frame = (now) => {
        times.push(now - last); last = now;
        document.querySelector(`[data-zoom=${["in", "right", "left", "out"][count % 4]}]`).click();
        if (++count < 40) requestAnimationFrame(frame); else done(times.slice(1));
      };
      requestAnimationFrame(frame);
    })""")
    assert sorted(frames)[len(frames) // 2] < 100, f"milliseconds between frames: {json.dumps(frames)}"
    assert not tab.errors


def lightness_and_hue(colour: list[int]) -> np.ndarray:
    """A colour in CIE Lab, where equal distances look alike (sRGB under D65)."""
    linear = np.array(
        [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in np.array(colour) / 255]
    )
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (
        share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116
        for share in to_xyz @ linear / (0.95047, 1.0, 1.08883)
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_parts_of_memory_are_told_apart_by_their_colours(dense: Tab):
    names = sorted(
        {name for entry in STYLES for name in re.findall(r"\.(m-[a-z]+)", entry)} - {"m-host"}
    )  # that of moving
    drawn = f"""{json.dumps(names)}.map((name) => {{
      const at = document.createElement("i"), brush = document.createElement("canvas").getContext("2d");
      at.className = name;
      document.querySelector(".legend").append(at);
      brush.fillStyle = getComputedStyle(at).backgroundColor;
      at.remove();
      brush.fillRect(0, 0, 1, 1);
      return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }})"""
    assert len(names) > 12
    for scheme in ("light", "dark"):
        dense.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours = dict(zip(names, map(lightness_and_hue, dense.value(drawn)), strict=True))
        near = {pair: float(np.linalg.norm(colours[pair[0]] - colours[pair[1]])) for pair in combinations(names, 2)}
        assert not {pair: apart for pair, apart in near.items() if apart < LEAST_APART}, scheme
    dense.ask("Emulation.setEmulatedMedia", features=[])
