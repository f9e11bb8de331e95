"""A small Hugging Face hub on loopback: enough of its interface for the libraries that talk to it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has and how it behaves; tests change it while it runs."""

    files: Mapping[str, bytes]  # "datasets/owner/name/path" or "owner/name/path" of a model
    refuse: tuple[int, str] | None = None  # the status and error code of every answer
    refuse_files: tuple[int, str] | None = None
    needs_token: bool = False
    breaks_after: int | None = None  # bytes of a large file that are sent before the line goes dead
    url: str = ""
    asked: list[str] = field(default_factory=list)


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
        self.served.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())

    def _post(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length) or "{}")
        if self._refused(self.served.refuse):
            return None
        _, kind, owner, name, *_ = self._path()[1:].split("/")
        paths = asked.get("paths", [])
        return self._json([one for one in self._tree(_repository(kind, owner, name)) if one["path"] in paths])

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _answer(self) -> None:
        path = self._path()
        if self._refused(self.served.refuse):
            return None
        if path.startswith("/api/"):
            return self._api(*path[5:].split("/"))
        if "/resolve/" in path:
            return self._file(path)
        return self._error(404, "EntryNotFound")

    def _refused(self, how: tuple[int, str] | None) -> bool:
        if how is None or (self.served.needs_token and self.headers.get("Authorization")):
            return False
        self._error(*how)
        return True

    def _api(self, kind: str, owner: str = "", name: str = "", what: str = "", *rest: str) -> None:
        repository = _repository(kind, owner, name)
        if not any(path.startswith(repository) for path in self.served.files):
            return self._error(404, "RepoNotFound")
        if what == "auth-check":
            refused = self._refused(self.served.refuse_files)
            return None if refused else self._json({})
        if what == "tree":
            return self._json(_inside(self._tree(repository), "".join(f"{part}/" for part in rest[1:])))
        siblings = [{"rfilename": one["path"]} for one in self._tree(repository)]
        return self._json(
            {"_id": "1", "id": f"{owner}/{name}", "sha": REVISION, "siblings": siblings, "private": False}
        )

    def _tree(self, repository: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": path.removeprefix(repository), "size": len(data), "oid": _etag(data)}
            for path, data in self.served.files.items()
            if path.startswith(repository)
        ]

    def _file(self, path: str) -> None:
        if self._refused(self.served.refuse_files):
            return None
        repository, _, rest = path[1:].partition("/resolve/")
        data = self.served.files.get(f"{repository}/{rest.partition('/')[2]}")
        if data is None:
            return self._error(404, "EntryNotFound")
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._headers(headers, len(data) - begin)
        if self.command == "HEAD":
            return None
        most = self.served.breaks_after
        if most is None or len(data) <= most:
            self.wfile.write(data[begin:])
            return None
        self.wfile.write(data[begin:most])
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()
        return None

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self._headers({"Content-Type": "application/json", "X-Repo-Commit": REVISION}, len(data))
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self._headers({"X-Error-Code": code, "X-Error-Message": code}, 0)

    def _headers(self, headers: Mapping[str, str], length: int) -> None:
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


for _method, _act in (("GET", _Answers._answer), ("HEAD", _Answers._answer), ("POST", _Answers._post)):
    setattr(_Answers, f"do_{_method}", _act)  # the names that http.server looks for


def _inside(entries: list[dict[str, object]], folder: str) -> list[dict[str, object]]:
    """What a listing of one folder shows: its files, and the folders in it."""
    inside = [one for one in entries if str(one["path"]).startswith(folder)]
    files = [one for one in inside if "/" not in str(one["path"])[len(folder) :]]
    folders = {str(one["path"])[len(folder) :].partition("/")[0] for one in inside if one not in files}
    return [*files, *({"type": "directory", "path": folder + name, "oid": "0"} for name in sorted(folders))]


def _repository(kind: str, owner: str, name: str) -> str:
    return f"{'datasets/' if kind == 'datasets' else ''}{owner}/{name}/"


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
