"""What comes from a Hugging Face hub: data sets and tokenizers; what can go wrong there, in one sentence each."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import InputError
from autoshard.runtime.data.documents import TextSource, arrow_parts, piece_bytes

_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?$")
_UNREACHED = ("ConnectError", "ConnectTimeout", "OfflineModeIsEnabled")  # of whichever HTTP library is used
_BROKEN = ("RemoteProtocolError", "ReadError", "ReadTimeout", "PoolTimeout", "IncompleteRead")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN"
CONVERT = (
    "Write one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and give that folder"
)


def is_hub_id(text: str) -> bool:
    """Tell an id, as in ``owner/name``, from a path."""
    return _ID.match(text) is not None


def hub_source(text: str, subset: str | None, split: str) -> TextSource:
    """Download a data set and find its tables; what was downloaded before is taken from the cache."""
    with _explained(text, "dataset"):
        import datasets
        from huggingface_hub import HfApi, constants

        revision = None
        if not constants.HF_HUB_OFFLINE:  # else what the cache has is all that there is
            HfApi().auth_check(text, repo_type="dataset")
            revision = HfApi().dataset_info(text).sha
        datasets.disable_progress_bars()
        try:
            table: Any = datasets.load_dataset(text, subset, split=split, revision=revision)
        except ValueError as error:  # no such subset or split: the message lists those that there are
            raise InputError.of(text, f"{' '.join(str(error).split())} See --subset and --split") from None
    paths = [entry["filename"] for entry in table.cache_files]
    rows = [datasets.Dataset.from_file(path).num_rows for path in paths]
    files = tuple((path, Path(path).stat().st_size, 0) for path in paths)
    parts = tuple(arrow_parts(paths, rows, piece_bytes(files)))
    name = "/".join(filter(None, (text, subset, split)))
    return TextSource(text=name, files=files, parts=parts, revision=revision)


def hub_tokenizer(name: str, files: tuple[str, ...]) -> Path:
    """Download the files of a tokenizer, of which the first must be there, and return their folder."""
    with _explained(name, "model"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        folder: Path | None = None
        for file in files:
            try:
                folder = Path(hf_hub_download(name, file, revision=folder and folder.name)).parent
            except EntryNotFoundError as error:
                if _status(error) != 404:
                    raise
                if folder is None:
                    raise InputError.of(name, f"has no {file}. {CONVERT}") from None
        assert folder is not None
        return folder


@contextmanager
def _explained(name: str, kind: Literal["dataset", "model"]) -> Iterator[None]:
    """Turn exceptions of a hub's libraries into one message with the remedy."""
    from huggingface_hub import constants, errors

    # Of the HTTP library, which is another one from time to time.
    http_error: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    try:
        yield
    except (OSError, RuntimeError, http_error) as error:
        found: list[BaseException] = [error]
        while cause := found[-1].__cause__ or found[-1].__context__:
            found.append(cause)
        if any(isinstance(one, OSError) and one.errno in _OF_THE_DISK for one in found):
            raise
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
        status = next((status for one in found if (status := _status(one))), None)
        if any(isinstance(one, errors.GatedRepoError) for one in found):
            message = f"needs a token and an accepted licence. Accept it at {page}. {_LOGIN}"
            if status == 403:
                message = "its licence is not accepted by the account of your token. Accept it at "
                message = f"{message}{page}, or give a token that may"
        elif status == 403:
            message = f"your token may not read it. Ask its owner at {page}, or give a token that may"
        elif status == 401 or any(isinstance(one, errors.RepositoryNotFoundError) for one in found):
            message = f"there is no {page}, or it is private, or your token is wrong. Look at the spelling. {_LOGIN}"
            message = f"{message} if it is private"
        else:
            message = _broken(constants.ENDPOINT, status, found) or f"cannot be read: {' '.join(str(error).split())}"
        raise InputError.of(name, message) from error


def _broken(hub: str, status: int | None, found: list[BaseException]) -> str:
    if status is not None:
        return f"{hub} answers {status}. Start the same command again later: finished files are kept"
    if any(type(one).__name__ in _UNREACHED for one in found):
        look = "Look at the network, at a proxy and at HF_ENDPOINT. Without a network, download elsewhere and give"
        return f"{hub} cannot be reached. {look} the folder"
    if any(type(one).__name__ in _BROKEN or isinstance(one, ConnectionError | TimeoutError) for one in found):
        return f"the download from {hub} broke off. Start the same command again: finished files are kept"
    return ""


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
