"""``autoshard explore``: a page of this machine that answers a question at every change of its controls."""

import secrets
import shlex
import signal
import socket
import webbrowser
from contextlib import ExitStack, closing, suppress

from autoshard.command_line.options import Counts
from autoshard.commands.exploring.asking import controls_of
from autoshard.errors import Fault, InputError, require
from autoshard.extensions import EXTENSIONS
from autoshard.spec.recipe import QuestionOptions

_MOST = 65535  # of ports


def explore(
    question: QuestionOptions,
    nodes: Counts = (),
    tokens: str | None = None,
    choose: str | None = None,
    port: int = 0,
    no_open: bool = False,
) -> int:
    """Open a page that plans again at every change of model, cluster, nodes, length, batch and pins.

    The page is served to this machine only, to whoever knows the token in its address; it asks nothing of any other.
    Two questions stand side by side, each with the command that gives the same. Ctrl-C ends it.

    Args:
        question: The question with which the page opens. Default: llama3-70b on 16 nodes.
        nodes: How many nodes the cluster has. Default: 1.
        tokens: How many tokens the whole training reads, e.g. 2T or 300B; the answer says how many days and dollars.
        choose: Which answer is shown: fastest, simple, vendor, fsdp, or the number of a runner-up. Default: simple.
        port: The port of this machine, on which the page is served. Default: any that is free.
        no_open: Only print the address, and open no browser.
    """
    require((0 <= port <= _MOST, "--port", f"must be 0 to {_MOST}, not {port}"))
    try:
        from autoshard.commands.exploring.serving import ADDRESS, QuietRequestHandler, explorer_app
    except ModuleNotFoundError as error:
        if error.name not in ("flask", "werkzeug"):
            raise
        raise InputError.of("explore", "needs Flask. Type: pip install 'autoshard[page]'") from None
    from werkzeug.serving import make_server

    from autoshard.commands.exploring.searching import Searches

    initial = controls_of(question, nodes, tokens, choose)
    token, searches = secrets.token_urlsafe(16), Searches(tuple(EXTENSIONS.files))
    line = shlex.join(["autoshard", "plan", *EXTENSIONS.options()])
    with _listening(ADDRESS, port) as listener, closing(searches):
        address = f"http://{ADDRESS}:{listener.getsockname()[1]}/{token}/"
        app = explorer_app(token, initial, searches, line)
        server = make_server(ADDRESS, 0, app, threaded=True, request_handler=QuietRequestHandler, fd=listener.fileno())
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ExitStack() as ends, suppress(KeyboardInterrupt):
            ends.callback(server.server_close)
            print(f"{address}\nthe page is open until Ctrl-C", flush=True)
            searches.warm_up()
            if not no_open and not webbrowser.open(address):
                print("no browser was found: open the address yourself", flush=True)
            server.serve_forever()
    return 0


def _listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        reason = f"cannot be used: {error.strerror}. Name another, or leave it out"
        raise InputError([Fault(where=f"--port {port}", message=reason)]) from None
