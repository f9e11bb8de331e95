"""Where ranks meet: a file for those that are forked here, a port of rank 0 for those that something else started.

Before ranks make torch's world, those that were started one by one hear from rank 0 whether it takes the run up: it
alone looks at the run's folder, and who waits for a rank that has refused would wait ten minutes. Ranks of torchrun
agree on a name for their start, because torchrun's store outlives ranks that ``--max-restarts`` starts again.
"""

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import AutoshardError, RunFailed, require
from autoshard.runtime.machine import XLA, joined_device
from autoshard.units import counted

_SILENCE = timedelta(minutes=10)  # after which a rank that waits for another gives up
_TOLD_S = 30.0  # for other ranks to come and hear that rank 0 has refused
_LOOK_S = 0.05
_DESCRIPTORS = Path("/proc/self/fd")  # of Linux
_WORD, _HEARD, _START = "autoshard/refusal", "autoshard/heard", "autoshard/start"  # keys of the store


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRank:
    """This process as it was started by torchrun or Slurm: which rank of how many, and where they meet."""

    by: Literal["torchrun", "Slurm"]
    rank: int
    num_ranks: int
    meeting: str  # an address as torch writes it
    alone: bool = False  # all ranks are on this machine
    local_rank: int = 0  # which of the ranks on its machine

    @property
    def meets_at_a_port(self) -> bool:
        """Whether rank 0 opens the port at which all meet: that of torchrun is open before it."""
        return self.meeting.startswith("tcp://")

    def refuse_other_size(self, num_ranks: int, name: str) -> None:
        """Refuse too few or too many ranks for a plan."""
        torchrun = self.by == "torchrun"
        how = f"--nnodes x --nproc-per-node must be {num_ranks}" if torchrun else f"Type srun --ntasks {num_ranks}"
        started, planned = counted(self.num_ranks, "process", "es"), counted(num_ranks, "rank")
        message = f"{self.by} started {started}, but {name} is for {planned}. {how}"
        where = "WORLD_SIZE" if torchrun else "SLURM_NTASKS"
        require((self.num_ranks == num_ranks, where, f"{message}, or make a plan for {self.num_ranks}"))


@contextmanager
def meeting_file() -> Iterator[str]:
    """Yield the path of a file in which forked ranks meet; a full disk is named.

    Linux knows it by the descriptor that forks share, so that SIGKILL of all of them leaves no file behind.
    """
    remedy = "Free some room there, or let TMPDIR name another folder"
    try:
        opened = tempfile.TemporaryFile() if _DESCRIPTORS.is_dir() else tempfile.TemporaryDirectory()  # noqa: SIM115
    except OSError as error:
        raise RunFailed(f"ranks meet in a temporary file: {error.strerror or error}. {remedy}") from error
    with opened as place:
        try:
            yield f"{place}/store" if isinstance(place, str) else str(_DESCRIPTORS / str(place.fileno()))
        except RunFailed as error:
            if "DistStoreError: No space left on device" not in str(error):
                raise
            full = f"{tempfile.gettempdir()}, where ranks meet: no space is left on the device. {remedy}"
            raise RunFailed(full) from error


@contextmanager
def telling_refusals(launched: GivenRank | None) -> Iterator[Callable[[], None]]:
    """Tell other ranks what rank 0 refuses in the block, until it calls what is yielded, as it goes to meet them."""
    goes: list[bool] = []
    try:
        yield lambda: goes.append(True)
    except AutoshardError as error:
        if launched is not None and not goes and launched.meets_at_a_port:
            with suppress(Exception):  # the refusal itself is what matters
                _tell(launched, str(error))
        raise


def _tell(launched: GivenRank, refusal: str) -> None:
    store, end_s = _store(launched), time.monotonic() + _TOLD_S
    store.set(_WORD, refusal or "it gave no reason")
    while store.add(_HEARD, 0) < launched.num_ranks - 1 and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _store(launched: GivenRank) -> Any:
    import torch.distributed as dist

    stores: Any = dist  # which its types leave out
    host, _, port = launched.meeting.removeprefix("tcp://").rpartition(":")
    leads = launched.rank == 0
    try:
        return stores.TCPStore(
            host, int(port), launched.num_ranks, is_master=leads, timeout=_SILENCE, wait_for_workers=False
        )
    except stores.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        remedy = "Set MASTER_PORT to another, alike for all ranks; ss -tlnp says which program listens"
        raise RunFailed(f"port {port} of this machine, at which ranks meet, is taken. {remedy}") from None


def _agreed_store(launched: GivenRank) -> Any:
    """Return the store in which ranks meet, when rank 0 has said that it comes."""
    store = _store(launched)
    if launched.rank == 0:
        store.set(_WORD, "")
    elif refusal := store.get(_WORD).decode():
        store.add(_HEARD, 1)
        raise RunFailed(f"rank 0 does not take the run up: {refusal}")
    return store


def agreed_start(store: Any, rank: int, num_ranks: int, patience_s: float = _SILENCE.total_seconds()) -> str:
    """Return the name of this start of all ranks, in a store that may hold what ranks of an earlier start have left.

    Rank 0 names it, hears from each rank who it is, and says of whom it has heard: a rank of whom it has not heard has
    read the name of an earlier start, and looks for a new one.
    """
    who, end_s = uuid.uuid4().hex, time.monotonic() + patience_s
    if rank == 0:
        store.set(_START, who)
        members = [who, *(store.get(f"{who}/{member}").decode() for member in range(1, num_ranks))]
        store.set(f"{who}/members", ",".join(members))
        return who
    told = ""
    while time.monotonic() < end_s:
        if (start := store.get(_START).decode()) != told:
            store.set(f"{start}/{rank}", who)
            told = start
        if store.check([f"{start}/members"]) and who in store.get(f"{start}/members").decode().split(","):
            return start
        time.sleep(_LOOK_S)
    raise RunFailed(f"rank {rank} has waited {patience_s:.0f} s for rank 0 to begin")


@contextmanager
def joined_world(launched: GivenRank, device: str) -> Iterator[None]:
    """Join torch's world with one thread for arithmetic: the cores belong to the other ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = joined_device(device, launched.local_rank)
    ranks = {"rank": launched.rank, "world_size": launched.num_ranks, "timeout": _SILENCE}
    if launched.meets_at_a_port and device != XLA:
        dist.init_process_group(backend, store=_agreed_store(launched), **ranks)
    elif launched.meeting == "env://" and device != XLA:
        distributed: Any = dist  # whose types leave the function out
        of_agent, *_ = next(distributed.rendezvous("env://", launched.rank, launched.num_ranks, timeout=_SILENCE))
        start = agreed_start(of_agent, launched.rank, launched.num_ranks)
        dist.init_process_group(backend, store=distributed.PrefixStore(start, of_agent), **ranks)
    else:
        dist.init_process_group(backend, launched.meeting, **ranks)
    yield
    with suppress(Exception):  # the other end of a connection may be gone already
        dist.destroy_process_group()
