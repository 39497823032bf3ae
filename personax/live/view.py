"""How a live run goes: a table on a terminal, and numbers for Prometheus."""

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
from personax.live.standing import ClientStanding, Standing

_AWAY = 60.0  # seconds without a word


def table_of(standing: Standing) -> Table:
    """Where a run stands, client by client."""
    rate = standing.num_events / standing.seconds if standing.seconds else 0.0
    state = "finished" if standing.finished else f"{rate:.2g} updates/s"
    title = f"{standing.name}: {standing.algorithm}, {standing.mode}"
    done = f"version {standing.version}, {standing.num_events} updates of {standing.target}"
    caption = f"{done}, {standing.seconds:.0f} s, {state}"
    if standing.refusals:
        caption += "; refused requests: " + ", ".join(f"{why} {num}" for why, num in standing.refusals.items())
    table = Table(
        "client", "last heard", "applied", "late", "refused", "staleness", "reported", box=SIMPLE, pad_edge=False
    )
    table.title, table.caption = plain(title), plain(caption)
    for client in standing.clients:
        counts = (client.num_applied, client.num_late, client.num_refused, client.staleness)
        table.add_row(*map(plain, (client.name, _ago(client.seconds_ago), *counts, latest(client))))
    return table


def plain(text: object) -> Text:
    """Text of a server or a client, without its control characters and without markup."""
    return Text(printable(text))


def latest(client: ClientStanding) -> str:
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
    """Answers each request in a thread of its own."""

    daemon_threads = True


class _Unlogged(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Metrics:
    """Pages for Prometheus and for a health check on this machine, made of the standing whenever they are asked for.

    `problem` gives what keeps the server from its work, or nothing.
    """

    def __init__(self, standing: Callable[[], Standing], problem: Callable[[], str] = lambda: "") -> None:
        self.standing, self.problem = standing, problem
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)  # pyright: ignore[reportArgumentType]

    def start(self, port: int) -> tuple[Any, Any]:
        """Serve the numbers, and at `/health` whether the server works; the server and its thread."""
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
        """Nothing beforehand."""
        return []

    def collect(self) -> Iterator[Any]:
        """All numbers of this moment."""
        now = self.standing()
        yield GaugeMetricFamily("personax_version", "Steps of the server.", value=now.version)
        yield GaugeMetricFamily("personax_finished", "1 when the run is finished.", value=float(now.finished))
        yield CounterMetricFamily("personax_updates", "Uploads that were applied.", value=now.num_events)
        sent = CounterMetricFamily("personax_bytes", "Bytes of models and uploads.", labels=["direction"])
        sent.add_metric(["up"], now.bytes_up)
        sent.add_metric(["down"], now.bytes_down)
        yield sent
        refused = CounterMetricFamily("personax_refused_requests", "Requests refused, by reason.", labels=["reason"])
        for why, num in now.refusals.items():
            refused.add_metric([why], num)
        yield refused
        yield from self._of_clients(now)

    def _of_clients(self, now: Standing) -> Iterator[Any]:
        outcomes = CounterMetricFamily("personax_client_updates", "Uploads of a client.", labels=["client", "outcome"])
        stale = GaugeMetricFamily("personax_client_staleness", "Of the last upload, in versions.", labels=["client"])
        heard = GaugeMetricFamily("personax_client_seconds_since", "Since it was heard of.", labels=["client"])
        numbers = GaugeMetricFamily("personax_client_score", "Reported.", labels=["client", "score", "metric"])
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
