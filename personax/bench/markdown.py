"""Benchmarks as a page of Markdown with plots: `python -m personax.bench.markdown docs`.

It reads `docs/benchmarks/*.json`, which `personax bench --out` wrote, and writes `docs/performance.md` and the plots.
"""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from personax.bench.curves import draw
from personax.bench.record import BENCH, BenchRecord, RowRecord
from personax.bench.show import COLUMNS, cells, figures, peer_words, start_words

HEAD = """# Performance

`personax bench` times the workloads below, each side in a process of its own, in turns on the same machine; a figure is
the median over turns. `personax bench --json` prints the record, whose schema is
[benchmarks/schema.json](benchmarks/schema.json), and `--out` writes it. `make bench` runs all rows with all peers, and
those of growth. The tables are made from the records in [benchmarks/](benchmarks/) by
`python -m personax.bench.markdown docs`.

- *floor*: the operations of the matrix products that a round needs, and the bytes that it has to move whatever a cache
  holds, divided by the machine's measured peaks; the longer of the two. A Hessian-vector product counts as two
  gradients, a convolution as the products that it is made of, with their zeros (see below).
- *of products*, *of memory*: the share of these two peaks that is reached. The peaks are those of the largest matrix
  product at the precision stated and of the largest copy, measured before the first row and at each turn; the best
  counts.
- *compile*: the first run less the second. *peak*: of the accelerator, or of the process on a CPU.
- Peers do the same work: before they are timed, each repeats a round of ours in float32 from the same parameters on the
  same samples, and its distance from our parameters, relative to how far they moved, is in the record (`error`).
- A round of PersA-FL is one arrival.
- Where the setting of a row is `divided`, the cores of a CPU are devices that share the cohort ([scale.md](scale.md)):
  since 2026-11-16 those of MNIST and CIFAR. The peaks are those of all cores together.

The peers: *torch*, an eager PyTorch loop; *torch-vmap*, PyTorch with the cohort under `torch.func.vmap`, the step
compiled by `torch.compile`, and on a GPU the round one CUDA graph; *flower*, Flower's simulation; *pfl*, Apple's pfl,
put together as in its published benchmark. On a CPU the faster of one thread and all is taken for PyTorch and pfl.
"""

