"""The state of a live run as a table on a terminal, and as metrics for Prometheus."""

import threading
from collections.abc import Callable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from personax.evaluation.scores import show
from personax.experiment.names import printable
from personax.experiment.summaries import headline_of
from personax.live.status import ClientStatus, FederationStatus

_AWAY = 60.0  # seconds without a request after which a client is shown as away


def table_of(status: FederationStatus) -> Table:
    """A table of the run's state with one row per client."""
    rate = status.num_events / status.seconds if status.seconds else 0.0
    state = "finished" if status.finished else f"{rate:.2g} updates/s"
    title = f"{status.name}: {status.algorithm}, {status.mode}"
    done = f"version {status.version}, {status.num_events} updates of {status.target}"
    caption = f"{done}, {status.seconds:.0f} s, {state}"
    if status.refusals:
        caption += "; refused requests: " + ", ".join(f"{why} {num}" for why, num in status.refusals.items())
    table = Table(
        "client", "last heard", "applied", "late", "refused", "staleness", "reported", box=SIMPLE, pad_edge=False
    )
    table.title, table.caption = plain(title), plain(caption)
    for client in status.clients:
        counts = (client.num_applied, client.num_late, client.num_refused, client.staleness)
        table.add_row(*map(plain, (client.name, _ago(client.seconds_ago), *counts, latest(client))))
    return table


def plain(text: object) -> Text:
    """Text from a server or a client, without control characters or markup."""
    return Text(printable(text))


def latest(client: ClientStatus) -> str:
    """The last numbers that a client chose to report, by their headline metric."""
    shown = []
    for score, metrics in client.numbers.items():
        if metrics:
            metric = headline_of(list(metrics))
            shown.append(f"{score}: {show(metrics[metric], metric)}")
    return ", ".join(shown)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "not since the start"
    return f"{seconds:.0f} s ago" + (" (away)" if seconds > _AWAY else "")


class _ThreadedServer(ThreadingMixIn, WSGIServer):
    """A server that answers each request in its own thread."""

    daemon_threads = True


class _Unlogged(WSGIRequestHandler):
    """A handler that does not log requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Metrics:
    """Pages for Prometheus and for health checks on this machine, computed from the current state on each request.

    `problem` returns the reason why the server does not work, or "".
    """

    def __init__(self, status: Callable[[], FederationStatus], problem: Callable[[], str] = lambda: "") -> None:
        self.status, self.problem = status, problem
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)  # pyright: ignore[reportArgumentType]

    def start(self, port: int) -> tuple[Any, Any]:
        """Serve the metrics, and the server's health at `/health`; return the HTTP server and its thread."""
        shown = make_wsgi_app(self.registry)

        def page(asked: dict[str, Any], begin: Callable[..., Any]) -> Any:
            if asked.get("PATH_INFO") != "/health":
                return shown(asked, begin)
            problem = self.problem()
            begin("503 Service Unavailable" if problem else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{printable(problem) or 'healthy'}\n".encode()]

        server = make_server("127.0.0.1", port, page, _ThreadedServer, _Unlogged)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        return server, thread

    def describe(self) -> list[Any]:
        """Return no descriptions in advance, as Prometheus allows."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield all current metrics."""
        now = self.status()
        yield GaugeMetricFamily("personax_version", "Number of server steps.", value=now.version)
        yield GaugeMetricFamily("personax_finished", "1 if the run is finished.", value=float(now.finished))
        yield CounterMetricFamily("personax_updates", "Applied uploads.", value=now.num_events)
        sent = CounterMetricFamily("personax_bytes", "Bytes of models and uploads.", labels=["direction"])
        sent.add_metric(["up"], now.bytes_up)
        sent.add_metric(["down"], now.bytes_down)
        yield sent
        refused = CounterMetricFamily("personax_refused_requests", "Refused requests by reason.", labels=["reason"])
        for why, num in now.refusals.items():
            refused.add_metric([why], num)
        yield refused
        yield from self._of_clients(now)

    def _of_clients(self, now: FederationStatus) -> Iterator[Any]:
        outcomes = CounterMetricFamily("personax_client_updates", "Uploads by outcome.", labels=["client", "outcome"])
        stale = GaugeMetricFamily("personax_client_staleness", "Versions behind at last upload.", labels=["client"])
        heard = GaugeMetricFamily("personax_client_seconds_since", "Seconds since last request.", labels=["client"])
        numbers = GaugeMetricFamily("personax_client_score", "Reported scores.", labels=["client", "score", "metric"])
        for one in now.clients:
            for outcome in ("applied", "refused", "late"):
                outcomes.add_metric([one.name, outcome], getattr(one, f"num_{outcome}"))
            stale.add_metric([one.name], one.staleness)
            if one.seconds_ago is not None:
                heard.add_metric([one.name], one.seconds_ago)
            for score, metrics in one.numbers.items():
                for metric, value in metrics.items():
                    numbers.add_metric([one.name, score, metric], value)
        yield from (outcomes, stale, heard, numbers)
