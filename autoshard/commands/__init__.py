"""The commands, one module each; the docstring of a command is its help."""

import importlib
from collections.abc import Callable
from keyword import iskeyword

COMMANDS = {  # each is a function of its name, in a module of its name, whose docstring is its help
    "plan": "find the fastest layout of a training run that fits in memory",
    "explore": "open a page that plans again at every change of its controls",
    "explain": "show where the time and the memory of a plan go, and what comes next to it",
    "report": "draw plans, and a run beside its prediction, as a page to look at",
    "compare": "say which of two plans is predicted to be faster, and why",
    "import": "predict a configuration of Megatron, torchtitan, ...; name a better plan; read logs into measured rows",
    "export": "write a plan as a configuration of another program",
    "verify": "say why a plan cannot run, or prove that its sharding computes the same",
    "run": "train as a plan or a recipe says; put the prediction beside the measurement",
    "watch": "show how a run is doing, from any machine that sees its folder",
    "generate": "let the weights of a run go on with a text",
    "launch": "write the files that start a plan on a cluster",
    "sweep": "plan or run many questions, and put all results into one table",
    "tokenize": "turn text into tokens that runs can read",
    "convert": "convert weights between forms and layouts",
    "validate": "predict measured runs, and say how far that is off",
    "calibrate": "fit the constants of the cost model to measured runs",
    "contribute": "write the measured rows of runs into a file for others, with nothing private in it",
    "advise": "say which short runs would change the choice of a plan most; write their plans",
    "list": "list the names that options take: models, clusters, engines, schedules, ...",
    "completion": "print the script with which bash, zsh or fish completes commands and options",
}
MEANT = {  # what users of other programs call them
    **dict.fromkeys(("train", "start", "fit", "pretrain", "finetune"), "run"),
    **dict.fromkeys(("search", "optimize", "optimise", "tune", "auto", "find"), "plan"),
    **dict.fromkeys(("show", "inspect", "describe", "info", "why"), "explain"),
    **dict.fromkeys(("check", "test", "prove", "lint"), "verify"),
    **dict.fromkeys(("submit", "deploy", "slurm", "sbatch"), "launch"),
    **dict.fromkeys(("status", "monitor", "tail", "logs"), "watch"),
    **dict.fromkeys(("ls", "models", "clusters", "recipes"), "list"),
    "diff": "compare",
    "plot": "report",
    "draw": "report",
    "html": "report",
    **dict.fromkeys(("serve", "ui", "gui", "web", "dashboard"), "explore"),
    "bench": "validate",
}
_FOLDERS = {
    "import": "interchange",
    "export": "interchange",
    "generate": "running",
    "explore": "exploring",
}  # of commands that have one

EVERYDAY = {  # options that the help of a command with many shows first
    "plan": ("model", "cluster", "nodes", "seq_len", "global_batch", "fix", "choose", "tokens", "out", "open"),
    "run": ("steps", "learning_rate", "data.sets", "out", "resume", "restarts", "track.wandb", "dry_run"),
    "explore": ("model", "cluster", "nodes", "seq_len", "global_batch", "fix", "port", "no_open"),
    "import": ("out", "no_search", "nodes", "cluster", "model", "seq_len", "global_batch", "fix", "config", "rows"),
    "launch": ("scheduler", "nodes", "out", "name", "run_folder", "steps", "learning_rate", "data.sets"),
}
EXAMPLES = {  # command lines that its help shows
    "import": (
        "autoshard import pretrain_gpt.sh --cluster h100 --out theirs.json",
        "autoshard import train.log --config pretrain_gpt.sh --rows rows.jsonl",
    ),
    "export": (
        "autoshard export --to nxdt",
        "autoshard export plan.json --to torchtitan --out train.toml",
    ),
    "plan": (
        "autoshard plan llama3-70b --nodes 16",
        "autoshard plan llama3-8b --cluster p5 --nodes 4 --seq-len 32k --tokens 2T",
    ),
    "explore": (
        "autoshard explore",
        "autoshard explore llama3-8b --cluster p5 --nodes 4",
    ),
    "explain": (
        "autoshard explain",
        "autoshard explain plan.json --why-not tp=32,pp=8,dp=2",
    ),
    "report": (
        "autoshard report --open",
        "autoshard report plan.json --run runs/tiny-text",
    ),
    "compare": (
        "autoshard compare plan.json edited.json",
        "autoshard compare plan.json edited.json --fail-if-slower 2%",
    ),
    "verify": (
        "autoshard verify",
        "autoshard verify edited.json --json",
    ),
    "run": (
        "autoshard run tiny-text",
        "autoshard run plan.json --steps 1000 --data.set wikitext=1 --out runs/first",
    ),
    "watch": (
        "autoshard watch runs/tiny-text",
        "autoshard watch runs/tiny-text --html watch.html",
    ),
    "launch": (
        "autoshard launch plan.json --scheduler slurm --nodes 16",
        "autoshard launch llama3-70b-trn1-16 --scheduler torchrun --out job",
    ),
    "sweep": (
        "autoshard sweep tiny",
        "autoshard sweep llama3-70b-scaling-trn1 --wandb PROJECT",
    ),
    "tokenize": (
        "autoshard tokenize roneneldan/TinyStories --tokenizer bytes --out data/stories",
        "autoshard tokenize chats.jsonl --tokenizer tokenizer.json --chat --out data/chats",
    ),
    "convert": (
        "autoshard convert llama3-8b-hf/ weights/ --to autoshard",
        "autoshard convert runs/first/step-1000 first-hf/ --to hf",
    ),
    "generate": (
        'autoshard generate runs/tiny-text --prompt "THE RAVEN"',
        'autoshard generate llama3-8b-hf/ --prompt "The capital of France is" --tokens 8',
    ),
    "validate": (
        "autoshard validate rows.jsonl",
        "autoshard validate rows.jsonl --json",
    ),
    "calibrate": (
        "autoshard calibrate rows.jsonl --cluster trn1 --out fitted.json",
        "autoshard plan llama3-70b --nodes 16 --calibration fitted.json",
    ),
    "contribute": (
        "autoshard contribute runs/first --out rows.jsonl",
        "autoshard contribute runs/ --out rows.jsonl",
    ),
    "advise": (
        "autoshard advise measured.jsonl --model llama3-8b --cluster p5 --nodes 4",
        "autoshard advise measured.jsonl --model llama3-8b --nodes 16 --run-nodes 4 --out short-runs",
    ),
    "list": (
        "autoshard list models",
        "autoshard list clusters --here > here.json",
    ),
    "completion": (
        "autoshard completion bash",
        "autoshard completion fish",
    ),
}


def command_of(name: str) -> Callable[..., int]:
    """Return the function of a command; only its own module is imported. Words of Python get a line at their end."""
    function = f"{name}_" if iskeyword(name) else name
    folder = f"{_FOLDERS[name]}." if name in _FOLDERS else ""
    return getattr(importlib.import_module(f"autoshard.commands.{folder}{function}"), function)