TRIED = """## What was tried and did not help

- XLA's own convolution: under `vmap` over kernels it is more than ten times slower than patches times a matrix on a
  CPU, and 5 to 8 times slower on an H200, where it becomes a grouped convolution.
- Convolutions on an H200 (2026-11-16, jax 0.11.2; ms for ten local steps of 100 clients, batches of 20, 16 and 32
  channels of 5 x 5): channels last took 22.8, of which 40 % for the gradient of a bias, a sum over pixels across narrow
  rows; channels first, 13.8; the batch last 13.4, but on 32 and 64 channels of 3 x 3 it is slower; the
  bias as one more row of the kernel 16.3 with channels last and 14.0 with channels first; TF32 or bfloat16 in name
  change nothing, because TF32 is the default there. With 32 and 64 channels, channels first save 5 %.
- A convolution of our own on an H200 (2026-11-16): Triton kernels through Pallas that put patches together inside of
  the product, and never store them. The second convolution of the CIFAR row takes 122 us forward, 191 for the gradient
  in the images and 230 for that in the kernel; by patches 328, 386 and 169. That is a fifth of the round at most, for
  two primitives with rules of their own, and with 16 channels or fewer the kernels are several times slower than
  patches. Their first form, in a whole round: 11.0 for 10.2 ms.
- Convolutions on an H200, later on 2026-11-16, where a round of the CIFAR row took 9.42 ms: all patches of the second
  convolution at once in place of one axis after the other, which is kept, 8.94; pooling by maxima of halves or of
  strided parts, 9.51 to 9.69; no products by cuBLAS, 9.45. A local step, 1.81 ms of kernels, moves what it has to at
  about the speed of memory: patches, written once and read twice, are 0.45 GB, the models of the dense layer 0.32, of
  which the step that changes them alone takes 0.22 ms. Winograd's tiles would move as much as patches, by count.
- A sum over the cohort's axis for its mean: some 20 times slower on a CPU than a matrix product.
- Gathering a batch without a barrier behind it: XLA repeats the gather inside each matrix product that reads it.
- One vmapped gradient for both ends of a central difference: slower on a CPU than one after another, and on an H200,
  where kernels of one graph run side by side, 0.98 for 0.97 ms a round with one seed and 3.90 for 3.70 with ten.
- Loops over one to three adaptation steps: a loop of one step costs copies of the model; they are unrolled.
- Convolutions on a CPU, each within a tenth of the patches that were used or slower: patches along one axis and one
  product for each row of the kernel, or one product for all rows whose results are shifted and added; patches written
  into one array part by part; a transposed patching written by hand in place of autodiff's; one image at a time, so
  that its patches stay in the cache; two forced host devices; XLA's flags for wider vectors, for its concurrent
  scheduler and for faster minima and maxima. XLA's own convolution without `vmap` reaches 175 GFLOP/s forward once its
  YNNPACK kernel is switched off (`--xla_cpu_experimental_ynn_fusion_type`; with it 64 to 92), but its gradient in the
  kernel makes a whole round 14 times as long.
- Convolutions on a CPU, 2026-11-16: both halves of a batch apart, so that their patches are put together at the same
  time, and a barrier before the patches, which XLA removes before it fuses: no difference beyond the noise of 10 %. The
  5 clients on 2 devices: 1.2 times as long, because one device has 3; the row has 8 since.
- Convolutions on a CPU, 2026-11-16: Winograd's F(2x2, 3x3), which is kept for 3 x 3 kernels on images of 32 channels
  and 18 pixels a side or more. The second convolution of the CIFAR row, pooled, takes 2.5 ms forward and 11 with its
  gradients on one core; by patches 4.8 and 17. Parts taken by indexing in place of a split: 29 with the gradients,
  because each part's gradient is then an array of zeros, but for it. With 16 channels, or on images of 10 pixels a
  side, up to a third slower than patches. A floor counts the operations of the way that is taken: since then half as
  many.
- Workload 1 on a CPU, 2026-11-16: the products of a FedAvg step alone, in a loop, reach 59 % of the peak, because each
  is small (40 rows): the share of a round can only lie below. Threefry written out in place of XLA's loop: the same
  time, for the batches of a round take 2 % of it. XLA's multi-output fusion: within 5 %, slower for the Hessian-free
  method.
- Small models one after another on a CPU: 784-80-60-10 takes 1.4 times as long as under `vmap`, 784-200-200-10 and
  larger ones 0.8 to 0.9 times. Two or five at a time lie in between.
- On an H200 (2026-11-16, jax 0.11.2; ms a round of FedAvg and of the Hessian-free method, workload 1, where one kernel
  after another took 0.42 and 1.19): a gradient of the whole network in two Triton kernels, 0.91 and 3.93, perhaps
  because a program that holds all layers waits for one small product after another; the ten local steps unrolled,
  0.41 and 1.24; loops inside command buffers, 0.46 and 1.23; no Triton products, 0.66 and 1.82; cuBLASLt, 0.45 and
  1.22; a number of rounds that is known to the compiler saved 2 %; biases as one more row of the matrices, 0.44 and
  1.17; the derivative of ELU from its value, 0.37 and 1.14; all fusions in Triton, 0.70 and 1.67. A step of FedAvg is
  21 kernels of 1 to 5 us there, 34 us together, and a step of the Hessian-free method 70: fewer kernels would help,
  faster ones would not.
- The same with the graph that is kept, which took 0.32 and 0.94: without the loops inside, 0.36 and 0.97; with loops
  that are not unrolled, 0.36 and 0.96; with XLA's double buffering of loops, 0.32 and 0.95; with images made floats
  when a batch is read, 0.32 and 0.98. 13 kernels of a step wait for each other, which is most of what is left.
- The same again, where before took 0.33 and 0.95: ELU's derivative from its value and bias gradients off the path of
  the others, which are kept, 0.31 and 0.89; all layers behind the first product in one Triton kernel each way, 0.48 to
  0.55 and 1.45 to 1.67; that first product in 4 to 28 parts, summed after, 0.32 to 0.34 and 1.02 to 1.10; the maximum
  of the softmax written out class by class, and activations whose slope is kept, no difference; no programmatic
  dependent launch (XLA's default has it), 0.34; all fusions of reductions in Triton, 0.61; XLA's other experimental
  fusions and its exhaustive search for tiles, within 2 %. Now 11 kernels wait for each other.
- Waves on an H200, PersA-FL with 300 and 3000 clients at a time, us an arrival, where before took 71 and 53: arrivals
  not applied at all, 60 and 41; eight of them unrolled, which is kept, 65 and 47; 32 of them, 58 and 42, and 10 s more
  to compile. Those eight with waves of 48, 64, 96, 128 and 256 members: 59, 65 and 79 for 300 clients at the first
  three, and 48, 45, 41 and 47 for 3000 at the first and the last three; widths between powers of two are tried since.
- The same later, where 300 clients took 59: events trained ahead of their turn, which is kept, 51 to 54 in waves of 32,
  54 in 48, 56 in 24; the five inner steps unrolled, too, which is kept, 47, and 51 in two later runs (0.59 ms one by
  one, 0.67 before). A plan took 20 ms of a run's 0.21 s then, and takes 4.5 now. Twenty arrivals unrolled: no
  difference, and 8 s more to compile. The batch made floats once for all inner steps, XLA's `gemm_fusion_v2`, and room
  for 5/4 as many arrivals as members in place of 3/2: within 4 %. With these delays 300 clients need 103 waves of any
  width for 4096 events, because the fast ones wait for themselves; 130 waves of 32 are 98 % full.
- Workload 1 there: the check for finite updates off the path to the next round, 0.51 and 0.87 ms for first-order and
  Hessian-free as before; `gemm_fusion_v2`, 0.285 for FedAvg's 0.293, but 0.90 for the Hessian-free method's 0.87.
- The same later, FedAvg, first-order, Hessian-free, exact and ten seeds, where before took 0.293, 0.511, 0.878, 0.873
  and 3.55 ms: batches read by role and made floats in the same kernel, which is kept, 0.281, 0.500, 0.860, 0.858 and
  3.20, because a step waited for the kernel that told its batches apart; cross entropy without `jax.nn.logsumexp`,
  which is kept, 6, 22 and 25 us less for the middle three. The batches of a round drawn during the one before: no
  difference. Local steps unrolled by two: 15 us less for FedAvg, 6 for the Hessian-free method, none for first-order,
  14 more for exact; by ten, 46 to 90 more for all but FedAvg. Adapted models behind a barrier, 0.94 for 0.88 of the
  Hessian-free method; activations behind one, no difference; XLA's merging of products that share an operand off, 0.79
  for exact, but 6 us more for the Hessian-free method and 3.27 for ten seeds; its multi-output fusion off, 3 to 7 %
  slower; ten seeds in two or five groups side by side, within 2 %. XLA chooses tiles anew in each process: the same
  program of the first-order method took 0.50 in three processes and 0.52 in two.
- The same with gradients that share products with the first kernel (`shared_products.py`), which is kept, first-order,
  Hessian-free, exact and ten seeds, where before took 0.491, 0.836, 0.843 and 3.30: with XLA's merging of products that
  share an operand 0.491, 0.847, 0.847 and 2.79, because it copies batches together and results apart; without it, which
  is kept, 0.460, 0.779, 0.724 and 2.39. All batches of a step in one array, one product with the kernel and one of
  inputs with inputs: 0.745 for the Hessian-free method and 2.25 for ten seeds, but 0.490 for first-order, and on a CPU
  a tenth to a third slower. Waves, us an arrival, where before took 95, 51 and 42 for 30, 300 and 3000 clients: 76, 36
  and 28 (0.52 ms one by one, 0.59 before). Waves of 192 for 3000 clients take 23 for the 27 of the 96 that are chosen;
  of the 24 us of kernels of an arrival then, 7 apply it, one after another, in kernels of 1 to 6 us.
- The norm in a step of the Hessian-free method with all its products in float32: 0.857 and 2.92 for the 0.774 and 2.51
  ms of TF32, because 784 products of rows by rows are then summed one after another. Those stay in TF32, which rounds
  the rows alone, and the sums of them are in float32.
- The CIFAR row on an H200 (2026-11-17), where a round with patches and channels first took 8.65 ms. Windows, each with
  all that four pixels see: channels first, 8.25, or 8.69 with pixels put in blocks first; channels last, 7.65; with the
  first convolution in windows, too, 7.50; with a bias's gradient over wide rows, and a maximum that keeps a byte for
  its gradient in place of four arrays, which is kept, 6.75. Local steps on a trail (`shared_products.py`) from there:
  5.20 in a loop that keeps all rows in one array, 4.9 unrolled, which is kept; before the windows they gave 7.03 for
  8.69. On a CPU, trails make no difference there, and take a third longer to compile. Windows of one pixel in depth at
  a time, 6.04 for 5.93 on the way; the gradient of a bias as a product with ones, which is not kept, 5.30 for 5.20, but
  12.0 for 13.3 ms where the channels are 16 (cnn2, ten local steps of 100 clients, batches of 20, outside of a graph;
  22.1 with patches and channels first; cnn3 13.2 for 16.2). Triton kernels
  through Pallas that pool and never store windows: 133 us for the second convolution forward at best, 224 for the
  gradient in the images, about what windows take, and 10 s to compile each. Patches stored as bfloat16: no difference.
  The floor of the row counts the zeros in the products of windows, and was 0.70 ms with patches.
- Windows on a CPU: with a 5 x 5 kernel, or fewer than 16 channels, 0.5 to 0.95 of the time of patches, and they are
  kept there; with 3 x 3 and 16 or 32 channels on small images, 1.2 times; for the whole CIFAR row in place of tiles,
  1.6 times. Gradients of cnn2 take 152 ms for 220 (ten steps of 4 clients, batches of 20), those of cnn3 167 for 203.
- Waves on a CPU: 300 clients take 3.2 ms an arrival in waves of 16 and 12, 3.4 in 8 and 4, 4.0 in 24 and one by one,
  4.6 in 32, and smaller models are no faster in 64 than in 16: waves there hold at most 16. Trained ahead, 30 clients
  take 3.0 ms for 4.1.

These are measured choices of [design.md](design.md).

## Starting

What the command line compiles is kept in the user's cache, and a later start reads it from there. The variable
`PERSONAX_COMPILED` names another folder, or turns it off with `off`; `JAX_COMPILATION_CACHE_DIR` goes before it. The
library itself keeps nothing. A second start up to the first round on the default digits
(`python -m personax.bench.start`) is Python's imports, of which JAX is about half, and JAX's tracing: the shapes
of what a client uploads come from the end of its visit alone, so that a visit is traced once. In a first start most of
the time to compile went into random streams, whose small loops LLVM unrolled. The command line turns that off: the
first model compiles in 0.5 s in place of 1.8, and a round in 1.5 s in place of 2.5, and rounds take as long as before
within 3 % (7 % for the Hessian-free row, 3 % at its best). LLVM's optimization level 2 does as much, and would hold for
a GPU, too.
"""

