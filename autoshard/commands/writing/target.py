"""Where ``autoshard plan`` writes a plan and its page."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoshard.commands.output import print_notes
from autoshard.commands.writing.places import page_checks
from autoshard.errors import Faults, InputError, inside, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.codec import refuse_to_replace, save
from autoshard.plan.plan import Plan
from autoshard.units import DAY_S

_MOST_TOKENS = 1e18  # ten thousand times what any model has read
_REMEDY = "Type --force to replace it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The outcome of writing a plan: why the file was kept, or which other plan it held before."""

    refused: InputError | None = None
    replaced: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a plan goes, and what is printed.

    Args:
        tokens: How many tokens the whole training reads, e.g. 2T or 300B; the answer says how many days and dollars.
        deadline: With --tokens: plan on the fewest nodes that train so fast, e.g. 30d, 6w or 48h.
        budget: With --tokens: plan on no more nodes than these dollars pay for, e.g. 2M or 500k.
        out: The plan file to write.
        force: Replace the plan file even if somebody has edited it, or if it holds something else.
        open: Also draw the plan as a page, as `autoshard report` does, beside the plan file, and open it.
        verbose: Print all that is known of the plan and the other answers, instead of the first screen.
        json: Print one JSON object instead of tables.
    """

    tokens: str | None = None
    deadline: str | None = None
    budget: str | None = None
    out: Path = Path("plan.json")
    force: bool = False
    open: bool = False
    verbose: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        """Refuse options that do not fit together or cannot be read.

        --open needs a plan file beside which its page can be written; --deadline and --budget need --tokens.
        """
        beside = self.out.suffix != ".html" and (self.out.is_file() or not self.out.exists())
        where = "leaves no place beside it for the page of --open. Name a .json file"
        require((beside or not self.open, f"--out {self.out}", where))
        require(*(page_checks(self.page, "the page of --open") if self.open else ()))
        sized = self.deadline is not None or self.budget is not None
        require((not sized or self.tokens is not None, "--tokens", "missing; --deadline and --budget need it, e.g. 2T"))
        faults = Faults()
        for value in (token_total, self.tokens), (seconds_of, self.deadline), (dollars_of, self.budget):
            read, text = value
            with faults.of():
                _ = read(text) if text is not None else None
        faults.refuse()

    @property
    def stated(self) -> dict[str, object]:
        """What is stated of the answer, by option."""
        return {"--tokens": self.tokens, "--deadline": self.deadline, "--budget": self.budget,
                "--verbose": self.verbose}  # fmt: skip

    @property
    def total_tokens(self) -> float | None:
        """The tokens of the whole training, if they are stated."""
        return token_total(self.tokens) if self.tokens is not None else None

    @property
    def deadline_s(self) -> float | None:
        """Within which time the training must end."""
        return seconds_of(self.deadline) if self.deadline is not None else None

    @property
    def budget_usd(self) -> float | None:
        """What the training may cost."""
        return dollars_of(self.budget) if self.budget is not None else None

    @property
    def page(self) -> Path:
        """The page of --open."""
        return self.out.with_suffix(".html")

    @property
    def next_step(self) -> str:
        """What to type next."""
        return shlex.join(["autoshard", "verify", str(self.out), *EXTENSIONS.options()])

    def refuse_to_replace(self, like: Path | None, *, searches: bool) -> None:
        """Refuse, before a search, to replace a file that somebody has written or edited, or the plan asked about."""
        if self.force or not searches:
            return
        is_like = like is not None and like.exists() and self.out.exists() and self.out.samefile(like)
        why = f"is the plan that --like asks about, and is kept. Name another file. {_REMEDY}"
        require((not is_like, f"--out {self.out}", why))
        with inside("--out"):
            refuse_to_replace(self.out, _REMEDY)

    def write(self, plan: Plan) -> Written:
        """Write the plan file, unless a file of this name is kept."""
        try:
            return Written(replaced=save(plan, self.out, force=self.force, remedy=_REMEDY))
        except InputError as error:
            return Written(refused=error.under("--out"))

    def end(self, plan: Plan, written: Written, what: str = "") -> int:
        """Say what is unusual about the question, and where the plan is; or what to type where a file is kept."""
        for remark in () if self.json else _unusual(plan):
            print_notes(remark)
        if written.refused:
            raise written.refused  # after the answer, which took a while to find
        if not self.json:
            before = f", which held the plan of {written.replaced}" if written.replaced else ""
            print(f"wrote {what}{self.out}{before}")
        if self.open:
            from autoshard.commands.report import draw_plan  # its imports take as long as a small search

            draw_plan(plan, self.page)
        return 0


def token_total(text: str) -> float:
    """Read a number of tokens.

    >>> token_total("2T"), token_total("1.5e12"), token_total("300b")
    (2000000000000.0, 1500000000000.0, 300000000000.0)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    message = f"{text!r} is not a number of tokens. Write it like 2T, 300B or 1.5e12"
    require((0 < count < _MOST_TOKENS, "--tokens", message))
    return count


def seconds_of(text: str) -> float:
    """Read a time.

    >>> seconds_of("30d"), seconds_of("2w") / DAY_S, seconds_of("48 h")
    (2592000.0, 14.0, 172800.0)
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([hdw])", text.strip().lower())
    positive = match is not None and float(match[1]) > 0
    require((positive, "--deadline", f"{text!r} is not a time. Write it like 30d, 6w or 48h"))
    assert match
    return float(match[1]) * {"h": 3600, "d": DAY_S, "w": 7 * DAY_S}[match[2]]


def dollars_of(text: str) -> float:
    """Read a sum of dollars.

    >>> dollars_of("2M"), dollars_of("$500k")
    (2000000.0, 500000.0)
    """
    match = re.fullmatch(r"\$?([0-9]{1,12}(?:\.[0-9]{1,6})?)([kmb]?)", text.strip().lower())
    positive = match is not None and float(match[1]) > 0
    require((positive, "--budget", f"{text!r} is not a sum of dollars. Write it like 2M or 500k"))
    assert match
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]]


def _unusual(plan: Plan) -> Iterator[str]:
    """Yield a sentence on every choice of a plan that may surprise its user."""
    if warning := plan.model.beyond_positions(plan.workload.seq_len):
        yield f"warning: {warning}"
    if plan.code and plan.code.unrun:
        yield f"autoshard run cannot train {plan.model.name} by this plan: {plan.code.unrun}"
    if plan.model.attention_dropout:
        yield (
            f"attention drops {plan.model.attention_dropout:g} of its probabilities, so its scores are computed for "
            "128 queries at a time: the fused kernels of devices would drop other numbers in every layout"
        )
