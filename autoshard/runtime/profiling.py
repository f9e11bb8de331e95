"""Recording steps with torch's profiler: a trace of each rank, in which actions have the names that the plan has."""

from contextlib import suppress
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from autoshard.run.folder import profile_path
from autoshard.run.protocol import HOST, Run


class StepProfile:
    """The recording of one step of a rank, if the run asks for it; written when the step's time has been taken."""

    def __init__(self, run: Run, step: int, rank: int) -> None:
        self._path, self._profile = profile_path(run.folder, step, rank), None
        if step in run.profile:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.device != HOST else [])]
            self._profile = profile(activities=kinds)

    def __enter__(self) -> "StepProfile":
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            if torch.cuda.is_initialized():  # kernels that a host has started belong to the step
                torch.cuda.synchronize()
            self._profile.stop()

    def write(self) -> str:
        """Write the trace, and return what to say of it; "" where nothing was recorded. A full disk ends no run."""
        if self._profile is None:
            return ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
        except OSError as error:
            with suppress(OSError):  # there may be no part of it
                self._path.unlink()
            return f"its trace was not written: {error}"
        return f"each rank's trace of this step lies in {self._path.parent}; https://ui.perfetto.dev opens it"
