"""Charts as inline SVG: points with a frontier, lines with a band, heat maps, and bars of parts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from autoshard.report.page.elements import Content, Markup, tag
from autoshard.units import counted, format_seconds

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 20, 24, 44
_ROOM = 0.06  # of the range that stays free at both ends
_MOST_COLOURS = 8
_MOST_DOTS = 60  # of a line, which show where it was measured
_DECADE = 10
_TOUCHING = 10  # dots with a label that are no further apart share it
_NAME_BASE = 12  # on which the name of the axis upwards stands
_LINE = 14  # the height of a label
_CLOSE = 12  # labels and dots whose lines are no further apart meet
_MOST_LINES = 3  # between a dot and its label
_LETTER = 8  # the width of a digit, at most
_NARROW = 7  # of a letter in a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What a direction of a chart shows; ``text`` writes a number of it."""

    name: str
    text: Callable[[float], str]
    log: bool = False
    from_zero: bool = False
    whole: bool = False  # numbers between two whole ones mean nothing
    ticks: tuple[float, ...] = ()  # where these numbers stand; round ones if there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point of a chart; ``tip`` is shown under the pointer, ``label`` always."""

    x: float
    y: float
    tip: str
    kind: str = "other"  # its CSS class
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named line through points, from left to right."""

    name: str
    points: Sequence[Dot]
    kind: str = ""  # its CSS class where it is no series like the others
    joined: bool = True  # whether a line joins the points


@dataclass(frozen=True, slots=True)
class _Scale:
    """From numbers to a range of pixels."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, axis: Axis, values: Iterable[float], start: float, end: float) -> "_Scale":
        numbers = [math.log10(value) if axis.log else value for value in values] or [0.0, 1.0]
        low, high = min(numbers), max(numbers)
        room = _ROOM * (high - low) or 0.05 * abs(high) or 1.0
        bottom = 0.0 if axis.from_zero else low - room
        return cls(axis, bottom, high + room, start, end)

    def __call__(self, value: float) -> float:
        number = math.log10(value) if self.axis.log else value
        share = (number - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        """Round numbers, about five; on a logarithmic axis over a small range as on a linear one."""
        if self.axis.ticks:
            return list(self.axis.ticks)
        low, high = (10.0**self.low, 10.0**self.high) if self.axis.log else (self.low, self.high)
        if self.axis.log and high > _DECADE * low:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            steps = (1, 2, 5) if high < _DECADE**2 * low else (1,)
            ticks = [step * 10.0**power for power in powers for step in steps]
            return [tick for tick in ticks if low <= tick <= high]
        rough = max((high - low) / 5, 1.0 if self.axis.whole else 0.0)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
        return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Where a label stands, or a dot lies; ``base`` is the line that letters stand on."""

    start: float
    end: float
    base: float
    text: str = ""
    side: str = ""

    def meets(self, box: "_Box") -> bool:
        """Whether one lies over the other."""
        return self.start < box.end and box.start < self.end and abs(self.base - box.base) < _CLOSE

    @property
    def drawn(self) -> Markup:
        """The label."""
        return tag("text", self.text, x=self.start if self.side == "start" else self.end, y=self.base, class_=self.side)


def _around(dot: tuple[float, float]) -> _Box:
    return _Box(start=dot[0] - 5, end=dot[0] + 5, base=dot[1] + 5)


def _frame(x: _Scale, y: _Scale) -> list[Markup]:
    """Return the grid, the numbers and the names of both axes."""
    lines: list[Markup] = []
    for tick in y.ticks:
        lines.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(tick), y2=y(tick), class_="grid"))
        lines.append(tag("text", y.axis.text(tick), x=_LEFT - 6, y=y(tick) + 4, class_="end"))
    end = 0.0
    for tick in x.ticks:
        lines.append(tag("line", x1=x(tick), x2=x(tick), y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="grid"))
        half = _LETTER * len(text := x.axis.text(tick)) / 2
        if x(tick) - half >= end and x(tick) + half <= _WIDTH:  # else it would lie over the one before, or be cut
            lines.append(tag("text", text, x=x(tick), y=_HEIGHT - _BOTTOM + 16, class_="middle"))
            end = x(tick) + half
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(tag("text", x.axis.name, x=middle, y=_HEIGHT - 6, class_="middle axis"))
    lines.append(tag("text", y.axis.name, x=4, y=_NAME_BASE, class_="axis"))
    return lines


def _figure(title: str, about: str, content: Content, legend: Content = None) -> Markup:
    svg = tag("svg", content, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=f"{title}: {about}")
    return tag("figure", tag("figcaption", title), svg, legend, class_="chart")


def _dots(points: Iterable[Dot], x: _Scale, y: _Scale) -> tuple[list[Markup], list[Markup]]:
    """Return points and labels; points at one place are one dot, and labelled dots that touch share a label."""
    places = dict[tuple[float, float], list[Dot]]()
    for point in points:
        places.setdefault((x(point.x), y(point.y)), []).append(point)
    dots, names = list[Markup](), dict[tuple[float, float], list[str]]()
    for (across, down), here in places.items():
        labels = [point.label for point in here if point.label]
        tip = "; ".join(dict.fromkeys(point.tip for point in here))
        size = 5 if labels else 3.5
        dots.append(tag("circle", cx=across, cy=down, r=size, class_=here[-1].kind, data_tip=tip))
        if labels:
            near = (at for at in names if math.dist(at, (across, down)) < _TOUCHING)
            names.setdefault(next(near, (across, down)), []).extend(labels)
    boxes = [_Box(start=0, end=_NARROW * len(y.axis.name), base=_NAME_BASE)]
    for at, texts in names.items():
        text = ", ".join(dict.fromkeys(texts))
        boxes.append(_label_box(at, text, [*boxes, *(_around(place) for place in names)]))
    return dots, [box.drawn for box in boxes[1:]]


def _label_box(at: tuple[float, float], text: str, taken: Sequence[_Box]) -> _Box:
    """Return the first place beside a dot, then below and above, where a label covers nothing and is not cut."""
    (across, down), width = at, _NARROW * len(text)
    sides = {"start": across + 8, "end": across - 8 - width}
    away = sorted(range(-_MOST_LINES, _MOST_LINES + 1), key=lambda lines: (abs(lines), -lines))
    boxes = [
        _Box(text=text, side=side, start=start, end=start + width, base=max(_NAME_BASE, down - 8 + lines * _LINE))
        for lines, (side, start) in product(away, sides.items())
    ]
    inside = [box for box in boxes if box.start >= _LEFT and box.end <= _WIDTH]
    inside = [box for box in inside if box.base < _HEIGHT - _BOTTOM]
    return next((box for box in inside if not any(map(box.meets, taken))), (inside or boxes)[0])


def scatter(title: str, points: Sequence[Dot], x_axis: Axis, y_axis: Axis) -> Markup:
    """Return points, those with labels on top, and the frontier of those that nothing betters in both directions."""
    x = _Scale.over(x_axis, [dot.x for dot in points], _LEFT, _WIDTH - _RIGHT)
    y = _Scale.over(y_axis, [dot.y for dot in points], _HEIGHT - _BOTTOM, _TOP)
    best = pareto_points([(dot.x, dot.y) for dot in points])
    path = "".join(
        f"{'H' if number else 'M'}{x(a)}{'V' if number else ' '}{y(b)}" for number, (a, b) in enumerate(best)
    )
    about = f"{counted(len(points), 'point')}, {len(best)} on the frontier"
    ordered = sorted(points, key=lambda dot: bool(dot.label))
    return _figure(title, about, [_frame(x, y), tag("path", d=path, class_="frontier"), *_dots(ordered, x, y)])


def pareto_points(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other equals or betters in both numbers, where less is better.

    >>> pareto_points([(1, 5), (2, 3), (3, 4), (2, 3), (4, 1)])
    [(1, 5), (2, 3), (4, 1)]
    """
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_axis: Axis,
    y_axis: Axis,
    *,
    band: tuple[float, float] | None = None,
    band_name: str = "",
) -> Markup:
    """Return lines over one axis, with a ``band`` of values behind them."""
    dots = [dot for line in lines for dot in line.points]
    x = _Scale.over(x_axis, [dot.x for dot in dots], _LEFT, _WIDTH - _RIGHT)
    y = _Scale.over(y_axis, [*(dot.y for dot in dots), *(band or ())], _HEIGHT - _BOTTOM, _TOP)
    drawn: list[Content] = []
    if band:
        top = y(band[1])
        drawn.append(
            tag("rect", x=_LEFT, width=_WIDTH - _LEFT - _RIGHT, y=top, height=round(y(band[0]) - top, 1), class_="band")
        )
    for number, line in enumerate(lines):
        kind = line.kind or f"line c{number % _MOST_COLOURS}"
        path = "".join(f"{'L' if place else 'M'}{x(dot.x)} {y(dot.y)}" for place, dot in enumerate(line.points))
        if line.joined:
            drawn.append(tag("path", d=path, class_=kind))
        close = " close" if line.joined and len(line.points) > _MOST_DOTS else ""  # what is pointed at is not seen
        drawn.append([tag("circle", cx=x(dot.x), cy=y(dot.y), r=3.5, class_=kind + close, data_tip=dot.tip)
                      for dot in line.points if dot.tip])  # fmt: skip
    names = {line.name: line.kind or f"c{number % _MOST_COLOURS}" for number, line in enumerate(lines)}
    names |= {band_name: "band"} if band else {}
    about = "; ".join(line.name for line in lines)
    return _figure(title, about, [_frame(x, y), drawn], legend(names) if len(names) > 1 else None)