WORKLOADS = {
    "mnist": "Fallah's MNIST setting",
    "cifar": "pfl-research's CIFAR-10 setting",
    "apfl": "APFL, the states of all clients kept",
    "persafl": "PersA-FL, in waves and one by one",
    "scale": "From a thousand clients to a million",
    "growth-cohort": "More clients a round",
    "growth-steps": "More local steps",
    "growth-width": "Larger models",
}
PFLLIB = 2.6e-3  # seconds of a first-order step of PFLlib with its 784-100-10 network, measured once on 2 cores
NUM_ROUNDS = 1500  # of pfl-research's published run


class GrowthAxis(NamedTuple):
    """A size that a workload varies: its words, and what it is of a row."""

    words: str
    of: Callable[[RowRecord], float]


AXES = {
    "scale": GrowthAxis("clients", lambda row: row.setting.num_clients),
    "growth-cohort": GrowthAxis("clients a round", lambda row: row.setting.cohort_size),
    "growth-steps": GrowthAxis("local steps", lambda row: row.setting.num_steps),
    "growth-width": GrowthAxis("parameters", lambda row: num_parameters(row)),
}


def num_parameters(row: RowRecord) -> int:
    """Of a fully connected network."""
    sizes = (math.prod(row.setting.input_shape), *row.setting.widths, 10)
    return sum((fan_in + 1) * out for fan_in, out in pairwise(sizes))


