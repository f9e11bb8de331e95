"""A run for TensorBoard: event files in its folder, written with the package's own protocol buffers."""

import json
import pkgutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"  # from which on a start of a session makes readers forget what is done again
_STRING = 7  # DT_STRING of TensorFlow's types.proto


class OnTensorBoard:
    """Scalars of every step, the configuration and the summary as text; a new file for every start of a run."""

    name = "TensorBoard"

    def __init__(self, *, folder: Path, num_done: int) -> None:
        self._folder, self._last = folder / FOLDER, num_done
        self._records: Any = None

    def start(self, config: Mapping[str, Any]) -> Sequence[str]:
        """Open a file; readers drop the steps of earlier files that this one has again."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        # Readers sort files by name: seconds as everybody has them, then what tells two starts in a second apart.
        now_ns = time.time_ns()
        name = f"events.out.tfevents.{now_ns // 10**9:010d}.{now_ns % 10**9:09d}.autoshard"
        self._records = RecordWriter((self._folder / name).open("wb"))
        self._write(file_version=_VERSION)
        session_log = _message("event_pb2:SessionLog")
        if self._last:
            self._write(step=self._last + 1, session_log=session_log(status=session_log.START))
        self._write_text("configuration", config)
        return [f"TensorBoard: tensorboard --logdir {self._folder}"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step, as one record."""
        self._last = step
        summary = _message("summary_pb2:Summary")
        shown = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=summary(value=shown))

    def finish(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """Write the summary, and close."""
        if summary:
            self._write_text("summary", {"failed": failed, **summary})
        self._records.close()

    def _write_text(self, tag: str, value: Mapping[str, Any]) -> None:
        summary, metadata = _message("summary_pb2:Summary"), _message("summary_pb2:SummaryMetadata")
        indented = "\n".join(f"    {line}" for line in json.dumps(value, indent=2).splitlines())  # code, to Markdown
        of_text = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        tensor = _message("tensor_pb2:TensorProto")(dtype=_STRING, string_val=[indented.encode()])
        self._write(step=self._last, summary=summary(value=[summary.Value(tag=tag, tensor=tensor, metadata=of_text)]))

    def _write(self, **fields: Any) -> None:
        event = _message("event_pb2:Event")(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()


def _message(name: str) -> Any:
    """Return a class of messages; they are made when their module is imported, so that no type checker knows them."""
    return pkgutil.resolve_name(f"tensorboard.compat.proto.{name}")
