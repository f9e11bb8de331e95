"""Where ``autoshard plan`` writes a plan and its page."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoshard.commands.output import print_notes
from autoshard.commands.writing.places import place_checks
from autoshard.errors import InputError, inside, require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.codec import refuse_to_replace, save
from autoshard.plan.plan import Plan

_REMEDY = "Type --force to replace it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The outcome of writing a plan: why the file was kept, or which other plan it held before."""

    refused: InputError | None = None
    replaced: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a plan and the answer go."""

    out: Path
    force: bool
    open: bool
    json: bool
    total_tokens: float | None

    def __post_init__(self) -> None:
        """Refuse a page in the place of the plan file or beside a device, and places where nothing can be written."""
        beside = self.out.suffix != ".html" and (self.out.is_file() or not self.out.exists())
        where = "leaves no place beside it for the page of --open. Name a .json file"
        require((beside or not self.open, f"--out {self.out}", where))
        require(*(place_checks(self.page, "the page of --open") if self.open else ()))

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


def _unusual(plan: Plan) -> Iterator[str]:
    """Yield a sentence on every choice of a plan that may surprise its user."""
    if warning := plan.model.beyond_positions(plan.workload.seq_len):
        yield f"warning: {warning}"
    if plan.model.attention_dropout:
        yield (
            f"attention drops {plan.model.attention_dropout:g} of its probabilities, so its scores are computed for "
            "128 queries at a time: the fused kernels of devices would drop other numbers in every layout"
        )
