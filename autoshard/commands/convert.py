"""``autoshard convert``: weights of one form become those of another."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard.commands.output import print_answer
from autoshard.commands.progress import byte_progress
from autoshard.errors import InputError, require
from autoshard.plan.codec import load
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.runtime.convert.converting import Form

_MOST_WORKERS = 16


def convert(
    source: Path,
    target: Path,
    plan: Path | None = None,
    to: Literal["hf", "autoshard", "nxd", "pt"] | None = None,
    model: str | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    tokenizer: Path | None = None,
    qkv: Literal["fused", "split", "plain", "apart"] | None = None,
    workers: int | None = None,
    json: bool = False,
) -> int:
    """Convert weights between Hugging Face, checkpoints of autoshard under any plan, NxD's and state dicts of torch.

    Little memory is used, whatever the model. The same command goes on where it was killed.

    Args:
        source: A Hugging Face folder, a checkpoint of autoshard or a folder of them, a folder of NxD, or a .pt file.
        target: What to write; it must not exist.
        plan: A plan file: how the target is cut.
        to: What the target is: hf, autoshard, nxd, or pt (one state dict). Default: with a plan, nxd or autoshard, as
            its engine is; pt for a name that ends so; else hf.
        model: A card's name or a config.json, where neither lies beside the source.
        dtype: The format of all weights. Default: as they are.
        tokenizer: A folder whose tokenizer files are copied too. Default: those beside the source.
        qkv: How queries, keys and values lie in NxD's files: one tensor (fused) or three (split) of the layer that may
            copy keys, one of a plain column layer, or three layers (apart). Default: fused, or plain without groups.
        workers: How many files are written at a time. Default: one for each core.
        json: Print what was written as JSON.
    """
    num_workers = min(_MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers
    require(
        (num_workers >= 1, "--workers", f"must be at least 1, not {num_workers}"),
        (tokenizer is None or tokenizer.is_dir(), "--tokenizer", f"there is no folder {tokenizer}"),
    )
    try:
        from autoshard.runtime.convert.converting import Conversion, convert as converted
    except ModuleNotFoundError as error:
        raise InputError.of("autoshard convert", f"needs {error.name}: pip install 'autoshard[torch]'") from None
    cut = load(plan) if plan else None
    by_plan: Form | None = None if cut is None else "nxd" if cut.engine == "nxd" else "autoshard"
    form = to or ("pt" if target.suffix == ".pt" else by_plan or "hf")
    require((qkv is None or form == "nxd", "--qkv", f"is for NxD's files, and {target} is to be {form}"))
    conversion = Conversion(
        source=source, target=target, plan=cut, form=form, model=model, dtype=dtype, tokenizer=tokenizer, qkv=qkv,
        workers=num_workers,
    )  # fmt: skip
    start_s = time.monotonic()
    with byte_progress("converting", quiet=json) as report:
        done = converted(conversion, report)
    time_s = time.monotonic() - start_s
    if json:
        counts = {"files": done.num_files, "bytes": done.num_bytes, "kept_bytes": done.kept_bytes, "time_s": time_s}
        print_answer({"target": str(done.folder), "to": done.form, **counts})
        return 0
    before = f", {format_bytes(done.kept_bytes)} of them before" if done.kept_bytes else ""
    files = f"{done.num_files} file{'s' if done.num_files > 1 else ''}"
    print(f"{done.folder} ({done.form}): {format_bytes(done.num_bytes)} in {files}{before}, {format_seconds(time_s)}")
    return 0
