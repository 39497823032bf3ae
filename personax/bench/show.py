"""Text output of the benchmark, for the terminal and the pages."""

from statistics import median

from personax.bench.record import BenchRecord, PeerRecord, RowRecord, StartRecord

COLUMNS = ("ms per round", "rounds/s", "local steps/s", "floor ms", "of products", "of memory", "compile s", "peak MB")
_FIRST, _WIDTH = 26, 15


def header() -> str:
    """Return the header line."""
    return f"{'':{_FIRST}}" + "".join(f"{name:>{_WIDTH}}" for name in COLUMNS) + "  peers"


def row_words(row: RowRecord) -> str:
    """Format a row as a line for the terminal."""
    peers = "; ".join(map(peer_words, row.peers))
    return f"{row.name:{_FIRST}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells(row)) + f"  {peers}"


def cells(row: RowRecord) -> list[str]:
    """Format the cells of a row, in the order of `COLUMNS`."""
    peak = row.host_peak_bytes if row.device_peak_bytes is None else row.device_peak_bytes
    return [
        figures(1e3 * row.seconds_per_round),
        figures(row.rounds_per_second),
        figures(row.local_steps_per_second),
        figures(1e3 * row.floor_seconds),
        f"{row.share_of_operations:.0%}",
        f"{row.share_of_bytes:.0%}",
        f"{row.compile_seconds:.1f}",
        f"{peak / 1e6:,.0f}",
    ]


def peer_words(peer: PeerRecord) -> str:
    """Format a peer's time and its ratio to ours, or the reason why it did not run."""
    if peer.ratio is None or peer.seconds_per_round is None:
        return f"{peer.name}: {peer.note}"
    return f"{peer.name} {figures(1e3 * peer.seconds_per_round)} ms, {figures(peer.ratio)} x"


def summary(record: BenchRecord) -> str:
    """Summarize the machine, its peaks and the startup times."""
    machine = record.machine
    peaks = f"{machine.operations_per_second / 1e9:,.0f} GFLOP/s and {machine.bytes_per_second / 1e9:,.0f} GB/s"
    where = f"{machine.device} ({machine.backend}), {machine.cores} cores, jax {machine.jax}"
    text = f"{where}, {machine.precision} precision; measured peaks {peaks}; load {record.load:.1f}"
    return text if record.start is None else f"{text}\n{start_words(record.start)}"


def start_words(start: StartRecord) -> str:
    """Format the startup times."""
    first, second = median(start.first), median(start.second)
    return f"first round after {first:.1f} s, or after {second:.1f} s with a filled compilation cache"


def figures(number: float) -> str:
    """Format a number with three significant figures and without an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    places = next((places for places, least in enumerate((10, 1, 0.1, 0.01), 1) if number >= least), 5)
    return f"{number:.{places}f}"
