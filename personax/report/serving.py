"""A page on this machine alone, made again for each request: read only, without any other address."""

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
    """A server of one page on the loopback interface; port 0 is any free one.

    It answers GET requests for `/` that name this machine as their host, so that no page of another site can read it
    by making its own name point here.
    """
    turn = Lock()

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "personax", ""

        def do_GET(self) -> None:
            known = {f"{name}:{server.server_port}" for name in (HOST, "localhost")}
            if self.headers.get("Host") not in known:
                self._answer(HTTPStatus.FORBIDDEN, "This page is for this machine alone.")
            elif self.path != "/":
                self._answer(HTTPStatus.NOT_FOUND, "There is one page here: /")
            else:
                try:
                    with turn:  # what follows a run reads on from where it stopped
                        page = render()
                    self._answer(HTTPStatus.OK, page)
                except Exception as error:  # a file may be unreadable for a moment; the page keeps its last numbers
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
