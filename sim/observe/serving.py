"""A small server that answers /metrics with predicted figures, and works them out anew now and then. It takes no other request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sim.errors import RooftraceError


class Served:
    """The text that is answered, and its renewal."""

    def __init__(
        self, text: str, renewed: Callable[[], str] | None, every_s: float, warn: Callable[[str], None]
    ) -> None:
        """*renewed* works the text out anew; None: it stays."""
        self.text = text
        self._renewed = renewed
        self._every_s = every_s
        self._warn = warn
        self._over = threading.Event()

    def keep_renewing(self) -> None:
        """Renew the text until `stop`; the latest that could be worked out stays where one cannot."""
        while self._renewed is not None and not self._over.wait(self._every_s):
            try:
                self.text = self._renewed()
            except (RooftraceError, OSError, ValueError, LookupError, ArithmeticError) as error:
                why = error if isinstance(error, RooftraceError) else repr(error)
                self._warn(f"the figures of {time.strftime('%H:%M:%S')} stay as they were: {why}")

    def stop(self) -> None:
        self._over.set()


def server_of(served: Served, host: str, port: int) -> ThreadingHTTPServer:
    """A server at *host* and *port* (0: any that is free); RooftraceError where it cannot listen there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = (served.text if found else "There is /metrics here, and nothing else.\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line a scrape tells nobody anything."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise RooftraceError(f"--serve {port}: cannot listen at {host}:{port}: {error.strerror}") from None


def serve(served: Served, server: ThreadingHTTPServer) -> None:
    """Answer until interrupted."""
    renewing = threading.Thread(target=served.keep_renewing, daemon=True)
    renewing.start()
    try:
        server.serve_forever()
    finally:
        served.stop()
        server.server_close()
