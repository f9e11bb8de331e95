"""A small Hugging Face hub on loopback: enough of its interface for the libraries that talk to it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has and how it behaves; tests change it while it runs."""

    files: Mapping[str, bytes]  # "datasets/owner/name/path" or "owner/name/path" of a model
    refuse: tuple[int, str] | None = None  # the status and error code of every answer
    refuse_files: tuple[int, str] | None = None
    breaks_after: int | None = None  # bytes of a large file that are sent before the line goes dead
    url: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Answers(_Answers):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""

    def _answer(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.served.refuse:
            self._send(self.served.refuse[0], {"X-Error-Code": self.served.refuse[1]})
        elif path.startswith("/api/"):
            self._api(json.loads(body or "{}").get("paths"), *path[5:].split("/"))
        elif "/resolve/" in path:
            self._file(path)
        else:
            self._send(404, {"X-Error-Code": "EntryNotFound"})

    def _api(self, paths: list[str] | None, kind: str, owner: str = "", name: str = "", what: str = "", *rest: str):
        repository = f"{'datasets/' if kind == 'datasets' else ''}{owner}/{name}/"
        tree = [
            {"type": "file", "path": path.removeprefix(repository), "size": len(data), "oid": _etag(data)}
            for path, data in self.served.files.items()
            if path.startswith(repository)
        ]
        refused = self.served.refuse_files if what == "auth-check" else None if tree else (404, "RepoNotFound")
        if refused:
            return self._send(refused[0], {"X-Error-Code": refused[1]})
        if paths is not None:
            return self._json([one for one in tree if one["path"] in paths])
        if what == "tree":
            return self._json(_inside(tree, "".join(f"{part}/" for part in rest[1:])))
        siblings = [{"rfilename": one["path"]} for one in tree]
        described = {"_id": "1", "id": f"{owner}/{name}", "sha": REVISION, "siblings": siblings, "private": False}
        return self._json({} if what == "auth-check" else described)

    def _file(self, path: str) -> None:
        repository, _, rest = path[1:].partition("/resolve/")
        data = self.served.files.get(f"{repository}/{rest.partition('/')[2]}")
        refused = self.served.refuse_files or (None if data is not None else (404, "EntryNotFound"))
        if refused or data is None:
            assert refused
            return self._send(refused[0], {"X-Error-Code": refused[1]})
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        most = self.served.breaks_after
        broken = most if most and len(data) > most else None
        return self._send(206 if begin else 200, headers, data[begin:], broken)

    def _json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json", "X-Repo-Commit": REVISION}, json.dumps(value).encode())

    def _send(self, status: int, headers: Mapping[str, str], data: bytes = b"", most: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[:most])
        if most is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()


for _method in ("GET", "HEAD", "POST"):
    setattr(_Answers, f"do_{_method}", _Answers._answer)  # the names that http.server looks for


def _inside(entries: list[dict[str, object]], folder: str) -> list[dict[str, object]]:
    """What a listing of one folder shows: its files, and the folders in it."""
    inside = [one for one in entries if str(one["path"]).startswith(folder)]
    files = [one for one in inside if "/" not in str(one["path"])[len(folder) :]]
    folders = {str(one["path"])[len(folder) :].partition("/")[0] for one in inside if one not in files}
    return [*files, *({"type": "directory", "path": folder + name, "oid": "0"} for name in sorted(folders))]


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
