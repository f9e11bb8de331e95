"""An S3 on loopback: a real server process that speaks HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
import s3fs

from tests.runtime.cases import wait_until

BUCKET = "runs"


@dataclass(frozen=True)
class S3:
    """The server, and a client that looks into it."""

    server: "subprocess.Popen[bytes]"
    url: str
    client: Any

    def objects(self, prefix: str) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [one["Key"].removeprefix(prefix).lstrip("/") for one in listed]

    @contextmanager
    def away(self) -> Iterator[None]:
        """Take connections for a while, and be silent."""
        self.server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.send_signal(signal.SIGCONT)

    @contextmanager
    def asking_for_keys(self) -> Iterator[None]:
        """Refuse who has no leave: the keys of these tests belong to nobody."""
        self._free_actions("0")
        try:
            yield
        finally:
            self._free_actions("inf")

    def _free_actions(self, number: str) -> None:
        kind = {"Content-Type": "text/plain"}
        with urlopen(Request(f"{self.url}/moto-api/reset-auth", number.encode(), kind, method="POST")) as answer:
            assert json.load(answer)["status"] == "ok"


@contextmanager
def running() -> Iterator[S3]:
    """Start it, with a bucket; the environment names it as users name an endpoint."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command, nothing = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=nothing, stderr=nothing)

    def answers() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers, "the server answers")
        url = f"http://127.0.0.1:{port}"
        settings = {"ENDPOINT_URL_S3": url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
        with pytest.MonkeyPatch.context() as patch:
            for name in [one for one in os.environ if one.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in {**settings, "DEFAULT_REGION": "us-east-1"}.items():
                patch.setenv(f"AWS_{name}", value)
            s3fs.S3FileSystem.clear_instance_cache()
            client = boto3.client("s3", endpoint_url=url)
            client.create_bucket(Bucket=BUCKET)
            yield S3(server, url, client)
            client.close()
    finally:
        server.send_signal(signal.SIGCONT)
        server.kill()
        server.wait()
