"""What any answer costs: every card on every cluster at 1, 8 and 64 nodes, and every remedy of a question without one.

All questions take about an hour; ``measured`` takes some of them.
"""

import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.spec.cluster import LOCAL
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from autoshard.spec.model_catalogue import load_config, model_names
from benchmarks.measure import Usage, counted_off, measure, warm_environment, yardstick_s
from benchmarks.result import Extra, Result

BAR_S, NO_PLAN_BAR_S = 4.0, 3.0
NODES = (1, 8, 64)
MOST_RANKS = 1024  # that the bar is about; larger clusters are measured as well
_REMEDY = re.compile(r"^  try (.+)$", re.MULTILINE)
_UNTIED = "a copy of the card with tie_word_embeddings false"
# What pip writes as the console script, but that its complaints go to a file; that there is no plan is an answer.
_SCRIPT = """
import contextlib, os, sys
from autoshard.cli import main
with open("complaint.txt", "w", encoding="utf-8") as complaint, open(os.devnull, "w") as nothing:
    with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(nothing):
        code = main()
sys.exit(0 if code in (1, 2) else code)
"""
Question = tuple[str, ...]  # options of ``autoshard plan``


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one answer used, and what was said instead of a plan: nothing where there is one."""

    question: Question
    usage: Usage
    complaint: str

    @property
    def remedies(self) -> tuple[str, ...]:
        """What it says would help."""
        return tuple(_REMEDY.findall(self.complaint))


def questions() -> Iterator[Question]:
    """Yield every card on every cluster."""
    for card, cluster in itertools.product(model_names(), cluster_names()):
        for nodes in (1,) if cluster == LOCAL else NODES:
            yield ("--model", card, "--cluster", cluster, "--nodes", str(nodes))


def with_remedy(question: Question, remedy: str, folder: Path) -> Question | None:
    """Return a question changed as a remedy says; None if it is no change of options.

    >>> with_remedy(("--model", "a", "--nodes", "2"), "--nodes 3", Path())
    ('--model', 'a', '--nodes', '3')
    >>> with_remedy(("--model", "a"), "--model b (9 layouts refused by nxd-tied) --nodes 2", Path())
    ('--model', 'b', '--nodes', '2')
    """
    options = _pairs(question)
    if remedy.startswith(_UNTIED):
        path = folder / "untied.json"
        config = {**load_config(options["--model"]), "tie_word_embeddings": False}
        path.write_text(json.dumps(config), encoding="utf-8")
        remedy = remedy.replace(_UNTIED, f"--model {path}")
    words = re.sub(r"\(.*\)", "", remedy).split(", so without")[0].split()
    if not words or not words[0].startswith("--"):
        return None
    return tuple(itertools.chain.from_iterable({**options, **_pairs(words)}.items()))


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def run() -> Result:
    """Ask everything."""
    return judge(*measured(questions()), yardstick_s())


def measured(asked: Iterable[Question]) -> tuple[list[Answered], dict[str, str]]:
    """Answer questions, and try the remedies of those without a plan; return which of these do not help."""
    found: list[Answered] = []
    useless: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "autoshard").write_text(_SCRIPT, encoding="utf-8")
        env = warm_environment(Path(__file__).parents[1], place / "bytecode")
        _answered(("--model", "tiny-llama", "--cluster", LOCAL), place, env)  # compiles, and is not counted
        for question in counted_off(asked, "question"):
            found.append(_answered(question, place, env))
            for remedy in found[-1].remedies:
                changed = with_remedy(question, remedy, place)
                complaint = _answered(changed, place, env).complaint if changed else ""
                if complaint:
                    useless[f"{' '.join(question)}: {remedy}"] = complaint
    return found, useless


def _answered(question: Question, place: Path, env: Mapping[str, str]) -> Answered:
    usage = measure([sys.executable, "autoshard", "plan", *question, "--out", "/dev/null"], cwd=place, env=env)
    return Answered(question=question, usage=usage, complaint=(place / "complaint.txt").read_text("utf-8"))


def judge(answers: Sequence[Answered], useless: Mapping[str, str], yardstick: float) -> Result:
    """Take the slowest answers about clusters of at most 1,024 ranks, those without a plan apart."""
    small = [one for one in answers if _num_ranks(one.question) <= MOST_RANKS]
    without = [one for one in small if one.complaint]
    extras: dict[str, Extra] = {
        "questions": len(answers),
        "without_a_plan": sum(bool(one.complaint) for one in answers),
    }
    for name, some in (("slowest", small), ("slowest_without", without), ("slowest_larger", answers)):
        last = max(some, key=lambda one: one.usage.cpu_s, default=None)
        extras |= {f"{name}_s": last and round(last.usage.cpu_s, 2), name: last and " ".join(last.question)}
    extras |= {
        "no_plan_bar_s": NO_PLAN_BAR_S,
        "remedies": sum(len(one.remedies) for one in answers),
        "remedies_that_do_not_help": "; ".join(useless) or None,
        "over_bar": sum(one.usage.cpu_s > (NO_PLAN_BAR_S if one.complaint else BAR_S) for one in small),
        "yardstick_s": round(yardstick, 4),
    }
    return Result(
        name="plan_all",
        value=round(max(one.usage.cpu_s for one in small), 2),
        unit="CPU s",
        bar=BAR_S,
        holds=not extras["over_bar"] and not useless,
        extras=extras,
    )


def _num_ranks(question: Question) -> int:
    options = _pairs(question)
    # No network joins several nodes of some clusters; that this is refused is an answer, too.
    return load_cluster(options["--cluster"]).num_ranks * int(options.get("--nodes", 1))
