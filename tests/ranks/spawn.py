"""Run a function on several CPU processes joined by gloo, and hand back what each returned.

Ranks are interpreters without anything of the process that tests, as torchrun, srun and Kubernetes start them, of two
hash seeds.
"""

import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, wraps
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import dill
import pytest
from _pytest.assertion import install_importhook
from _pytest.config import get_config

ROOT = Path(__file__).parents[2]
_TRIES = 1000  # of ten milliseconds each
_SEEDS = (4, 7)  # of the ranks' hashes: neighbours along an axis of two order names of a layer differently
_IMPORTED = (
    "autoshard.engine.torch.engine", "autoshard.modules.sharded", "tests.ranks.cases",
    "transformers.models.llama.modeling_llama",  # a second of each rank that shards a model of transformers
    "torch._inductor.compile_fx",
)  # fmt: skip

Replaced = tuple[Any, str, Any]


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


def on_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300.0,
    replaced: Sequence[Replaced] = (),
    prepare: Callable[[], object] | None = None,
) -> list[Any]:
    """Call ``body(*args)`` on every rank of a gloo world; raise what went wrong first, with its rank.

    Ranks stay for the next case; after a failure all are new. What is ``replaced`` on the ranks meanwhile are
    attributes: of which object, its name, its value. Libraries that a process can begin only once are imported by
    ``prepare`` in ranks that work for nobody else, since a process that has worked has threads, which a fork has not;
    every case is then a fork of its rank, and may change its process for good.
    """
    named = [(place.__name__ if isinstance(place, ModuleType) else place, *other) for place, *other in replaced]
    pool, work = _pool(dill.dumps(prepare)), dill.dumps((body, args, named))
    ranks = pool.first(num_ranks)
    what = f"{name_of(body)} on {num_ranks} ranks"
    try:
        # A collective that waits for ever says where, before this process gives up.
        group = {"init_method": f"file://{pool.new_store()}", "timeout": timedelta(seconds=0.9 * timeout_s)}
        for rank, connection in enumerate(ranks):
            connection.send((group | {"rank": rank, "world_size": num_ranks}, work))
        return _collected({connection: rank for rank, connection in enumerate(ranks)}, what, timeout_s)
    except RankFailed:
        pool.stop(signal.SIGABRT)  # each that still works says where it stands
        raise
    except BaseException:
        pool.stop()
        raise


