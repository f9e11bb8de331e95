"""An S3 on loopback: a real server process that speaks HTTP, before it a gate that can be shut."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
import s3fs

BUCKET = "runs"
_GATE = Path(__file__).with_name("gate.py")


@dataclass(frozen=True)
class S3:
    """The server and its gate; ranks go through the gate, tests may look behind it."""

    server: "subprocess.Popen[bytes]"
    gate: "subprocess.Popen[bytes]"
    behind: str
    client: Any

    def objects(self, prefix: str) -> dict[str, int]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return {one["Key"].removeprefix(prefix).lstrip("/"): one["Size"] for one in listed}

    def folders(self, prefix: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.objects(prefix)})

    @contextmanager
    def away(self, how: str) -> Iterator[None]:
        """Refuse connections for a while, or take them and be silent."""
        process, stop, go_on = {
            "refuses": (self.gate, signal.SIGUSR1, signal.SIGUSR2),
            "silent": (self.server, signal.SIGSTOP, signal.SIGCONT),
        }[how]
        process.send_signal(stop)
        try:
            yield
        finally:
            process.send_signal(go_on)

    @contextmanager
    def asking_for_keys(self) -> Iterator[None]:
        """Refuse who has no leave: the keys of these tests belong to nobody."""
        self._free_actions("0")
        try:
            yield
        finally:
            self._free_actions("inf")

    def _free_actions(self, number: str) -> None:
        asked = Request(
            f"{self.behind}/moto-api/reset-auth", number.encode(), {"Content-Type": "text/plain"}, method="POST"
        )
        with urlopen(asked) as answer:
            assert json.load(answer)["status"] == "ok"


@contextmanager
def running() -> Iterator[S3]:
    """Start both, with a bucket; the environment names the gate as users name an endpoint."""
    behind, before = _free_port(), _free_port()
    server = _started("-m", "moto.server", "-H", "127.0.0.1", "-p", str(behind))
    gate = _started(str(_GATE), str(before), str(behind))
    try:
        for port in (behind, before):
            _wait_for(port)
        with pytest.MonkeyPatch.context() as patch:
            for name in [one for one in os.environ if one.startswith("AWS_")]:
                patch.delenv(name)
            patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{before}")
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            s3fs.S3FileSystem.clear_instance_cache()
            client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{behind}")
            client.create_bucket(Bucket=BUCKET)
            yield S3(server, gate, f"http://127.0.0.1:{behind}", client)
            client.close()
    finally:
        for process in (gate, server):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _started(*words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_for(port: int) -> None:
    until_s = time.monotonic() + 60.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert time.monotonic() < until_s, f"nobody answers at port {port}"
            time.sleep(0.05)
        else:
            return
