"""What somebody who waits for a run sees: a table that moves on a terminal, lines elsewhere; a file keeps the steps."""

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live

    from autoshard.engine.ran import TimedStep


class StepsShown:
    """Shows every step, and appends it to ``steps.jsonl``; used as a context, at whose end the table stays."""

    def __init__(self, folder: Path, num_steps: int, *, silent: bool) -> None:
        from autoshard.report.terminal import make_console

        self._file, self._num_steps, self._silent = folder / "steps.jsonl", num_steps, silent
        self._console = make_console()
        self._steps: list[TimedStep] = []
        self._live: Live | None = None

    def __call__(self, step: "TimedStep") -> None:
        """Show one step more."""
        from autoshard.report.ran import step_line, steps_table
        from autoshard.spec.record import encode

        self._steps.append(step)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(encode(step)) + "\n")
        if self._silent:
            return
        if not self._console.is_terminal:
            self._console.print(step_line(step, self._num_steps))
            return
        if self._live is None:  # not before: a thread that draws would not survive in forked ranks
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(steps_table(self._steps, self._num_steps), refresh=True)

    def __enter__(self) -> "StepsShown":
        """Begin."""
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Leave the last table where it is."""
        if self._live is not None:
            self._live.stop()
