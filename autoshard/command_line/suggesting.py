"""What a user may have meant by an option that no command has: the words of other programs."""

import re
from collections.abc import Mapping, Sequence

from autoshard.errors import close_names, nearest

_FLAG = re.compile(r"--([a-z][a-z.-]*[a-z])(?=( [A-Z]\b| [a-z]+=)?)")  # an option, and whether a value follows it
_MOST_LISTED = 16  # options that a line can name
_SHARDING = "--fix {key}=N, with commas between several, such as --fix tp=8,pp=2"
_MEANT: Mapping[str, str] = {  # words of torchrun, Megatron-LM, torchtitan, DeepSpeed and transformers -> ours
    **dict.fromkeys(("--lr", "--max-lr", "--rate"), "--learning-rate"),
    **dict.fromkeys(("--nnodes", "--num-nodes", "--machines", "--num-machines", "-n", "-N"), "--nodes"),
    **dict.fromkeys(("--gpus", "--num-gpus", "--devices", "--world-size", "--nproc-per-node", "--chips", "-np"),
        "--nodes N, whole machines of --cluster (autoshard list clusters says how many chips a node has; on local: "
        "--ranks N)"),
    **dict.fromkeys(("--gpu", "--machine", "--instance", "--hardware", "--accelerator", "--device"), "--cluster"),
    **dict.fromkeys(("--batch", "--batch-size", "--gbs", "--global-batch-size"), "--global-batch"),
    **dict.fromkeys(("--seq", "--seqlen", "--seq-length", "--sequence-length", "--context", "--context-length"),
        "--seq-len"),
    **dict.fromkeys(("--train-iters", "--max-steps", "--iterations", "--num-steps", "--training-steps"), "--steps"),
    **dict.fromkeys(("--epochs", "--num-epochs", "--num-train-epochs", "--train-samples"),
        "--steps N, which take N times --global-batch sequences"),
    **dict.fromkeys(("--tp", "--tensor-parallel", "--tensor-model-parallel-size"), _SHARDING.format(key="tp")),
    **dict.fromkeys(("--pp", "--pipeline-parallel", "--pipeline-model-parallel-size"), _SHARDING.format(key="pp")),
    **dict.fromkeys(("--dp", "--data-parallel", "--fsdp"), _SHARDING.format(key="dp")),
    **dict.fromkeys(("--cp", "--context-parallel", "--context-parallel-size"), _SHARDING.format(key="cp")),
    **dict.fromkeys(("--ep", "--expert-parallel", "--expert-model-parallel-size"), _SHARDING.format(key="ep")),
    **dict.fromkeys(("--mbs", "--micro-batch", "--micro-batch-size"), _SHARDING.format(key="mbs")),
    **dict.fromkeys(("--zero", "--zero-stage"), _SHARDING.format(key="zero")),
    **dict.fromkeys(("--dtype", "--mixed-precision", "--bf16", "--fp16"), "--precision"),
    **dict.fromkeys(("--spot", "--cost", "--usd", "--hourly-price"), "--price, your dollars of a node hour"),
    **dict.fromkeys(("--yes", "-y", "--overwrite"), "--force"),
    **dict.fromkeys(("--layout", "--sharding", "--mesh", "--parallelism"), _SHARDING.format(key="tp")),
    **dict.fromkeys(("--model-name", "--model-name-or-path", "--model-path", "--hf-model"), "--model"),
    "-m": "--model", "-c": "--cluster", "-o": "--out", "-q": "--json", "--quiet": "--json", "--debug": "--verbose",
    "--list": "the name after the command; autoshard list shows the names",
    **dict.fromkeys(("--output", "--output-file", "--save", "--outdir", "--output-dir", "--to-file"), "--out"),
    **dict.fromkeys(("--wandb", "--wandb-project"), "--track.wandb"),
    **dict.fromkeys(("--memory-fraction", "--gpu-memory-utilization"), "--headroom"),
}  # fmt: skip


def suggestion(flag: str, known: Sequence[str]) -> str:
    """Say which option was meant: the one that other programs call so, or those with a like name.

    >>> suggestion("--lr", ["--learning-rate", "--lnc"]), suggestion("--lcn", ["--learning-rate", "--lnc"])
    ('Type --learning-rate.', 'Did you mean --lnc?')
    """
    meant = _MEANT.get(flag, "")
    if meant and (meant.split()[0].rstrip(",") in known or not meant.startswith("-")):
        return f"Type {meant}."
    names = {name.lstrip("-"): name for name in known}
    close = [names[name] for name in close_names(flag.lstrip("-"), list(names))]
    if close or len(known) > _MOST_LISTED:
        return f"Did you mean {' or '.join(close)}?" if close else ""
    return nearest(flag, known)


def key_suggestion(key: str, keys: Sequence[str]) -> str:
    """Say which key of a file was meant: the one that other programs call so, or those with a like name.

    >>> key_suggestion("micro_batch_size", ["fix", "nodes"])
    'Write fix: mbs=N, with commas between several, such as fix: tp=8,pp=2.'
    >>> key_suggestion("lr", ["learning_rate", "lnc"]), key_suggestion("lcn", ["learning_rate", "lnc"])
    ('Write learning_rate.', 'Did you mean lnc?')
    """
    meant = _MEANT.get(f"--{key.replace('_', '-')}", "")
    named = _FLAG.match(meant)
    if named is None or _as_key(named[1]) not in keys:
        return nearest(key, keys)
    in_file = _FLAG.sub(lambda flag: _as_key(flag[1]) + (":" if flag[2] else ""), meant)
    return f"Write {in_file}."


def _as_key(name: str) -> str:
    return name.replace("-", "_")
