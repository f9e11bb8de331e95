"""Output of a run that lasts a night: a full disk, or a reader or a terminal that is gone, ends no training."""

import errno
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class LastingOutput:
    """A context in which what cannot be printed is lost, and said once on stderr; the run has files that tell the same.

    At the end ``failure`` says why lines are missing; a reader or a terminal that went away wanted no more of them.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._streams: tuple[_LastingStream, ...] = ()

    def __enter__(self) -> "LastingOutput":
        """Stand between the run and both streams."""
        self._streams = tuple(_LastingStream(stream, self) for stream in (sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in self._streams)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the streams back."""
        sys.stdout, sys.stderr = (stream.end() for stream in self._streams)

    def lose(self, stream: "_LastingStream", error: OSError) -> None:
        """Take note of the first failure of a stream."""
        reason = error.strerror or str(error)
        if not (isinstance(error, BrokenPipeError) or stream.was_closed_terminal(error)):
            self.failure = self.failure or f"the output: {reason}"
        if stream is self._streams[0]:
            print(f"warning: the output cannot be written: {reason}. The run goes on", file=sys.stderr, flush=True)


class _LastingStream:
    """A stream of text that raises no OSError."""

    def __init__(self, stream: TextIO, output: LastingOutput) -> None:
        self._stream, self._output, self._has_failed = stream, output, False
        self._was_terminal = stream.isatty()

    def __getattr__(self, name: str) -> Any:
        """Answer as the stream itself."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or lose it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        """Bring what was written on its way, or lose it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def was_closed_terminal(self, error: OSError) -> bool:
        """Say whether an error is that of a terminal which somebody has closed."""
        return self._was_terminal and error.errno == errno.EIO

    def end(self) -> TextIO:
        """Return the stream itself; what is still buffered of one that fails would fail again at Python's end."""
        if self._has_failed:
            try:
                self._stream.flush()
            except OSError:
                with suppress(OSError):  # a test's stream has no number
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return self._stream

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._output.lose(self, error)
