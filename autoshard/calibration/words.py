"""Read what publishers write in a row into the words of the row format (docs/reference/rows.md).

Rows may state platform, precision, sharding, recompute, schedule and framework in a publisher's own words. The meaning
of terms in them is data, ``words.json``, by column: the first entry with a term in the text applies; an entry that is
``of`` a framework applies to its rows only. The publisher's words stay in the row, in the field ``published``.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from autoshard.calibration.rows import MeasuredRow, precision_of
from autoshard.errors import Faults, InputError, nearest
from autoshard.plan.recompute import Recompute
from autoshard.schedule.builders import builders
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import ALIASES, cluster_names
from autoshard.spec.kernels import with_libraries

_UNSTATED = ("", "unknown", "not stated", "unspecified", "n a")
_UNKNOWN = {"sharding": "ZeRO-1", "pipeline_schedule": "1f1b"}  # what stands in for words that are not known
# aws-neuron/neuronx-distributed examples/training/llama: scripts for 4096 tokens do not ask for flash attention
# (--use_flash_attention is 0 unless given), those for 8192 do; before it came (Neuron 2.19) 4096 were the most.
_FLASH_FROM = 8192
_RECOMPUTE = ("none", "full", "full:4", "selective[attend,act]")  # forms of it
_SYMBOLS = re.compile(r"[^a-z0-9]+")
_LINKS = re.compile(r"\b([0-9]{1,2}) (?:x|[\w-]+) ([0-9]{2,4}) Gb/s")  # 4 x 100 Gb/s, 4 Omni-Path 100 Gb/s
_SDK = re.compile(
    r"neuron ([0-9]+(?:\.[0-9]+)+)(?:[-/]([0-9]+(?:\.[0-9]+)+))?", re.IGNORECASE
)  # or from one to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What some terms of a column mean, and what is assumed with them."""

    says: tuple[str, ...]
    means: str  # "" for what autoshard does not model
    of: str = ""
    assumed: str = ""
    source: str | None = None


@cache
def column_words(column: str) -> tuple[Word, ...]:
    """Return the words of a column."""
    columns = json.loads((resources.files("autoshard.calibration") / "words.json").read_text("utf-8"))
    return tuple(record.decode(Word, word) for word in columns[column])


def translated(row: MeasuredRow, *, knows_platform: bool = False) -> tuple[MeasuredRow, dict[str, str], Faults]:
    """Return a row in the words of the format; by column, what had to be assumed for it; and what could not be read.

    Its platform stays as it is where the reader has a file of that cluster.

    >>> asked = {"id": "a", "platform": "H100 SXM", "seq_len": 8, "global_batch_seqs": 8, "nodes": 1}
    >>> found, _, _ = translated(MeasuredRow.read({**asked, "precision": "FP8 (tensorwise)"}))
    >>> found.platform, found.precision, found.published["precision"]
    ('h100-80', 'bf16,products=fp8', 'FP8 (tensorwise)')
    """
    changes, assumed, faults = dict[str, object](), dict[str, str](), Faults()
    columns = ("platform", "precision") if row.candidate else ("platform", "precision", "recompute", *_UNKNOWN)
    for column in columns[knows_platform:]:  # a candidate states the other columns
        changes[column] = row.platform if column == "platform" else None
        with faults.of(column):
            changes[column], says = _read(column, getattr(row, column), row)
            assumed |= {column: says} if says else {}
    changes["kernels"], changes["flash_attention"], says = _kernels(row)
    assumed |= {"framework": says} if says else {}
    library, table = _library(row), changes["kernels"] or ""
    longer = with_libraries(table, library.means) if library and row.candidate is None else table
    if library and longer != table:
        changes["kernels"], assumed["kernels"] = longer, library.assumed
    never = _word("no_sp", _key(row.framework), row) if row.sp is None and row.candidate is None else None
    changes["sp"] = False if never else row.sp  # some frameworks never cut the sequence over tp
    assumed |= {"sp": never.assumed} if never else {}
    balanced = _word("balanced", _key(row.framework), row) if row.candidate is None else None
    assumed |= {"stages": balanced.assumed} if balanced else {}
    shards = _word("zero_group", _key(row.sharding), row) if row.zero_group is None and row.candidate is None else None
    changes["zero_group"] = row.chips // row.nodes if shards and row.chips and row.nodes else row.zero_group
    assumed |= {"zero_group": shards.assumed} if shards else {}
    whole = _word("etp", _key(row.framework), row) if row.etp is None and row.candidate is None and row.ep else None
    changes["etp"] = int(whole.means) if whole else row.etp
    assumed |= {"etp": whole.assumed} if whole else {}
    routing = _word("routing", _key(str((row.inferred or {}).get("routing", ""))), row)
    even = routing if row.expert_imbalance is None else None
    changes["expert_imbalance"] = float(even.means) if even else row.expert_imbalance
    assumed |= {"expert_imbalance": even.assumed} if even else {}
    changes["network_gbps"], says = _network(row)
    assumed |= {"network_gbps": says} if says else {}
    changes["release"] = row.release or _release(row.framework_version)
    before = {name: getattr(row, name) for name in changes}
    published = {name: text for name, text in before.items() if text is not None and text != changes[name]}
    published = {**published, **(row.published or {})} or None
    return replace(row, **changes, published=published), assumed, faults


