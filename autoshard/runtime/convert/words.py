"""The tokenizer of a run beside its converted weights, with the tokens that opened and closed the run's documents."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from autoshard.runtime.convert.hf import CONFIG, copy_companions, write_json
from autoshard.runtime.data.opened import BYTE_TOKENIZER, TokenizerRecord, sha256
from autoshard.runtime.data.tokenizers import byte_tokenizer_files
from autoshard.spec.files import read_data

_LIBRARY = "tokenizer.json"
_OF_TOKENS, _OF_IDS = ("tokenizer_config.json", "special_tokens_map.json"), (CONFIG, "generation_config.json")


def write_tokenizer(record: TokenizerRecord, folder: Path) -> None:
    """Write the tokenizer of a run's data, if it is bytes or lies here; one of a hub is named to ``--tokenizer``."""
    if record == BYTE_TOKENIZER:
        for file, content in byte_tokenizer_files().items():
            write_json(folder / file, content)
    elif (file := Path(record.name) / _LIBRARY).is_file():
        record.refuse_other(sha256(file))
        copy_companions(file.parent, folder)


def write_ends(record: TokenizerRecord, folder: Path) -> None:
    """Name the tokens that opened and closed documents in files of a model, if its tokenizer is that of a run.

    Files of Hugging Face name one of each kind; what generates stops at any of several that close.
    """
    library = folder / _LIBRARY
    is_other = library.is_file() and record != BYTE_TOKENIZER and sha256(library) != record.sha256
    ends = {} if is_other else {"bos": record.bos, "eos": record.eos}
    numbers = {name: number for name, number in ends.items() if number is not None}
    if not numbers:
        return
    _change(folder, _OF_IDS, {f"{name}_token_id": number for name, number in numbers.items()}, _holds)
    if library.is_file():
        tokens = _tokens_of(library)
        names = {f"{name}_token": tokens[number] for name, number in numbers.items() if number in tokens}
        _change(folder, _OF_TOKENS, names, _is_token)


def _change(folder: Path, names: tuple[str, ...], entries: Mapping[str, Any], says: Callable[[Any, Any], bool]) -> None:
    """Change the entries of files that say something else; of the second file only those that it has."""
    for file in names:
        path = folder / file
        content = cast(dict[str, Any], read_data(path)) if path.is_file() else {}
        differing = {name: value for name, value in entries.items() if not says(content.get(name), value)}
        differing = {name: value for name, value in differing.items() if file == names[0] or name in content}
        if differing:
            write_json(path, {**content, **differing})


def _holds(stated: Any, number: int) -> bool:
    return number in stated if isinstance(stated, list) else stated == number


def _is_token(stated: Any, token: str) -> bool:
    return (cast(dict[str, Any], stated).get("content") if isinstance(stated, dict) else stated) == token


def _tokens_of(library: Path) -> Mapping[int, str]:
    """Return the tokens of a tokenizer.json by their numbers."""
    content = cast(dict[str, Any], read_data(library))
    vocab = content.get("model", {}).get("vocab", {})
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], number) for number, entry in enumerate(vocab))
    tokens = {int(number): str(token) for token, number in pairs}
    return tokens | {int(token["id"]): str(token["content"]) for token in content.get("added_tokens", ())}
