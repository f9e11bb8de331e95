"""What else `autoshard plan` does than answer one search, and which options have no effect then: these are refused."""

from collections.abc import Iterator, Mapping

from autoshard.errors import Check

_ANSWERS = ("--choose", "--top")  # about the answers of one search
_SEARCHING = ("--prove", "--exhaustive", "--time-limit", "--objective")
IDLE: Mapping[str, tuple[str, tuple[str, ...]]] = {  # mode -> what it does, and the options without effect beside it
    "--at": ("evaluates one layout", (*_ANSWERS, *_SEARCHING, "--fix", "--pareto", "--like")),
    "--like": ("asks the question of that plan again", ("--module", "--pareto")),
    "--pareto": ("shows a frontier", (*_ANSWERS, "--objective", "--tokens", "--verbose")),
    "--cluster of several": ("compares machines", (*_ANSWERS, "--verbose", "--module", "--like", "--pareto", "--at",
                             "--deadline", "--budget")),
    "--deadline": ("finds the number of nodes", ("--nodes", "--module", "--like", "--pareto", "--at")),
    "--budget": ("finds the number of nodes", ("--nodes", "--module", "--like", "--pareto", "--at")),
}  # fmt: skip


def idle_options(stated: Mapping[str, object]) -> Iterator[Check]:
    """Yield a refusal of every option that is stated and has no effect beside another one.

    >>> list(idle_options({"--at": "tp=8", "--top": 5, "--out": "a.json"}))
    [(False, '--top', 'has no effect beside --at, which evaluates one layout. Leave out one of them')]
    """
    refused: set[str] = set()
    for mode, (action, idle) in IDLE.items():
        for option in idle if stated.get(mode) else ():
            if stated.get(option) and option not in refused:
                refused.add(option)
                yield False, option, f"has no effect beside {mode}, which {action}. Leave out one of them"
