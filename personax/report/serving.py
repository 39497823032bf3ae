"""A read-only local web server for one page, rendered for each request."""

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

HOST = "127.0.0.1"
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def page_server(render: Callable[[], str], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of one page on the loopback interface; port 0 picks a free port.

    It answers only GET requests for `/` whose Host header names this machine, which prevents DNS rebinding: another
    site cannot read the page by pointing its own name here.
    """
    turn = Lock()

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "personax", ""

        def do_GET(self) -> None:
            known = {f"{name}:{server.server_port}" for name in (HOST, "localhost")}
            if self.headers.get("Host") not in known:
                self._answer(HTTPStatus.FORBIDDEN, "This page is available on this machine only.")
            elif self.path != "/":
                self._answer(HTTPStatus.NOT_FOUND, "Not found. The only page is /.")
            else:
                try:
                    with turn:  # the renderer keeps its reading position between requests
                        page = render()
                    self._answer(HTTPStatus.OK, page)
                except Exception as error:  # a file may be briefly unreadable; the page then keeps its last numbers
                    self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

        def _answer(self, status: HTTPStatus, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            plain = {} if status is HTTPStatus.OK else {"Content-Type": "text/plain; charset=utf-8"}
            for name, value in {**HEADERS, **plain, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the terminal quiet."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    return server
