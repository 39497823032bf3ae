"""A benchmark's rows for people: lines for the terminal, words that the pages use too."""

from statistics import median

from personax.bench.record import BenchRecord, PeerRecord, RowRecord, StartRecord

COLUMNS = ("ms a round", "rounds/s", "local steps/s", "floor ms", "of products", "of memory", "compile s", "peak MB")
_FIRST, _WIDTH = 26, 15


def header() -> str:
    """The line above the rows."""
    return f"{'':{_FIRST}}" + "".join(f"{name:>{_WIDTH}}" for name in COLUMNS) + "  peers"


def row_words(row: RowRecord) -> str:
    """One line for the terminal."""
    peers = "; ".join(map(peer_words, row.peers))
    return f"{row.name:{_FIRST}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells(row)) + f"  {peers}"


def cells(row: RowRecord) -> list[str]:
    """One row under `COLUMNS`."""
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
    """A peer in words: how long it takes and how many times ours that is, or why it did not run."""
    if peer.ratio is None or peer.seconds_per_round is None:
        return f"{peer.name}: {peer.note}"
    return f"{peer.name} {figures(1e3 * peer.seconds_per_round)} ms, {figures(peer.ratio)} x"


def summary(record: BenchRecord) -> str:
    """Where it ran, its peaks, and the starts."""
    machine = record.machine
    peaks = f"{machine.operations_per_second / 1e9:,.0f} GFLOP/s and {machine.bytes_per_second / 1e9:,.0f} GB/s"
    where = f"{machine.device} ({machine.backend}), {machine.cores} cores, jax {machine.jax}"
    text = f"{where}, {machine.precision} precision; measured peaks {peaks}; load {record.load:.1f}"
    return text if record.start is None else f"{text}\n{start_words(record.start)}"


def start_words(start: StartRecord) -> str:
    """The starts in words."""
    first, second = median(start.first), median(start.second)
    return f"first round after {first:.1f} s, after {second:.1f} s with what an earlier start has compiled"


def figures(number: float) -> str:
    """Three significant figures, without an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    places = next((places for places, least in enumerate((10, 1, 0.1, 0.01), 1) if number >= least), 5)
    return f"{number:.{places}f}"
