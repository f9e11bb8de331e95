"""What a sweep asks that no search can answer, said before anything runs: a name that is misspelled, a missing file."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from autoshard.errors import Fault, Faults, InputError
from autoshard.extensions import user_function
from autoshard.search.ask.api import request_of
from autoshard.spec.recipe import QUESTION_KEYS, entries_seen_from, recipe_of
from autoshard.sweep.points import MODULE, Entries, Sweep, base_of, merged_entries

_OPTION = re.compile(r"--([a-z-]+)")


class SweepQuestions:
    """The questions of a sweep file in this folder, each looked up once."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self._axes: Sequence[Sequence[Entries]] = list(sweep.axes.values())
        self._folder, self._base, self._faults = folder, base_of(sweep, folder), dict[str, tuple[Fault, ...]]()

    def refuse(self) -> None:
        """Refuse values that are wrong in every point that has them; where others go with a value, it is no mistake."""
        faults = Faults()
        for place, choices in enumerate(self._axes or [[{}]]):
            for choice in choices:
                axes = [[choice] if index == place else axis for index, axis in enumerate(self._axes)]
                faults += self._of_all(product(*axes))
        faults.refuse()

    def _of_all(self, points: Iterator[tuple[Entries, ...]]) -> tuple[Fault, ...]:
        """Return the faults of the first of some points, if all have faults; most often the first one has none."""
        first: tuple[Fault, ...] = ()
        for choices in points:
            faults = self._of({key: value for choice in choices for key, value in choice.items()})
            if not faults:
                return ()
            first = first or faults
        return first

    def _of(self, override: Entries) -> tuple[Fault, ...]:
        """Return what is wrong with the question of a point, under the keys of its file."""
        entries = entries_seen_from(merged_entries(self._base, override), self._folder)
        question = {key: entries[key] for key in ("nodes", MODULE, *QUESTION_KEYS) if key in entries}
        if "plan" in entries:  # it was answered
            return ()
        text = json.dumps(question, sort_keys=True, default=str)
        if text not in self._faults:
            self._faults[text] = _faults_of(question)
        return self._faults[text]


def _faults_of(question: Entries) -> tuple[Fault, ...]:
    try:
        if MODULE in question:  # whose code is read when the point is planned
            user_function(str(question[MODULE]), MODULE)
            return ()
        recipe = recipe_of(question)
        request_of(recipe.question, recipe.nodes)
    except InputError as error:
        return tuple(Fault(where=_key(fault.where), message=fault.message) for fault in error.faults)
    return ()


def _key(where: str) -> str:
    """Return the place of a fault with the key of a file instead of the option of a command line."""
    return _OPTION.sub(lambda match: match[1].replace("-", "_"), where, count=1)
