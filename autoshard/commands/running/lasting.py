"""Output of a run that lasts a night: a full disk, or a reader or terminal that is gone or rests, ends no training."""

import errno
import os
import select
import stat
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from autoshard.units import format_bytes

_MOST_BYTES, _LAST_BYTES = 2**20, 2**16  # that wait for a reader: of what came first, and of what came last
_READER_S = 0.2  # in which a reader that keeps up takes what it has not yet
_FAILED_S = 1.0  # the same, when a run has failed: nothing is behind it


class LastingOutput:
    """A context in which what cannot be printed is lost, and said once on stderr; the run has files that tell the same.

    Nothing waits for a reader that rests (``| less``, Ctrl-S, a connection of ssh that sleeps), until the end. There
    ``failure`` says why lines are missing; a reader or a terminal that went away wanted no more of them.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._streams: tuple[_LastingStream, ...] = ()

    def __enter__(self) -> "LastingOutput":
        """Stand between the run and both streams."""
        self._streams = tuple(_LastingStream(stream, self) for stream in (sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in self._streams)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the streams back, when their readers have taken all of a run that has not failed."""
        sys.stdout, sys.stderr = (stream.end(None if kind is None else _FAILED_S) for stream in self._streams)

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
        with suppress(OSError):
            stream.flush()
        self._reader = _RestingReader.to(stream)

    def __getattr__(self, name: str) -> Any:
        """Answer as the stream itself."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or lose it."""
        try:
            if self._reader is None:
                return self._stream.write(text)
            self._reader.write(text.encode(self._stream.encoding, self._stream.errors or "strict"))
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Bring what was written on its way, or lose it."""
        try:
            if self._reader is None:
                self._stream.flush()
            else:
                self._reader.write(b"")
        except OSError as error:
            self._fail(error)

    def was_closed_terminal(self, error: OSError) -> bool:
        """Say whether an error is that of a terminal which somebody has closed."""
        return self._was_terminal and error.errno == errno.EIO

    def end(self, within_s: float | None) -> TextIO:
        """Return the stream itself; what is still buffered of one that fails would fail again at Python's end."""
        if self._reader is not None:
            try:
                self._reader.close(within_s)
            except OSError as error:
                self._fail(error)
        if self._has_failed and not self._empties():
            with suppress(OSError):  # a test's stream has no number
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return self._stream

    def _empties(self) -> bool:
        """Say whether the stream takes what Python has for it, and may take more."""
        try:
            self._stream.flush()
        except OSError:
            return False
        return self._reader is None  # else its reader is gone

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._output.lose(self, error)


class _RestingReader:
    """What a pipe or a terminal has not taken yet; it is handed on by a way of its own, on which no write waits."""

    def __init__(self, number: int) -> None:
        self._number, self._keeps_up = number, True
        self._waiting, self._last, self._lost_bytes = bytearray(), bytearray(), 0

    @classmethod
    def to(cls, stream: TextIO) -> "_RestingReader | None":
        """Open the other end of a stream once more; None for files, which do not wait, and where Linux has no way."""
        try:
            number = stream.fileno()
            if not (stat.S_ISFIFO(os.fstat(number).st_mode) or os.isatty(number)):
                return None
            return cls(os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        except OSError:  # a stream of a test has no number; one whose reader is gone is not opened again
            return None

    def write(self, data: bytes) -> None:
        """Hand on as much as is taken, and keep the rest: up to a limit its beginning, and its last lines."""
        if self._last or len(self._waiting) + len(data) > _MOST_BYTES:
            self._last += data
            if len(self._last) > _LAST_BYTES:
                lost = self._last.find(b"\n", len(self._last) - _LAST_BYTES) + 1
                del self._last[:lost]
                self._lost_bytes += lost
        else:
            self._waiting += data
        self._keeps_up = self._hand_on(_READER_S if self._keeps_up else 0.0)

    def close(self, within_s: float | None) -> None:
        """Wait until all is taken, or so long."""
        try:
            self._hand_on(within_s)
        finally:
            os.close(self._number)

    def _hand_on(self, within_s: float | None) -> bool:
        """Write what waits; return whether all is taken before nothing was for so many seconds."""
        while self._waiting or self._last:
            if not self._waiting:
                what = f"\n{format_bytes(self._lost_bytes)} are missing here, which nobody read"
                lost = f"{what}; metrics.jsonl has all steps\n" if self._lost_bytes else ""
                self._waiting = bytearray(lost.encode()) + self._last
                self._last, self._lost_bytes = bytearray(), 0
            try:
                del self._waiting[: os.write(self._number, self._waiting)]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._number, select.POLLOUT)
                if not poll.poll(None if within_s is None else 1000 * within_s):
                    return False
        return True