def each_rank(count: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let all of so many ranks run a test itself, each with its parameters; ``options`` are those of `on_ranks`.

    The count may be that of a parameter.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def by_ranks(**given: Any) -> None:
            ranks = given[count] if isinstance(count, str) else count
            on_ranks(ranks, _OwnTest(test.__module__, test.__name__), given, **options)

        return by_ranks

    return decorate


def name_of(body: Callable[..., Any]) -> str:
    return getattr(body, "__name__", str(body))


@dataclass(frozen=True)
class _OwnTest:
    """A test that `each_rank` decorates, by its name: ranks import it, and run what is decorated."""

    module: str
    name: str

    def __call__(self, given: Mapping[str, Any]) -> None:
        getattr(import_module(self.module), self.name).__wrapped__(**given)

    def __str__(self) -> str:
        return self.name


@cache
def _pool(prepare: bytes) -> "_Pool":
    """Return the ranks of all cases with the same preparation."""
    return _Pool(prepare)


@dataclass(frozen=True)
class _Template:
    """The way to an interpreter that has imported what ranks need. All workers of a run of tests share it."""

    requests: socket.socket
    process: "subprocess.Popen[bytes] | None"  # of the worker that has started it

    @classmethod
    def reach(cls, seed: int) -> "_Template":
        """Connect with the one whose strings have the hashes of this seed; the worker that is first starts it."""
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        name, process = f"\0autoshard ranks {run} {seed}", None
        for _ in range(_TRIES):
            requests = socket.socket(socket.AF_UNIX)
            with suppress(ConnectionError):
                requests.connect(name)
                if requests.recv(1):
                    return cls(requests, process)
            requests.close()
            if process and process.wait():
                break
            process = cls._started(seed, name) or process
        raise RankFailed("the interpreter that ranks are forks of has ended before it served anybody")

    @classmethod
    def _started(cls, seed: int, name: str) -> "subprocess.Popen[bytes] | None":
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": paths,
            "GLOO_SOCKET_IFNAME": "lo",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # forks have no threads of what they import
        }
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(name)
            except OSError:  # another worker was first
                time.sleep(0.01)
                return None
            listener.listen()
            command = [sys.executable, "-X", "faulthandler", "-m", "tests.ranks.spawn", str(listener.fileno())]
            return subprocess.Popen(
                command,
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fork(self) -> Connection:
        """Ask for a rank; it says its number as a process when it is there, and complains where this process does."""
        here, there = socket.socketpair()
        with there:
            socket.send_fds(self.requests, [b"1"], [there.fileno(), 1, 2])
        return Connection(here.detach())


class _Pool:
    """Ranks that wait for work, each a fork of an interpreter that stays; all end with this process.

    A rank that follows a failure is there at once, since its interpreter has imported torch already. Ranks that
    are prepared do no other cases, so that nothing but what they import is in the processes that they fork.
    """

    def __init__(self, prepare: bytes) -> None:
        self._prepare = prepare
        self._templates: list[_Template] = []
        self._connections: list[Connection] = []
        self._processes: list[int] = []
        self._stores = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._num_stores = 0

    def new_store(self) -> str:
        """Return the file of a new store, in a folder that stays.

        A rank ends its store maybe long after its answer. Where the file is removed just then, torch waits for it until
        the time of the store is over, and the process dies.
        """
        self._num_stores += 1
        return f"{self._stores.name}/{self._num_stores}"

    def first(self, count: int) -> Sequence[Connection]:
        """Start as many as are missing; return the first ones."""
        for seed in _SEEDS[len(self._templates) : count]:
            self._templates.append(_Template.reach(seed))
        for rank in range(len(self._connections), count):
            self._connections.append(self._templates[rank.bit_count() % len(_SEEDS)].fork())
        for connection in self._connections[len(self._processes) : count]:
            connection.send_bytes(self._prepare)
            self._processes.append(connection.recv())
        return self._connections[:count]

    def stop(self, by: signal.Signals = signal.SIGKILL) -> None:
        """End all ranks; a connection ends with its rank."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process, by)
        for connection in self._connections:
            with suppress(EOFError, OSError):
                while connection.poll(10.0):
                    connection.recv_bytes()
            connection.close()
        self._connections, self._processes = [], []


def _collected(ends: dict[Connection, int], what: str, timeout_s: float) -> list[Any]:
    """Read one answer per rank; the failure that happened first ends the waiting."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(ends):
        ready = wait([end for end, rank in ends.items() if rank not in answers], deadline - time.monotonic())
        if not ready:
            missing = sorted(set(ends.values()) - set(answers))
            raise RankFailed(f"{what}: no answer from ranks {missing} within {timeout_s} s")
        failures: list[tuple[float, str]] = []
        for end in ready:
            assert isinstance(end, Connection)
            when, error, value = _answer(end)
            if error:
                failures.append((when, f"{what}: rank {ends[end]} failed\n{error}"))
            answers[ends[end]] = value
        if failures:
            raise RankFailed(min(failures)[1])
    return [answers[rank] for rank in sorted(answers)]


def _answer(end: Connection) -> tuple[float, str, Any]:
    try:
        return pickle.loads(end.recv_bytes())
    except (EOFError, OSError):
        return time.monotonic(), "the process ended without an answer", None


def be_a_template(number: int) -> None:
    """Import what most ranks need; then be forked as often as a worker asks, until all workers have ended."""
    from autoshard.runtime.machine import require_torch

    require_torch()  # as `autoshard run` imports it: so that forks can use GPUs
    import torch

    install_importhook(get_config())  # so that an assertion of a test says what it compared
    for name in _IMPORTED:
        import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a search for garbage would copy the pages that ranks share
    gc.set_threshold(20_000, 20, 20)
    _serve(socket.socket(fileno=number))


def _serve(listener: socket.socket) -> None:
    workers: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *workers], [], [])[0]:
            if ready is listener:
                workers.append(listener.accept()[0])
                workers[-1].send(b"1")
            elif files := _requested(ready):
                _fork_a_rank(files, (listener, *workers))
            else:
                workers.remove(ready)
                ready.close()
                if not workers:
                    return


