"""What a Rule is: a predicate over columns, the sentence that explains it, and where it comes from."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.plan.rules.columns import Column, Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a candidate or a plan may not run: a value, not an exception."""

    rule_id: str
    message: str
    source: str

    def __str__(self) -> str:
        """Print as one line, the name of the rule last."""
        return f"{self.message} [{self.rule_id}]"


def everywhere(columns: Columns) -> bool:
    """Hold on every cluster and engine."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One legality or capability rule; ``allows`` uses operators that read the same on numbers and arrays.

    A message is only asked for a single candidate. It says what, which number, and what to use instead.
    """

    id: str
    subject: str  # the keys of the candidate that the rule judges
    allows: Callable[[Columns], Column]
    message: Callable[[Columns], str]
    source: str
    applies: Callable[[Columns], bool] = everywhere

    def rejection(self, columns: Columns) -> Rejection | None:
        """Judge a single candidate."""
        if not self.applies(columns) or bool(self.allows(columns)):
            return None
        return Rejection(rule_id=self.id, message=self.message(columns), source=self.source)


def implies(condition: Column, consequence: Column) -> Column:
    """Say that the consequence must hold where the condition does; both are truth values or arrays of them.

    >>> implies(True, False), implies(False, False)
    (False, True)
    """
    return (condition ^ True) | consequence


def one_of(column: Column, choices: tuple[int, ...] | tuple[str, ...]) -> Column:
    """Say where a column holds one of the choices.

    >>> one_of(8, (1, 8, 32)), one_of(4, (1, 8, 32))
    (True, False)
    """
    found: Column = False
    for choice in choices:
        found = found | (column == choice)
    return found


def listed(values: tuple[int, ...]) -> str:
    """Write numbers as people say them.

    >>> listed((1, 8, 32)), listed((1,))
    ('1, 8 or 32', '1')
    """
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last