def page(records: dict[str, BenchRecord]) -> str:
    """All records, by the name of their file."""
    return "\n".join([HEAD, *(section(name, record) for name, record in records.items()), TRIED])


def plots(records: dict[str, BenchRecord]) -> dict[str, str]:
    """The plots of all records: names of files, and SVG."""
    found = {}
    for name, record in records.items():
        for workload, axis in AXES.items():
            chosen = [row for row in record.rows if row.workload == workload]
            if len(chosen) > 1:
                times = [(axis.of(row), 1e3 * row.seconds_per_round) for row in chosen]
                floors = [(axis.of(row), 1e3 * row.floor_seconds) for row in chosen]
                lines = {"a round": times, "floor": floors}
                found[f"{name}-{workload}.svg"] = draw(WORKLOADS[workload], axis.words, "ms", lines)
    return found


def section(name: str, record: BenchRecord) -> str:
    """One record: where and when, then a table for each workload."""
    machine = record.machine
    peaks = f"{machine.operations_per_second / 1e9:,.0f} GFLOP/s and {machine.bytes_per_second / 1e9:,.0f} GB/s"
    where = f"{machine.device} ({machine.backend}), {machine.cores} cores, {machine.system}, jax {machine.jax}"
    summary = (
        f"`{record.command}`, {record.started[:10]}, {where}, {machine.precision} precision, {record.seconds:.0f} s. "
        f"Measured peaks: {peaks}. Load at the start: {record.load:.1f}. {record.note}"
    )
    parts = [f"## {name}", summary.strip()]
    if record.start is not None:
        parts.append(f"Start of the default digits: {start_words(record.start)}.")
    drawn = plots({name: record})
    for workload, words in WORKLOADS.items():
        chosen = [row for row in record.rows if row.workload == workload]
        if chosen:
            parts += [f"### {words}", table(chosen), *_remarks(workload, chosen)]
            picture = f"{name}-{workload}.svg"
            parts += [f"![{words}](benchmarks/{picture})"] if picture in drawn else []
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[RowRecord]) -> str:
    """Rows with their peers; what they are in words below."""
    lines = [f"| | {' | '.join(COLUMNS)} | peers |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [f"| {row.name} | {' | '.join(cells(row))} | {'; '.join(map(peer_words, row.peers))} |" for row in rows]
    words = dict.fromkeys(row.words for row in rows)
    return "\n".join([*lines, "", *(f"- {one}" for one in words)])


def _remarks(workload: str, rows: Sequence[RowRecord]) -> list[str]:
    """What a table does not say by itself."""
    found = []
    for row in rows:
        if row.name == "mnist-fo-784-100-10":
            step = 1 / row.local_steps_per_second
            found.append(
                f"A first-order step takes {figures(1e3 * step)} ms; PFLlib's, measured once on 2 cores, 2.6 ms: "
                f"{figures(PFLLIB / step)} times as long."
            )
        if workload == "cifar":
            found.append(f"At this speed {NUM_ROUNDS} rounds take {figures(NUM_ROUNDS * row.seconds_per_round)} s.")
        other = next((one for one in rows if row.name == one.name.replace("waves", "one-by-one") != one.name), None)
        if other is not None:
            ratio = row.seconds_per_round / other.seconds_per_round
            found.append(
                f"{row.setting.num_clients} clients: {figures(ratio)} times as fast in waves; those of consecutive "
                f"events have a mean length of {figures(other.mean_wave or 1)}."
            )
    return ["\n".join(f"- {one}" for one in found)] if found else []


def read_records(docs: Path) -> dict[str, BenchRecord]:
    """The committed records, by the name of their file."""
    paths = sorted(path for path in (docs / "benchmarks").glob("*.json") if path.name != "schema.json")
    return {path.stem: BENCH.validate_json(path.read_bytes()) for path in paths}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    committed = read_records(folder)
    (folder / "performance.md").write_text(page(committed), encoding="utf-8")
    for file, drawn_one in plots(committed).items():
        (folder / "benchmarks" / file).write_text(drawn_one, encoding="utf-8")