def _read(column: str, text: str | None, row: MeasuredRow) -> tuple[str | None, str]:
    """Return what the text of a column means, None where it leaves the column open, and what is assumed with it."""
    key = _key(text)
    if text is None or (key in _UNSTATED and column != "platform"):
        return None, ""
    matched = _word(column, key, row)
    exact = matched and key in matched.says
    if not exact and (format_word := _own(column, text)):
        return format_word, ""
    if matched and matched.means and (exact or column != "recompute"):  # there every word counts
        return matched.means, matched.assumed or ("" if exact else f"{matched.means}, of {record.show_value(text)}")
    if matched is None and column in _UNKNOWN:
        return None, f"{_UNKNOWN[column]}: {record.show_value(text)} is not known"
    names = {"platform": cluster_names(), "pipeline_schedule": builders(), "recompute": _RECOMPUTE}.get(column, ())
    terms = dict.fromkeys([*names, *(say for word in column_words(column) for say in word.says if word.means)])
    why = f"{matched.assumed}. " if matched and matched.assumed else ""
    raise InputError.of("", f"cannot read {record.show_value(text)}. {why}{nearest(key, [*terms])}")


def _own(column: str, text: str) -> str | None:
    """Return a text that is in the words of the format; None if it is not."""
    lower = text.strip().casefold()
    if column in ("platform", "pipeline_schedule"):
        lower = ALIASES.get(lower, lower) if column == "platform" else lower
        return lower if lower in (cluster_names() if column == "platform" else builders()) else None
    try:
        if column == "recompute":
            Recompute.parse(text)
            return text
        return lower if precision_of(lower) else None
    except InputError:
        return None


def _kernels(row: MeasuredRow) -> tuple[str | None, bool | None, str]:
    """Return the kernels that a framework runs, whether its attention is flash attention, and what is assumed."""
    text = _key(f"{row.framework or ''} {row.precision or ''}")  # in which some publishers say how they made kernels
    flash = True if row.flash_attention is None and "flash attention" in text else row.flash_attention
    if row.kernels or (framework := _word("framework", _key(row.framework), row)) is None:
        return row.kernels, flash, ""
    means, notes = framework.means, [framework.assumed]
    if means == "nxd" and not flash:
        if flash is None and row.seq_len >= _FLASH_FROM:
            return means, flash, framework.assumed
        notes += [] if flash is False else [f"nxd_core: no flash attention below {_FLASH_FROM} tokens"]
        return "nxd_core", flash, "; ".join(filter(None, notes))
    if stated := _word("kernels", text, row):
        return stated.means, flash, ""
    return means, flash, framework.assumed


def _library(row: MeasuredRow) -> Word | None:
    """Return the library that a row's framework, or a note on what is not stated, names beside the framework."""
    notes = " / ".join(str(note) for note in (row.inferred or {}).values())
    matched = _word("libraries", _key(f"{row.framework or ''} / {notes}"), row)
    return matched if matched and matched.means else None


def _word(column: str, key: str, row: MeasuredRow) -> Word | None:
    """Return the first word of a column with a term in a text."""
    framework = _key(row.framework)
    applicable = (word for word in column_words(column) if _contains(framework, word.of))
    return next((word for word in applicable if any(_contains(key, say) for say in word.says)), None)


def _network(row: MeasuredRow) -> tuple[float | None, str]:
    """Return the network of a node that a row states, or that the note on its platform counts in links, and the note.

    >>> asked = {"id": "a", "platform": "a100-80", "seq_len": 8, "global_batch_seqs": 8, "nodes": 2}
    >>> _network(MeasuredRow.read({**asked, "inferred": {"platform": "4 x 100 Gb/s RoCE a node, stated"}}))[0]
    400.0
    """
    match = _LINKS.search(str((row.inferred or {}).get("platform", "")))
    if row.network_gbps is not None or match is None:
        return row.network_gbps, ""
    gbps = float(match[1]) * float(match[2])
    return gbps, f"{gbps:g}, of the note on its platform: {match[0]}"


def _release(version: str | None) -> str | None:
    """Return the release of the Neuron SDK that a text names, the later of two.

    >>> _release("Neuron 2.18.0, torch-neuronx 2.1"), _release("Mar-May 2023 (Neuron 2.9/2.10)"), _release("r0.8.0")
    ('2.18.0', '2.10', None)
    """
    match = _SDK.search(version or "")
    return (match[2] or match[1]) if match else None


def _contains(key: str, term: str) -> bool:
    return not term or f" {term} " in f" {key} "


def _key(text: str | None) -> str:
    return _SYMBOLS.sub(" ", (text or "").casefold()).strip()
