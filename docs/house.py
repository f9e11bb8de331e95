"""Draws the house of docs/developers/architecture.md: ``python docs/house.py`` writes ``docs/house.svg``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parent / "house.svg"
# A line per floor, the highest first, as in pyproject.toml: folders with what each holds.
FLOORS: tuple[Mapping[str, str], ...] = (
    {"commands": "one function per command; with cli, verbs and command_line"},
    {"sweep": "many questions or runs, one table"},
    {
        "runtime": "ranks, training loop, checkpoints, data, metrics",
        "report": "tables, pages, timelines, a run that is watched",
        "jobs": "files for Slurm, Kubernetes, torchrun",
    },
    {"exports": "plans as configurations of other programs"},
    {"imports": "configurations and logs of other programs"},
    {"calibration": "measured runs, and the constants fitted to them"},
    {"search": "the best plan, with a certificate", "modules": "torch modules without a card, read and run"},
    {"blocks": "the cheapest layout of every operation of a block"},
    {"cost": "seconds and bytes of a plan", "engine": "executes a plan: torch, or NxD on Trainium"},
    {"run": "what planner and engines both say of a run"},
    {"plan": "candidates, Rules, plan.json, proof"},
    {"schedule": "pipeline schedules as data, simulated"},
    {"layout": "which rank holds what; collectives"},
    {"graph": "one training step, on tensors with named dims"},
    {"spec": "models, clusters, workloads, kernels"},
)
GROUND = ("errors", "units", "files", "version", "extensions")
ENTRANCE = ("__main__", "cli", "verbs", "command_line", "commands")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What somebody comes for: its own folders, those to read before them, and those of which it uses a few names."""

    title: str
    folders: tuple[str, ...]
    reads: tuple[str, ...] = ()
    glances: tuple[str, ...] = ()


_BASE = ("spec", "graph", "layout", "schedule", "plan")
PRODUCTS = (
    Product(title="planner", folders=(*_BASE, "cost", "blocks", "search", "calibration")),
    Product(title="training run", folders=("run", "engine", "runtime"), reads=_BASE, glances=("cost", "modules")),
    Product(
        title="any module",
        folders=("modules",),
        reads=("spec", "graph", "layout", "blocks", "engine"),
        glances=("plan", "cost", "run"),
    ),
    Product(
        title="jobs and pages",
        folders=("report", "jobs", "sweep"),
        reads=("spec", "plan", "run", "cost"),
        glances=("layout", "schedule", "blocks", "search", "calibration", "runtime", "imports", "exports", "modules"),
    ),
    Product(
        title="other programs",
        folders=("imports", "exports"),
        reads=("spec", "plan"),
        glances=("cost", "search", "calibration"),
    ),
)

_NAMES, _WORDS, _MARKS, _COLUMN, _ROW, _TOP, _MARGIN = 20, 130, 490, 118, 26, 74, 20
_WIDTH = _MARKS + _COLUMN * len(PRODUCTS) + _MARGIN
_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_STYLE = f"""
text {{ font: 13px {_FONT}; fill: #24292f }}
.title {{ font-size: 15px; font-weight: 600 }}
.name, .head {{ font-weight: 600 }}
.note {{ font-size: 12px; fill: #57606a }}
.page {{ fill: #ffffff }}
.line {{ stroke: #d0d7de }}
.folder {{ fill: #0969da }}
.read {{ fill: #57606a }}
.glance {{ fill: none; stroke: #57606a; stroke-width: 1.5 }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3 }}
  .note {{ fill: #9198a1 }}
  .page {{ fill: #0d1117 }}
  .line {{ stroke: #3d444d }}
  .folder {{ fill: #4493f8 }}
  .read {{ fill: #9198a1 }}
  .glance {{ stroke: #9198a1 }}
}}
"""


def svg() -> str:
    """Return the picture: a row per folder, a line between floors, and a column of marks for each product."""
    rows, lines = list[str](), list[str]()
    y = _TOP
    for floor in FLOORS:
        lines.append(f'<path class="line" d="M{_MARGIN} {y - 18}H{_WIDTH - _MARGIN}"/>')
        for folder, words in floor.items():
            rows += [_text(_NAMES, y, folder, "name"), _text(_WORDS, y, words, ""), *_marks(folder, y)]
            y += _ROW
    title = "The floors of autoshard: a folder imports only folders of lower floors"
    legend = _MARKS + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 40}" width="{_WIDTH}" '
        f'height="{y + 40}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{y + 40}" rx="6"/>',
        _text(_MARGIN, 24, title, "title"),
        *(_text(_MARKS + _COLUMN * place, 48, product.title, "head") for place, product in enumerate(PRODUCTS)),
        *lines,
        *rows,
        f'<path class="line" d="M{_MARGIN} {y - 18}H{_WIDTH - _MARGIN}"/>',
        _text(_NAMES, y, f"below all: {', '.join(GROUND)}", "note"),
        *(mark for place, kind in enumerate(_SHAPES) for mark in _key(kind, _MARGIN + 190 * place, y + 24)),
        _text(legend + 100, y + 24, "no mark: skip it", "note"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


_SHAPES = {"folder": "the product itself", "read": "read it before", "glance": "a few names of it"}


def _marks(folder: str, y: int) -> Iterator[str]:
    for place, product in enumerate(PRODUCTS):
        x = _MARKS + _COLUMN * place
        for kind, folders in (("folder", product.folders), ("read", product.reads), ("glance", product.glances)):
            if folder in folders:
                yield _shape(kind, x, y)


def _key(kind: str, x: int, y: int) -> Iterator[str]:
    yield _shape(kind, x, y)
    yield _text(x + 22, y, _SHAPES[kind], "note")


def _shape(kind: str, x: int, y: int) -> str:
    if kind == "folder":
        return f'<rect class="folder" x="{x}" y="{y - 12}" width="14" height="14" rx="2"/>'
    return f'<circle class="{kind}" cx="{x + 7}" cy="{y - 5}" r="{4 if kind == "glance" else 5}"/>'


def _text(x: int, y: int, words: str, mark: str) -> str:
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{mark}{chr(34)}" if mark else ""}>{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
