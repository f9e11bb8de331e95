"""What a Rule is: one function over columns that gives its predicate and its sentence, and where it comes from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import GeneratorType
from typing import TypeAlias, cast

from autoshard.errors import InputError, nearest, require
from autoshard.plan.candidate import Candidate
from autoshard.plan.rules.columns import Columns, Ints, Mask, Texts
from autoshard.spec.workload import Workload

# What a Rule yields: whom it allows, then the sentence that explains a refusal of a single candidate.
Verdict: TypeAlias = "Iterator[Mask | str]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a candidate or a plan may not run: a value, not an exception."""

    rule_id: str
    message: str
    source: str

    def __str__(self) -> str:
        return f"{self.message} [{self.rule_id}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One legality or capability rule, made of a function by ``rule``."""

    id: str
    subject: str  # the keys of the candidate that the rule judges
    source: str
    verdict: Callable[[Columns], Verdict]
    applies: Callable[[Columns], bool]

    def __post_init__(self) -> None:
        """Refuse keys that nothing has: a search asks a Rule when it has chosen the keys that this one judges."""
        names = [field.name for part in (Candidate, Workload) for field in fields(part)]
        words = sorted({*names, "engine"})
        unknown = sorted(self.keys - {*words})
        require(*((False, f"rule {self.id}", f"{key!r} is no key of a plan. {nearest(key, words)}") for key in unknown))

    @property
    def keys(self) -> frozenset[str]:
        """The same keys, one by one."""
        return frozenset(self.subject.replace(" ", "").split(","))

    def allows(self, columns: Columns) -> Mask:
        """Say which candidates the rule allows: one truth value, or an array of them; all, where it does not apply."""
        return cast(Mask, self._next(self.verdict(columns))) if self.applies(columns) else True

    def message(self, columns: Columns) -> str:
        """Explain the refusal of a single candidate: what, which number, and what to use instead."""
        verdict = self.verdict(columns)
        self._next(verdict)
        return cast(str, self._next(verdict))

    def rejection(self, columns: Columns) -> Rejection | None:
        """Judge a single candidate."""
        if bool(self.allows(columns)):
            return None
        return Rejection(rule_id=self.id, message=self.message(columns), source=self.source)

    def _next(self, verdict: object) -> "Mask | str":
        wrong = "must yield whom it allows, and then a sentence"
        try:
            if isinstance(verdict, GeneratorType) and (found := next(cast(Verdict, verdict), None)) is not None:
                return found
        except ValueError as error:
            if "truth value of an array" not in str(error):
                raise
            wrong = "asks a column of candidates for one truth value. Write & for and, | for or, ^ True for not"
            wrong += ", and implies(a, b) for if"
        raise InputError.of(f"rule {self.id}", wrong)


def rule(
    subject: str, *, source: str, applies: Callable[[Columns], bool] = lambda columns: True
) -> Callable[[Callable[[Columns], Verdict]], Rule]:
    """Make a Rule of a function that yields whom it allows, and then the sentence for one candidate that it refuses.

    Its name is the Rule's id. It gets one candidate, or columns of many: its operators must read the same on both.

    >>> @rule("pp", source="house style")
    ... def no_pipelines(c: Columns) -> Verdict:
    ...     yield c.pp == 1
    ...     yield f"pp={c.pp}: we do not like pipelines. Use pp=1"
    >>> no_pipelines.id
    'no-pipelines'
    """
    return lambda verdict: Rule(
        id=verdict.__name__.replace("_", "-"), subject=subject, source=source, verdict=verdict, applies=applies
    )


def judge(columns: Columns, rules: Sequence[Rule]) -> tuple[Rejection, ...]:
    """Give every reason why a single candidate may not run."""
    rejections = (rule.rejection(columns) for rule in rules)
    return tuple(rejection for rejection in rejections if rejection is not None)


def implies(condition: Mask, consequence: Mask) -> Mask:
    """Say that the consequence must hold where the condition does; both are truth values or arrays of them.

    >>> implies(True, False), implies(False, False)
    (False, True)
    """
    return (condition ^ True) | consequence


def one_of(column: "Ints | Texts", choices: tuple[int, ...] | tuple[str, ...]) -> Mask:
    """Say where a column holds one of the choices.

    >>> one_of(8, (1, 8, 32)), one_of(4, (1, 8, 32))
    (True, False)
    """
    mask: Mask = False
    for choice in choices:
        mask = mask | (column == choice)
    return mask


def listed(values: tuple[int, ...]) -> str:
    """Write numbers as people say them.

    >>> listed((1, 8, 32)), listed((1,))
    ('1, 8 or 32', '1')
    """
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last
