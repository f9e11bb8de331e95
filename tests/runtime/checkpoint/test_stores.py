"""Checkpoints in S3, by a real server over HTTP: save, resume, prune, damage, faults of the store and of its user."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.config import conf
from s3fs import S3FileSystem

from autoshard.errors import InputError
from autoshard.run.reports import SavedStep
from autoshard.runtime import train as loop
from autoshard.runtime.checkpoint import storage
from autoshard.runtime.checkpoint.storage import Storage, StorageError
from tests.runtime.cases import wait_until
from tests.runtime.checkpoint.s3 import BUCKET, S3, running
from tests.runtime.training_cases import Trained, after_steps, before_steps, plan_of, trained
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks
PLAN = "tp=1,pp=1,dp=2"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running() as found:
        yield found


@pytest.mark.slow
def test_a_run_is_saved_resumed_and_pruned_and_passes_over_damage(
    s3: S3, curve: dict[int, float], tmp_path: Path
) -> None:
    keeping = {"to": f"s3://{BUCKET}/resume", "keep_last": 3, "every_steps": 1}
    parts = [trained(plan_of(PLAN), tmp_path, steps, **keeping) for steps in (2, 4, 6)]
    assert [part.started.step for part in parts] == [0, 2, 4]
    assert parts[0].curve | parts[1].curve | parts[2].curve == {step: curve[step] for step in range(1, 7)}
    oldest, middle, newest = sorted({name.partition("/")[0] for name in s3.objects("resume/")})
    assert newest == "step-00000006"
    assert not s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    assert not (tmp_path / "checkpoints").exists()
    s3.client.delete_object(Bucket=BUCKET, Key=f"resume/{newest}/rank-00001.safetensors")
    flipped = {"Bucket": BUCKET, "Key": f"resume/{middle}/rank-00000.safetensors"}
    data = bytearray(s3.client.get_object(**flipped)["Body"].read())
    data[-5] ^= 4
    s3.client.put_object(**flipped, Body=bytes(data))
    again = trained(plan_of(PLAN), tmp_path, 6, **keeping)
    assert again.started.step == int(oldest[-8:]) and again.curve.items() <= curve.items()
    assert f"{newest}: is damaged: rank-00001.safetensors is missing" in again.notes
    assert f"{middle}/rank-00000.safetensors: the checksum of" in again.notes


def disturbed(s3: S3, folder: Path, *, steps: int, step_s: float, for_s: float | None) -> Trained:
    """Train while the store is away for some seconds, or until a save has failed, from the seventh step on."""
    found, to = Trained(), f"s3://{BUCKET}/{folder.name}"

    def failures() -> list[str]:
        return [one for one in found.said if isinstance(one, str) and "was not saved" in one]

    def disturb() -> None:
        with s3.away():
            if for_s is None:
                wait_until(lambda: bool(failures()), "a save fails")
            else:
                time.sleep(for_s)

    with after_steps(found, 7, disturb):
        slowly = before_steps(lambda _: time.sleep(step_s))
        trained(plan_of(PLAN), folder, steps, found=found, build=slowly, to=to, every_steps=5)
    undisturbed = trained(plan_of(PLAN), folder / "undisturbed", steps + 1, to="none").curve
    assert found.curve.items() <= undisturbed.items()
    assert max(one.blocked_s for one in found.said if isinstance(one, SavedStep)) < 1.0, "no update waits for the store"
    assert bool(failures()) == (for_s is None) and all("The next try" in one for one in failures())
    assert found.saved_steps[-1] == len(found.steps), "saving succeeds again"
    assert found.report is not None and not found.report.unsaved
    assert not list((folder / "spool").iterdir()), "copies are removed when the store has them"
    again = trained(plan_of(PLAN), folder, steps + 1, to=to)
    assert again.started.step == steps and again.curve.items() <= undisturbed.items()
    return found


@pytest.mark.parametrize("lost", rest_is_slow([False, True], 0, 1))
def test_no_step_waits_for_a_store_that_is_away(
    lost: bool, s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is a checkpoint lost while tries go on."""
    monkeypatch.setattr(loop, "_RETRY_S", (0.3, 0.6))
    monkeypatch.setattr(storage, "TRIES_S", (0.1,) if lost else (0.1, 0.2, 0.4, 0.8, 1.6))
    monkeypatch.setattr(storage, "ANSWER_S", 5.0)
    short = {"connect_timeout": 0.6, "read_timeout": 0.6, "retries": {"max_attempts": 0}}
    monkeypatch.setitem(conf, "s3", {"config_kwargs": short})
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    disturbed(s3, tmp_path, steps=30, step_s=0.2, for_s=None if lost else 2.5)


def test_a_store_that_gives_no_leave_to_send_fails_a_save(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of S3 waits for that without any limit of its own."""
    place = Storage.of(f"s3://{BUCKET}/silent")
    with monkeypatch.context() as patch, s3.away():
        patch.setattr(storage, "ANSWER_S", 0.5)
        with pytest.raises(StorageError, match="silent/late: the store did not answer for"):
            place.write("late", b"numbers")
    place.write("soon", b"numbers")
    assert place.read("soon") == b"numbers"


@pytest.mark.slow
def test_a_store_that_cannot_be_used_is_found_before_the_first_step(
    s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal(to: str) -> str:
        found = Trained()
        with pytest.raises(InputError) as caught:
            trained(plan_of(PLAN), tmp_path, 2, found=found, to=to)
        assert not found.said and len(caught.value.faults) == 1
        return str(caught.value)

    said = refusal("s3://nowhere/run")
    assert "checkpoint.to: cannot be used: nowhere/run/.token: " in said
    assert "A bucket, or the disk of a folder, must be there before" in said
    with s3.asking_for_keys():
        assert "must be allowed to list, read, write and remove there" in refusal(f"s3://{BUCKET}/run")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        patch.setitem(conf, "s3", {"config_kwargs": {"retries": {"max_attempts": 0}}})
        assert "Are the network and AWS_ENDPOINT_URL_S3 right?" in refusal(f"s3://{BUCKET}/run")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert "Name a profile in AWS_PROFILE, set AWS_ACCESS_KEY_ID" in refusal(f"s3://{BUCKET}/run")
