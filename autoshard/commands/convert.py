"""``autoshard convert``: convert weights from one file format to another."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autoshard.commands.output import print_answer
from autoshard.commands.progress import byte_progress
from autoshard.commands.writing.places import folder_checks
from autoshard.errors import InputError, require
from autoshard.plan.codec import load
from autoshard.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoshard.runtime.convert.converting import Done, Form

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
    """Convert weights between Hugging Face, autoshard checkpoints of any plan, NxD checkpoints and torch state dicts.

    It needs little memory for any model. After an interruption, the same command continues.

    Args:
        source: A Hugging Face folder, an autoshard checkpoint or a folder of them, an NxD folder, or a .pt file.
        target: The file or folder to write; it must not exist.
        plan: A plan file that says how the target is sharded; where the target is hf or pt, how the NxD source was.
        to: The format of the target: hf, autoshard, nxd, or pt (one state dict). Default: pt for a name that ends so;
            with a plan nxd or autoshard, as its engine needs; otherwise hf.
        model: A model card's name or a config.json. Needed where the source has no config.json beside it.
        dtype: The number format of all weights. Default: that of the source.
        tokenizer: A folder whose tokenizer files are copied into the target. Default: the folder of the source, or the
            tokenizer of its run where that is bytes or a folder here.
        qkv: NxD's layers for queries, keys and values: the GQA layer with one weight (fused) or three (split), one
            column layer (plain), or three (apart). Default: fused with GQA, otherwise plain.
        workers: How many files are written in parallel. Default: one per core, at most 16.
        json: Print one JSON object instead of text.
    """
    num_workers = min(_MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers
    require(
        (num_workers >= 1, "--workers", f"must be at least 1, not {num_workers}"),
        (tokenizer is None or tokenizer.is_dir(), "--tokenizer", f"there is no folder {tokenizer}"),
        *(() if target.exists() else folder_checks(target, "TARGET")),  # what stands there is judged by its content
    )
    try:
        from autoshard.runtime.convert.converting import Conversion, convert as converted
    except ModuleNotFoundError as error:
        raise InputError.of("autoshard convert", f"needs {error.name}: pip install 'autoshard[torch]'") from None
    cut = load(plan) if plan else None
    by_plan: Form | None = None if cut is None else "nxd" if cut.engine == "nxd" else "autoshard"
    form = to or ("pt" if target.suffix == ".pt" else by_plan or "hf")
    require((qkv is None or form == "nxd", "--qkv", f"is for NxD files only, and {target} will be {form}"))
    conversion = Conversion(
        source=source, target=target, plan=cut, form=form, model=model, dtype=dtype, tokenizer=tokenizer, qkv=qkv,
        workers=num_workers,
    )  # fmt: skip
    start_s = time.monotonic()
    with byte_progress("converting", quiet=json) as report:
        done = converted(conversion, report)
    _print_done(source, done, time.monotonic() - start_s, json)
    return 0


def _print_done(source: Path, done: "Done", time_s: float, json: bool) -> None:
    if json:
        counts = {"files": done.num_files, "bytes": done.num_bytes, "kept_bytes": done.kept_bytes, "time_s": time_s}
        print_answer({"target": str(done.folder), "to": done.form, **counts, "remark": done.remark})
        return
    before = f", {format_bytes(done.kept_bytes)} of them before" if done.kept_bytes else ""
    files = f"{done.num_files} file{'s' if done.num_files > 1 else ''}"
    print(f"{done.folder} ({done.form}): {format_bytes(done.num_bytes)} in {files}{before}, {format_seconds(time_s)}")
    if done.remark:
        print(f"{source}: read with {done.remark}")
