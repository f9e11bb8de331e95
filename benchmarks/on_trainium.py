"""``python -m benchmarks on_trainium``: what a Trainium proves, takes and teaches, within hours; or a dry run of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module

from autoshard import __version__
from benchmarks.guarded import Part, Setting, Suite
from benchmarks.result import Result
from benchmarks.trainium.machine import Machine, machine_of

_LIMIT = 3  # times the expected minutes, after which a part is ended: nobody knows yet what compilers take
_WIDE = 32  # ranks of a node from which on a part takes longer
# Name -> where it is, what it measures, and minutes on two cores and on a whole node. First what an hour is for.
_PARTS: Mapping[str, tuple[str, str, float, float]] = {
    "wires": ("wires:run", "collectives by kind, group and size", 4, 8),
    "products": ("shapes:products", "matrix products by shape", 5, 5),
    "kernels": ("shapes:kernels", "attention by shape, in NxD's kernel, forward and backward", 5, 5),
    "rows": ("rows:run", "runs that `autoshard calibrate` reads, and all rows as a file for others", 15, 40),
    "layouts": ("layouts:run", "tiny models in up to 20 layouts, beside one process", 25, 50),
}
_STAGE = "ten layers of Llama-3 70B"
_STAGE_MINUTES = 10, 20


def parts(setting: Setting) -> Sequence[Part]:
    """Return the parts for this machine, stages first; each engine and each LNC has a stage of its own."""
    machine = machine_of(setting)
    wide = machine.node().num_ranks >= _WIDE
    from benchmarks.trainium import stage

    found = [
        _part(
            f"stage_{name}", partial(_stage, name), _stage_words(machine, case.text, case.engine), _STAGE_MINUTES[wide]
        )
        for name, case in stage.cases(machine).items()
    ]
    for name, (where, measures, few, many) in _PARTS.items():
        if name != "layouts" or "nxd" in machine.engines:
            found.append(_part(name, partial(_run, where), measures, many if wide else few))
    if "torch" in machine.engines:
        minutes = _PARTS["layouts"][3] if wide else _PARTS["layouts"][2]
        native = partial(_run, "layouts:native")
        found.append(_part("layouts_native", native, "the same layouts by native PyTorch", minutes))
    return found


def _part(name: str, run: Callable[[Setting], Iterable[Result]], measures: str, minutes: float) -> Part:
    return Part(name=name, measures=measures, minutes=minutes, limit_minutes=_LIMIT * minutes, run=run)


def _stage_words(machine: Machine, text: str, engine: str) -> str:
    what = _STAGE if machine.node().num_ranks >= _WIDE else "four narrow layers"
    return f"{what}, {text}, by the {engine} engine: compiling, graphs, seconds, memory"


def _stage(name: str, setting: Setting) -> Iterable[Result]:
    from benchmarks.trainium import stage

    return stage.run(name, machine_of(setting))


def _run(where: str, setting: Setting) -> Iterable[Result]:
    """Import a part only where it is measured: another one must not fail with it."""
    module, _, name = where.partition(":")
    run: Callable[[Machine], Iterable[Result]] = getattr(import_module(f"benchmarks.trainium.{module}"), name)
    return run(machine_of(setting))


def opening(setting: Setting, chosen: Sequence[Part]) -> str:
    """Say what is going to be measured, on what, how long that is expected to take, and what it costs."""
    machine = machine_of(setting)
    minutes, most = (sum(getattr(part, name) for part in chosen) for name in ("minutes", "limit_minutes"))
    lines = [
        f"{len(chosen)} parts on {machine.node_type.name}, autoshard {__version__}, "
        f"engines {', '.join(machine.engines)}: about {minutes:g} minutes, {_cost(machine, minutes, most)}",
        *(f"  {part.name}: {part.measures} ({part.minutes:g} minutes)" for part in chosen),
    ]
    if setting.dry:
        lines.insert(
            0, "a dry run: plans, shapes, predictions; what this host can run it runs, and times nothing. There:"
        )
    return "\n".join(lines)


def _cost(machine: Machine, minutes: float, most: float) -> str:
    """Say what so many minutes cost.

    >>> from pathlib import Path
    >>> _cost(machine_of(Setting(folder=Path(), dry=True, machine="trn1.2xlarge")), 60, 180)
    '1.34 dollars at 1.34 an hour on demand, 4.02 where every part takes its limit'
    """
    price = machine.price_usd_per_hour
    if price is None:
        return f"and no price of {machine.node_type.name} is known here"
    usual, limit = (price * some / 60 for some in (minutes, most))
    return f"{usual:.2f} dollars at {price:.2f} an hour on demand, {limit:.2f} where every part takes its limit"


SUITE = Suite(name="on_trainium", parts=parts, opening=opening)
