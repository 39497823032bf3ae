"""The page of an inspection: client heterogeneity, the papers' constants, their limits and advice."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from personax.inspection import Inspection
from personax.inspection.findings import Validation
from personax.report.document import Facts, Group, PageSection, Preformatted, Row, Table, TableCell, bullets, document
from personax.report.figures import Figure
from personax.report.runs import PALETTE
from personax.report.traces import figure
from personax.report.words import moment, number, seconds

CONSTANTS = ("constant", "largest found", "error", "meaning")
BIASES = ("Hessian", "bias relative to the gradient norm")


def render(found: Inspection) -> str:
    """Render the page."""
    measured, advice = found.measured, found.advice
    constants = [
        (f"{one.name} ({one.symbol})", f"{one.value:.4g}", f"{one.error:.2g}", one.words) for one in measured.constants
    ]
    limits = [(one.setting, f"{one.value:.4g}", one.rule, f"{one.source}: {one.words}") for one in found.limits]
    biases = [(one.name, f"{one.relative_bias:.2%}") for one in measured.estimators]
    sections = [
        PageSection("advice", "Advice", [bullets([advice.summary, *advice.why])]),
        *_validation(advice.validation),
        PageSection("sure", "How certain this is", [bullets(advice.sure)]),
        PageSection("starter", "A starting configuration", [Preformatted(advice.starter)]),
        PageSection("clients", "Clients", figures=[_clients(found)]),
        PageSection(
            "limits",
            "What the theorems allow",
            [_table("Limits of the settings", ("setting", "value", "rule", "why"), limits), bullets(found.unusable)],
        ),
        PageSection("constants", "Constants", [_table("Constants of the clients' losses", CONSTANTS, constants)]),
        PageSection("estimators", "Bias of the meta gradient", [_table("Bias by Hessian", BIASES, biases)]),
        PageSection("federation", "The federation", [Preformatted(found.federation)]),
    ]
    facts = {
        "started": moment(found.started),
        "took": seconds(found.seconds),
        "measured": f"{len(measured.clients)} of {measured.num_clients} clients, at {measured.region}",
        **found.machine,
        "personax": found.personax,
    }
    return document(f"Inspection of {found.name}", Facts(facts), sections, "the inspection.json next to it")


def _validation(found: Validation | None) -> list[PageSection]:
    """Return the section on short runs, if there were any."""
    if found is None:
        return []
    rows = [(run.algorithm, run.source, number(run.score, found.metric), _listed(run.options)) for run in found.runs]
    table = _table("Short runs", ("algorithm", "from", f"{found.metric} on validation data", "options"), rows)
    return [PageSection("validation", found.title, [table])]


def _listed(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {item}" for name, item in options.items())


def _clients(found: Inspection) -> Figure:
    """Draw each client's best mixing weight over the distance of its labels from the average client's."""
    clients = found.measured.clients
    labelled = all(client.distance is not None for client in clients)
    x = [client.distance if labelled else client.num_samples for client in clients]
    along = "total variation distance between the client's labels and the average client's" if labelled else "samples"
    marks = {"color": PALETTE[0][0], "size": 9, "opacity": 0.7}
    facts = [f"client {client.id}, {client.num_samples} samples" for client in clients]
    dots = go.Scatter(x=x, y=[client.mix for client in clients], mode="markers", marker=marks, text=facts)
    words = (
        "Each dot is a client: the best weight of its own model in a mixture with the shared one, measured on data "
        "that neither has seen."
    )
    return Figure("mixes", "Clients", words, words, [figure([dots], along, "best mixing weight")])


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table whose last column is text, if it has several columns."""
    kinds = ["", *[""] * (len(heads) - 2), "text" if len(heads) > 2 else ""]
    cells = [[TableCell(one, kind) for one, kind in zip(row, kinds, strict=True)] for row in rows]
    titles = [TableCell(one, kind) for one, kind in zip(heads, kinds, strict=True)]
    return Table(caption, titles, [Group([Row(first, rest) for first, *rest in cells])])
