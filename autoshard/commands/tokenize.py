"""``autoshard tokenize``: turn text into token files for training."""

import os
from pathlib import Path

from autoshard.commands.output import print_answer
from autoshard.commands.progress import byte_progress
from autoshard.commands.writing.places import folder_checks
from autoshard.errors import InputError, require
from autoshard.runtime.data.documents import CONVERT, hub_source, hub_tokenizer, is_hub_id, local_source
from autoshard.runtime.data.opened import BYTES, Manifest
from autoshard.runtime.data.tokenizers import TOKENIZER_FILES, TokenizerSpec
from autoshard.runtime.data.tokenizing import Work, tokenize as made
from autoshard.spec.record import encode
from autoshard.units import counted, format_bytes, format_count

_TEXT_SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".md", ".parquet", ".gz", ".zst")  # no names of data sets


def tokenize(
    source: str,
    tokenizer: str,
    out: Path,
    field: str | None = None,
    chat: bool = False,
    chat_template: Path | None = None,
    eos: str | None = None,
    bos: str | None = None,
    subset: str | None = None,
    split: str = "train",
    workers: int | None = None,
    json: bool = False,
) -> int:
    """Turn text into tokens in Megatron's indexed format (.bin and .idx), for the data of a recipe.

    After an interruption, the same command continues. The result does not depend on that or on --workers.

    Args:
        source: A file, folder or pattern of .txt files (one document each), .jsonl (both also as .gz) or .parquet; or
            the id of a Hugging Face data set.
        tokenizer: `bytes` (one token per byte, 257 tokens), a folder with a tokenizer.json, or a name on the hub.
        out: The folder to write. With the folder of an interrupted command, that one continues.
        field: The field of a record that holds its text. Default: text; with --chat, messages.
        chat: Records hold conversations, as lists of role and content. The assistant's messages are marked as answers.
        chat_template: A file with a chat template in Jinja. Default: that of the tokenizer.
        eos: The token at the end of a document. Default: that of the tokenizer.
        bos: A token at the start of a document. Default: none.
        subset: The subset of a data set on the hub.
        split: The split of a data set on the hub.
        workers: How many processes tokenize. Default: one per core.
        json: Print the manifest as one JSON object instead of a summary.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = num_cores if workers is None else workers
    require(
        (num_workers >= 1, "--workers", f"must be at least 1, not {num_workers}"),
        *folder_checks(out),
        (chat or chat_template is None, "--chat-template", "is for conversations. Type --chat as well"),
        (chat_template is None or chat_template.is_file(), "--chat-template", f"there is no file {chat_template}"),
    )
    try:
        local = local_source(source)
        on_hub = is_hub_id(source) and Path(source).suffix not in _TEXT_SUFFIXES
        require((local is not None or on_hub, source, "there is no such file or folder"))
        work = Work(
            source=local or hub_source(source, subset, split),
            tokenizer=named_tokenizer(tokenizer, eos, bos, chat_template),
            kind="chat" if chat else "text",
            field=field or ("messages" if chat else "text"),
        )
        with byte_progress("tokenizing", lambda now: f"{format_count(now.num_tokens)} tokens, ", quiet=json) as report:
            manifest = made(work, out, num_workers, report)
    except ModuleNotFoundError as error:
        raise InputError.of("autoshard tokenize", f"needs {error.name}: pip install 'autoshard[data]'") from None
    print_answer(encode(manifest) if json else _summary(manifest, out))
    return 0


def _summary(manifest: Manifest, out: Path) -> str:
    size = format_bytes(sum(file.bytes for file in manifest.files))
    documents = counted(manifest.num_documents, "document", form=",")
    counts = f"{documents}, {counted(manifest.num_tokens, 'token', form=',')}, {size}"
    answers = "" if manifest.num_answers is None else f", {manifest.num_answers:,} of them tokens of answers"
    empty, were = counted(manifest.num_empty, "document", form=","), "was" if manifest.num_empty == 1 else "were"
    empty = f"\n{empty} without text {were} left out" if manifest.num_empty else ""
    made_by = f"tokens of {manifest.tokenizer.name} (vocabulary {manifest.tokenizer.vocab:,})"
    return f"{out}: {counts}{answers}, {made_by}{empty}"


def named_tokenizer(text: str, eos: str | None, bos: str | None, template: Path | None) -> TokenizerSpec:
    """Find a tokenizer by its name: bytes, a folder, or one of the hub."""
    if text == BYTES:
        neither = "the tokenizer `bytes` takes neither --eos nor --bos. Leave them out"
        require((not eos and not bos, "--tokenizer", neither))
        return TokenizerSpec(name=text, template=template)
    path = Path(text)
    folder = path.parent if path.name == "tokenizer.json" else path
    name = text
    if folder.is_dir():
        name = str(folder.resolve())  # who asks for it later may be in another folder
        missing = "there is no such file" if path.name == "tokenizer.json" else "has no tokenizer.json"
        require(((folder / "tokenizer.json").is_file(), text, f"{missing}. {CONVERT}"))
    elif is_hub_id(text):
        folder = hub_tokenizer(text, TOKENIZER_FILES)
    else:
        message = f"there is no {text}. Type bytes, a folder with a tokenizer.json, or a hub's name"
        raise InputError.of("--tokenizer", message)
    return TokenizerSpec(name=name, folder=folder.resolve(), eos=eos, bos=bos, template=template)
