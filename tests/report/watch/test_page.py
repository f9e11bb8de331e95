"""The page of a watched run: its figures, and that it loads itself again in a browser."""

import json
import os
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.files import replace_text
from autoshard.report.watch.page import progress_page
from autoshard.report.watch.structured import progress_json
from tests.report.page.browser import PROGRAM, browser
from tests.report.page.pages import read
from tests.report.page.test_plan_page import at
from tests.report.watch.made_runs import FAR, FROM, NOW, at_work, made_run, seen, steps_of
from tests.runtime.cases import wait_until


def test_its_figures_are_those_of_the_json(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40, loss=lambda n: float("nan") if n == 39 else 3.0 - n / 50), host=FAR)
    kept = tmp_path / "checkpoints" / "step-00000030"
    kept.mkdir(parents=True)
    (kept / "index.json").write_bytes(bytes(24))
    now = seen(tmp_path)
    page, data = read(progress_page(now, 2.5)), json.loads(json.dumps(progress_json(now)))
    figures = page.every("data")
    for figure in figures:
        assert float(figure.attributes["value"]) == at(data, figure.attributes["data-path"])
    paths = {figure.attributes["data-path"] for figure in figures}
    assert {"last.loss", "left_s", "pace.step_time_s", "pace.ratio", "pace.tokens_per_s", "checkpoint.step"} <= paths
    text = page.whole_text
    for words in ("step 40 of 100 (40%)", "1.00, inside", "step 39: loss nan", "judged by the times"):
        assert words in text
    (loss, _) = page.every("svg")
    assert len(loss.every("circle")) == 39, "a loss that is no number is no point"


def test_it_loads_itself_again_until_the_run_is_over(tmp_path: Path) -> None:
    made_run(tmp_path, steps_of(40), host=FAR)
    at_work(tmp_path, 0, 41, "F0.0", host=FAR)
    silent = progress_page(seen(tmp_path, NOW + 500), 2.5)
    assert '<meta http-equiv="refresh" content="3"/>' in silent and "step 41, F0.0: computes" in silent
    made_run(tmp_path, steps_of(100), notes=(FROM, {"ended": "", "at": NOW}))
    assert "refresh" not in progress_page(seen(tmp_path), 2.5)


def test_a_run_that_has_not_begun_is_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "run").mkdir()
    out = tmp_path / "run.html"
    assert main(["watch", str(folder), "--once", "--html", str(out)]) == 0
    assert "not begun" in out.read_text() and "not begun" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["run.html"]
    assert main(["watch", str(folder), "--once", "--html", str(tmp_path / "no" / "x.html")]) == 2
    link, pipe = tmp_path / "link.html", tmp_path / "pipe"  # /dev/null is no file either, and must stay what it is
    link.symlink_to(out)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for other in (link, pipe):
        assert main(["watch", str(folder), "--once", "--html", str(other)]) == 0
    assert os.read(reading, 15) == b"<!doctype html>" and pipe.is_fifo() and link.is_symlink()
    os.close(reading)


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_next_picture_in_the_chosen_theme(tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    made_run(tmp_path / "run", steps_of(40), host=FAR)
    out.write_text(progress_page(seen(tmp_path / "run"), 1))
    with browser(tmp_path / "profile") as tab:
        tab.open(out, 400)
        tab.value("document.getElementById('theme').click()")
        theme = tab.value("document.documentElement.className")
        made_run(tmp_path / "run", steps_of(100), notes=(FROM, {"ended": "", "at": NOW}))
        replace_text(out, progress_page(seen(tmp_path / "run"), 1))  # a page that loads itself sees no half of it
        loaded = "document.readyState === 'complete' && document.title.startsWith('ended: step 100')"
        wait_until(lambda: tab.value(loaded), "the page is loaded again")
        assert theme and tab.value("document.documentElement.className") == theme
        assert tab.value("document.documentElement.scrollWidth") <= 400
        assert not tab.errors
