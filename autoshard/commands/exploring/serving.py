"""The server of the page: on 127.0.0.1 only, for whoever knows the token in the address, and under no other host."""

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, Response, request
from werkzeug.serving import WSGIRequestHandler

from autoshard.commands.exploring.answering import (
    Event,
    answer_question,
    draw_difference,
    draw_whole,
    refusal,
)
from autoshard.commands.exploring.asking import Controls
from autoshard.commands.exploring.searching import Searches
from autoshard.errors import InputError
from autoshard.report.page.explorer import PANES, explorer_file, explorer_page
from autoshard.spec.record import decode, encode

ADDRESS = "127.0.0.1"
_HOSTS = [ADDRESS, "localhost"]  # other names are those of pages elsewhere, whose server now claims to be here
_MOST_BYTES = 64 * 1024
_POLICY = (
    "default-src 'none'; script-src 'self'{scripts}; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TYPES = {"css": "text/css", "js": "text/javascript"}
_NO_ANSWER = "this pane has no answer yet"


class QuietRequestHandler(WSGIRequestHandler):
    """Answers in parts as they come, and writes no line for each request."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


@dataclass(slots=True, kw_only=True)
class _Page:
    """The page, with what each pane shows: the text of the plan file of its answer. The methods are its addresses."""

    initial: Controls
    line: str
    searches: Searches
    plans: dict[str, str] = field(default_factory=dict[str, str])
    latest: dict[str, Controls] = field(default_factory=dict[str, Controls])  # by pane what was asked last

    def root(self) -> str:
        """Return the page without an answer."""
        return explorer_page(encode(self.initial), self.line)

    def file(self, name: str, kind: str) -> Response:
        """Return a style or a script."""
        return Response(explorer_file(f"{name}.{kind}"), mimetype=_TYPES[kind])

    def answer(self, pane: str) -> Response:
        """Return what becomes of the question of a pane, a line for each event, as soon as it is known."""
        events = self._events(pane, request.get_json(silent=True))
        return Response(_lines(events), mimetype="application/x-ndjson")

    def _events(self, pane: str, data: object) -> Generator[Event]:
        self.plans.pop(pane, None)
        try:
            controls = decode(Controls, data)
            yield {"kind": "question", "final": False, "words": controls.words}
        except InputError as error:
            yield refusal(error)
            return
        self.latest[pane] = controls
        with closing(self.searches.events(pane, answer_question, controls)) as events:
            for event in events:
                plan = event.pop("plan", None)
                if plan is not None and self.latest[pane] is controls:
                    self.plans[pane] = plan
                yield event

    def plan_file(self, pane: str) -> Response:
        """Return the plan file that the command of a pane writes."""
        return Response(self.plans[pane], mimetype="application/json") if pane in self.plans else _text(_NO_ANSWER, 404)

    def whole(self, pane: str) -> Response:
        """Return the page that ``autoshard report`` draws of that plan."""
        if pane not in self.plans:
            return _text(_NO_ANSWER, 404)
        event = self._drawn(f"{pane} whole", draw_whole, self.plans[pane])
        if "html" not in event:
            return _text("\n".join(event.get("lines", ())), 500)
        response = Response(event["html"], mimetype="text/html")
        response.headers["Content-Security-Policy"] = _POLICY.format(scripts=_hashes_of(event["html"]))
        return response

    def difference(self) -> Event:
        """Return how the second answer differs from the first."""
        plans = [self.plans[pane] for pane in PANES if pane in self.plans]
        if len(plans) < len(PANES):
            return {"kind": "refused", "final": True, "lines": [_NO_ANSWER]}
        return self._drawn("difference", draw_difference, plans)

    def _drawn(self, place: str, *task: Any) -> Event:
        (event,) = self.searches.events(place, *task)
        return event


def explorer_app(token: str, initial: Controls, searches: Searches, line: str = "autoshard plan") -> Flask:
    """Return the application.

    ``initial`` is the question with which the page opens, ``line`` what its options follow on a command line.
    """
    app, page = Flask("autoshard", static_folder=None), _Page(initial=initial, line=line, searches=searches)
    app.config.update(TRUSTED_HOSTS=_HOSTS, MAX_CONTENT_LENGTH=_MOST_BYTES)

    def check_token() -> Response | None:
        said = (request.view_args or {}).pop("token", "")
        same = hmac.compare_digest(said.encode(), token.encode())
        return None if same else _text("open the address that autoshard explore has printed: it has a token", 403)

    def add_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        response.headers.setdefault("Content-Security-Policy", _POLICY.format(scripts=""))
        return response

    app.before_request(check_token)
    app.after_request(add_headers)
    pane = f"/<token>/<any({','.join(map(repr, PANES))}):pane>"
    app.get("/<token>/")(page.root)
    app.get("/<token>/<any('page','explorer'):name>.<any('css','js'):kind>")(page.file)
    app.post(f"{pane}/answer")(page.answer)
    app.get(f"{pane}/plan.json")(page.plan_file)
    app.get(f"{pane}/report.html")(page.whole)
    app.post("/<token>/difference")(page.difference)
    return app


def _lines(events: Generator[Event]) -> Generator[str]:
    """Yield events as lines; who reads no further ends what makes them."""
    with closing(events):
        for event in events:
            yield json.dumps(event) + "\n"


def _text(line: str, status: int) -> Response:
    return Response(f"{line}\n", status=status, mimetype="text/plain")


def _hashes_of(html: str) -> str:
    """Return the scripts that stand in a page, as its policy names them."""
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.S)
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return "".join(f" 'sha256-{digest}'" for digest in digests)