def legend(names: Mapping[str, str]) -> Markup:
    """Return what colours mean: name -> CSS class."""
    return tag("ul", (tag("li", tag("i", class_=kind), name) for name, kind in names.items()), class_="legend")


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], Dot],
    names: tuple[str, str],
    *,
    less_is_better: bool = True,
) -> Markup:
    """Return a table whose cells are shaded by ``y`` of their points: the best is darkest; ``label`` stands in it."""
    values = [point.y for point in cells.values()]
    low, high = min(values), max(values)

    def cell(point: Dot | None) -> Markup:
        if point is None:
            return tag("td", "-", class_="none")
        share = (point.y - low) / (high - low) if high > low else 0.0
        good = 1 - share if less_is_better else share
        return tag("td", point.label, data_tip=point.tip, class_="shade", style=f"--good:{good:.2f}")

    head = tag("tr", tag("th", f"{names[0]} \\ {names[1]}"), (tag("th", column, scope="col") for column in columns))
    body = (
        tag("tr", tag("th", row, scope="row"), (cell(cells.get((row, column))) for column in columns)) for row in rows
    )
    whole = tag("table", tag("caption", title), tag("thead", head), tag("tbody", body), class_="heat")
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=title)


def step_charts(
    losses: Iterable[tuple[int, float | None]],
    times: Iterable[tuple[int, float]],
    prediction: tuple[float, float, float] | None,
) -> Markup:
    """Return the losses and the times of steps; ``prediction`` says what a step takes, at least and at most.

    A loss that is not finite is None, and no point.
    """
    number, charts = Axis(name="step", text="{:g}".format, whole=True), list[Markup]()
    points = [Dot(x=step, y=loss, tip=f"step {step}: {loss:.4f}") for step, loss in losses if loss is not None]
    measured = [Dot(x=step, y=time_s, tip=f"step {step}: {format_seconds(time_s)}") for step, time_s in times]
    if points:
        axis = Axis(name="", text=lambda value: f"{value:.3g}")
        charts.append(line_chart("Loss", [Line(name="loss", points=points, kind="line measured")], number, axis))
    if measured:
        lines, axis = [Line(name="measured", points=measured, kind="line measured")], Axis(name="", text=format_seconds)
        if prediction:
            ends = [Dot(x=dot.x, y=prediction[0], tip="") for dot in (measured[0], measured[-1])]
            lines.append(Line(name="predicted", points=ends, kind="line predicted"))
        band = prediction and prediction[1:]
        charts.append(line_chart("Step time", lines, number, axis, band=band, band_name="interval of the prediction"))
    return tag("div", charts, class_="charts")