def _fork_a_rank(files: Sequence[int], connections: Sequence[socket.socket]) -> None:
    if not os.fork():
        for connection in connections:
            connection.close()
        _be_a_rank(*files)
        os._exit(0)
    for file in files:
        os.close(file)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _requested(worker: socket.socket) -> list[int]:
    """Receive the connection of a rank, and where it prints and complains; nothing where the worker has ended."""
    try:
        return socket.recv_fds(worker, 1, 3)[1]
    except ConnectionError:
        return []


def _be_a_rank(connection: int, *printing: int) -> None:
    """Do what is sent until nobody is there to send."""
    for number, file in enumerate(printing, start=1):
        os.dup2(file, number)
        os.close(file)
    end = Connection(connection)
    prepare = dill.loads(end.recv_bytes())
    end.send(os.getpid())
    if prepare:
        prepare()
    with suppress(EOFError, OSError):
        while True:
            work = end.recv()
            if not prepare:
                _work(end, *work, stays=True)
                continue
            if not (child := os.fork()):
                _work(end, *work)
                os._exit(0)
            if status := os.waitpid(child, 0)[1]:
                end.send_bytes(pickle.dumps((time.monotonic(), f"the process ended with {status}", None)))


def _work(end: Connection, group: dict[str, Any], work: bytes, *, stays: bool = False) -> None:
    """Be one rank: the answer goes out before the process group goes down, so that the first failure is told first.

    A process that stays for the next case must be after this case as it was before.
    """
    import torch
    import torch.distributed as dist

    done = threading.Event()
    threading.Thread(target=_end_with_parent, args=(os.getppid(), end, done), daemon=True).start()
    torch.manual_seed(0)
    state = _rank_state()
    try:
        body, args, replaced = dill.loads(work)
        dist.init_process_group("gloo", **group)
        dist.barrier()  # a rank that fails at once would close connections that others still make
        with pytest.MonkeyPatch.context() as patch:
            for place, name, value in replaced:
                patch.setattr(import_module(place) if isinstance(place, str) else place, name, value)
            answer = pickle.dumps((time.monotonic(), "", body(*args)))
        changed = [name for name, value in _rank_state().items() if stays and value != state[name]]
        assert not changed, f"{name_of(body)} changes {changed} of a process; with prepare each case has a new process"
    except BaseException:
        answer = pickle.dumps((time.monotonic(), traceback.format_exc(), None))
    end.send_bytes(answer)
    done.set()
    with suppress(Exception):  # the other end of a connection may be gone already
        dist.destroy_process_group()


def _rank_state() -> dict[str, Any]:
    """What a case can change for the cases after it, but for what torch's compiler notes for itself."""
    import torch
    import torch.distributed as dist

    return {
        "the environment": {name: value for name, value in os.environ.items() if "TORCHINDUCTOR" not in name},
        "the folder": Path.cwd(),
        "the path of modules": [place for place in sys.path if not place.endswith("setuptools/_vendor")],
        "the name of a device": torch._C._get_privateuse1_backend_name(),
        "the backends of devices": dict(dist.Backend.default_device_backend_map),
        "the default format": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "whether gradients are computed": torch.is_grad_enabled(),
    }


def _end_with_parent(parent: int, end: Connection, done: threading.Event) -> None:
    """End this process when the one that tests is gone, even in the middle of work; say where it stood."""
    tester = select.poll()
    tester.register(end.fileno(), select.POLLHUP)
    while not done.wait(1.0):
        if os.getppid() != parent or tester.poll(0):
            faulthandler.dump_traceback()
            os._exit(1)


if __name__ == "__main__":
    from tests.ranks.spawn import be_a_template as main  # whose classes have the names that pickles know

    main(int(sys.argv[1]))
