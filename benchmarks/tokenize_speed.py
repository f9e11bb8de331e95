"""How fast text becomes a set of tokens, beside the tokenizers library on the same text and the same cores."""

# pyright: basic
# The tokenizers library has no types.

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from autoshard.runtime.data.documents import local_source
from autoshard.runtime.data.tokenizers import TokenizerSpec
from autoshard.runtime.data.tokenizing import Work, tokenize
from benchmarks.measure import yardstick_s
from benchmarks.result import Result

PAIRS = 3
BAR = 0.8
VOCAB = 16_000
TEXT_BYTES = 32 << 20  # four pieces of work, so that two or four processes share them evenly
_BATCH = 1000


def run() -> Result:
    """Tokenize Python's own library, over and over, by both, turn by turn."""
    with tempfile.TemporaryDirectory() as name:
        texts = write_text(Path(name) / "text.jsonl", TEXT_BYTES)
        write_tokenizer(Path(name) / "tokenizer.json", texts)
        pairs = [(_library_s(Path(name), texts), _ours_s(Path(name))) for _ in range(PAIRS)]
    size = sum(len(text.encode()) for text in texts) / 1e6
    ratio = median(library_s / ours_s for library_s, ours_s in pairs)
    return Result(
        name="tokenize_speed",
        value=round(ratio, 3),
        unit="of the library's speed",
        bar=BAR,
        holds=ratio >= BAR,
        extras={
            "library_mb_per_s": round(size / median(pair[0] for pair in pairs), 2),
            "ours_mb_per_s": round(size / median(pair[1] for pair in pairs), 2),
            "workers": _workers(),
            "text_mb": round(size, 1),
            "vocab": VOCAB,
            "pairs": PAIRS,
            "yardstick_s": yardstick_s(),
        },
    )


def write_text(path: Path, num_bytes: int) -> list[str]:
    """Write the source of Python's library as documents, pieces of files of the length of web pages."""

    def pieces() -> Iterator[str]:
        while True:
            for file in sorted(Path(json.__file__).parents[1].glob("*.py")):
                text = file.read_text(encoding="utf-8", errors="replace")
                yield from (text[start : start + 3000] for start in range(0, len(text), 3000))

    texts: list[str] = []
    size = 0
    for text in pieces():
        texts.append(text)
        size += len(text)
        if size >= num_bytes:
            break
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def write_tokenizer(path: Path, texts: list[str]) -> None:
    """Train a byte-level tokenizer, as GPT's and Llama 3's are."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:2000], trainer)
    tokenizer.save(str(path))


def _library_s(folder: Path, texts: list[str]) -> float:
    """Return the seconds of the library's own batches on all cores, with nothing read and nothing written."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def batches() -> None:
        for start in range(0, len(texts), _BATCH):
            tokenizer.encode_batch(texts[start : start + _BATCH])

    return _seconds(batches)


def _ours_s(folder: Path) -> float:
    """Return the seconds of the whole way from the text file to the set, with all processes that it starts."""
    source = local_source(str(folder / "text.jsonl"))
    assert source is not None
    spec = TokenizerSpec(name="trained here", folder=folder, eos="<eos>")
    with tempfile.TemporaryDirectory() as out:
        work = Work(source=source, tokenizer=spec, kind="text", field="text")
        return _seconds(lambda: tokenize(work, Path(out), _workers(), lambda _: None))


def _workers() -> int:
    import os

    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _seconds(act: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    act()
    return time.perf_counter() - begin_s
