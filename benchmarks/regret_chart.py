"""The chart docs/regret.svg: what each way to choose costs in each sweep, as bars in a table; light and dark."""

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from autoshard.calibration.choices import BUT, EVERY, PLANNER, Choices
from benchmarks.pages import ROOT

CHART = ROOT / "docs" / "regret.svg"
_TITLE = "Mean regret: how much longer the chosen layout takes than the fastest one that was measured"
_NOTE = "Layouts of others' sweeps; autoshard predicts each by a fit without its group or model. Bars end at 20%."
_MOST = 0.2  # regret at which a bar ends, in an arrow
_LEFT, _COLUMN, _BAR, _ROW, _TOP, _MARGIN = 350, 126, 68, 30, 84, 20
_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_STYLE = f"""
text {{ font: 13px {_FONT}; fill: #24292f }}
.title {{ font-size: 15px; font-weight: 600 }}
.head, .note {{ font-size: 12px; fill: #57606a }}
.planner {{ font-weight: 600 }}
.page {{ fill: #ffffff }}
.line {{ stroke: #d0d7de }}
.bar {{ fill: #afb8c1 }}
.planner-bar {{ fill: #0969da }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3 }}
  .head, .note {{ fill: #9198a1 }}
  .page {{ fill: #0d1117 }}
  .line {{ stroke: #3d444d }}
  .bar {{ fill: #656c76 }}
  .planner-bar {{ fill: #4493f8 }}
}}
"""


def chart(found: Sequence[Choices], words: Mapping[str, str]) -> str:
    """Return an SVG of all regrets: a row for each way to choose, the best of all first, and a column for each set."""
    regrets = {(one.who, one.set): one.regret for one in found if one.regret is not None}
    sets = list(dict.fromkeys(name for _, name in regrets))
    whos = sorted(dict.fromkeys(who for who, _ in regrets), key=lambda who: regrets[who, EVERY])
    width, height = _LEFT + _COLUMN * len(sets) + _MARGIN, _TOP + _ROW * len(whos) + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(_TITLE)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
        _text(_MARGIN, 30, _TITLE, "title"),
        *(_text(_LEFT + _COLUMN * number, 60, head, "head") for number, head in enumerate(map(_head, sets))),
        _line(_TOP - 14, width),
        *(line for number, who in enumerate(whos) for line in _row(number, who, words[who], sets, regrets)),
        _line(_TOP + _ROW * len(whos) - 4, width),
        _text(_MARGIN, height - 14, _NOTE, "note"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _head(name: str) -> str:
    """Return the name of a column.

    >>> _head("nanotron_h100"), _head(EVERY), _head("all but nanotron_h100")
    ('nanotron, H100', 'all sweeps', 'all but nanotron')
    """
    program, _, chip = name.removeprefix(BUT).partition("_")
    if name.startswith(BUT):
        return f"all but {program}"
    return "all sweeps" if name == EVERY else f"{program}, {chip.upper()}"


def _row(
    number: int, who: str, words: str, sets: Sequence[str], regrets: Mapping[tuple[str, str], float | None]
) -> Iterator[str]:
    y, mark = _TOP + _ROW * number, "planner" if who == PLANNER else ""
    yield _text(_MARGIN, y + 14, words, mark)
    for column, name in enumerate(sets):
        x, regret = _LEFT + _COLUMN * column, regrets[who, name] or 0.0
        length = max(1.0, _BAR * min(regret, _MOST) / _MOST)
        bar = "planner-bar" if who == PLANNER else "bar"
        shape = f"M{x} {y + 2}h{length:.1f}v16h-{length:.1f}z"
        if regret > _MOST:  # an arrow: it goes on
            shape = f"M{x} {y + 2}h{_BAR - 8}l8 8l-8 8h-{_BAR - 8}z"
        yield f'<path class="{bar}" d="{shape}"/>'
        yield _text(x + length + 6, y + 14, f"{regret:.1%}" if regret < 1 else f"{regret:.0%}", mark)


def _text(x: float, y: float, words: str, mark: str) -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{mark}{chr(34)}" if mark else ""}>{escape(words)}</text>'


def _line(y: float, width: float) -> str:
    return f'<path class="line" d="M{_MARGIN} {y}H{width - _MARGIN}"/>'
