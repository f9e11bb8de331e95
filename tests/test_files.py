"""Files that are replaced are whole at every moment, whatever ends the process."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from autoshard.files import append_line, is_aside, replace_text, takes_lock
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from autoshard.runtime.convert.hf import write_json
from autoshard.sweep.table import RowFile

KILLED_AT = """
import os, signal, sys
from pathlib import Path
name, number = sys.argv[1], int(sys.argv[2])
events, seen = {"open", "os.rename", "os.chmod", "os.remove", "os.truncate"}, 0
def die(event, arguments):
    global seen
    if event in events and any("plan.json" in str(one) for one in arguments):
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
from autoshard.files import replace_text
sys.addaudithook(die)
replace_text(Path(name), "new" * 1000)
"""


def test_a_kill_at_any_moment_leaves_the_old_text_or_the_new_one(tmp_path: Path) -> None:
    path, texts, number = tmp_path / "plan.json", set[str](), 0
    for number in range(1, 20):
        path.write_text("old")
        done = subprocess.run([sys.executable, "-c", KILLED_AT, str(path), str(number)], check=False)
        texts.add(path.read_text())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        assert all(is_aside(one) for one in tmp_path.iterdir() if one != path)
    assert number > 3, "the hook has seen what opens, changes and renames"
    assert texts == {"old", "new" * 1000}


def test_what_holds_the_text_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert replace_text(path, "é\r\n")
    before = path.stat()
    assert not replace_text(path, "é\r\n")
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert path.read_bytes() == "é\r\n".encode()


def test_links_modes_and_devices_stay(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    assert replace_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert replace_text(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()


def test_a_full_disk_leaves_the_old_text_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def full(number: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EOPNOTSUPP, False), (errno.EIO, True)])
def test_only_a_disk_that_fails_refuses_to_make_the_names_in_a_folder_last(
    number: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS and file systems in user space answer EINVAL for a folder: a run there would save no checkpoint."""
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "a").mkdir()
    for act in (
        lambda: Storage.of(str(tmp_path)).rename("a", "b"),
        lambda: replace_text(tmp_path / "plan.json", "{}"),
    ):
        with pytest.raises((OSError, StorageError), match=str(tmp_path)) if fails else nullcontext():
            act()


def test_a_file_system_without_locks_is_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre is that was mounted without ``flock``."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with (tmp_path / ".lock").open("w") as file, (tmp_path / ".lock").open("w") as other:
        assert takes_lock(file) and not takes_lock(other)
        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(OSError, match=r"it takes no lock \(Function not implemented\).*/\.lock"):
            takes_lock(file)


@pytest.mark.parametrize(
    "write", [lambda path: append_line(path, "a line"), lambda path: write_json(path, {"a": 1})], ids=["line", "json"]
)
def test_a_full_disk_names_the_file_that_was_written(write: Callable[[Path], object]) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write(Path("/dev/full"))


def test_a_full_disk_names_the_table_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = RowFile(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/rows.jsonl'"):
        rows.add([{"id": "a"}])
