"""The workloads: rows of settings, some of which are smaller on a CPU."""

from dataclasses import dataclass, replace

from personax.bench.setting import BenchSetting, Kind

BOTH = ("torch", "torch-vmap")
ALL = (*BOTH, "flower", "pfl")
COHORTS, STEPS, WIDTHS = (1, 4, 16, 50), (1, 4, 16, 64), ((20,), (80, 60), (320, 240), (1280, 960))


@dataclass(frozen=True)
class BenchRow:
    """A setting with its description and the peers that it is compared with."""

    name: str
    workload: str
    words: str
    setting: BenchSetting
    peers: tuple[str, ...] = ()


def rows(backend: str) -> list[BenchRow]:
    """Return all rows for a backend."""
    cpu = backend == "cpu"
    return [*_mnist(cpu), *_cifar(cpu), *_apfl(cpu), *_persafl(cpu), *_scale(cpu), *_growth(cpu), *_own(cpu)]


def _mnist(cpu: bool) -> list[BenchRow]:
    """Fallah 2020 section 5 on MNIST, and PFLlib's network."""
    base = BenchSetting("fedavg", 50, 64 if cpu else 2048, divided=cpu)
    kinds: dict[str, Kind] = {"fedavg": "fedavg", "fo": "first_order", "hf": "hessian_free", "exact": "exact"}
    words = "50 clients with 980 images, 10 per round, 10 steps, batches of 40, 784-80-60-10"
    compiled = ("hf",) if cpu else tuple(kinds)  # compiling PyTorch's step takes a minute on a CPU
    found = []
    for name, kind in kinds.items():
        peers = (
            "torch",
            *(("torch-vmap",) if name in compiled else ()),
            *(("flower", "pfl") if name == "fedavg" else ()),
        )
        found.append(BenchRow(f"mnist-{name}", "mnist", words, replace(base, algorithm=kind), peers))
    seeds = replace(base, algorithm="hessian_free", num_seeds=10, num_rounds=8 if cpu else 512)
    pfllib = replace(base, algorithm="first_order", widths=(100,), activation="relu")
    return [
        *found,
        BenchRow("mnist-hf-10-seeds", "mnist", f"{words}, ten seeds together", seeds),
        BenchRow("mnist-fo-784-100-10", "mnist", words.replace("80-60", "100"), pfllib),
    ]


def _cifar(cpu: bool) -> list[BenchRow]:
    """pfl-research's published CIFAR-10 setting."""
    num_clients, cohort_size = (160, 8) if cpu else (1000, 50)  # divides evenly among the cores
    setting = BenchSetting(
        "fedavg",
        num_clients,
        2 if cpu else 64,
        cohort_size,
        num_samples=50,
        num_steps=5,
        batch_size=10,
        sampling="shuffled",
        network="cnn",
        input_shape=(32, 32, 3),
        widths=(128,),
        activation="relu",
        lr=0.1,
        divided=cpu,
    )
    scaled = " (scaled down from 1000 clients and 50 per round)" if cpu else ""
    words = (
        f"{num_clients} clients with 50 images, {cohort_size} per round{scaled}, one epoch, batches of 10, "
        "CNN 32-64-128-10"
    )
    peers = ("torch", "flower", "pfl") if cpu else ALL
    return [BenchRow("cifar-cnn", "cifar", words, setting, peers)]


def _apfl(cpu: bool) -> list[BenchRow]:
    """APFL with the states of all clients in memory."""
    widths, network = ((), "784-10") if cpu else ((80, 60), "784-80-60-10")
    found = []
    for num_clients in (100, 10_000):
        words = f"{num_clients} clients with 50 images, 10 per round, 10 steps, batches of 20, {network}"
        sizes = {"num_samples": 50, "batch_size": 20, "widths": widths, "lr": 0.01}
        setting = BenchSetting("apfl", num_clients, 256 if cpu else 1024, **sizes)
        found.append(
            BenchRow(f"apfl-{num_clients}", "apfl", words, setting, ("torch",) if cpu or num_clients > 100 else BOTH)
        )
    return found


def _persafl(cpu: bool) -> list[BenchRow]:
    """PersA-FL-ME with exponential delays, in waves and sequentially."""
    found = []
    for num_clients in (30, 300, 3000):
        sizes = {"num_samples": 50, "num_steps": 5, "batch_size": 32, "lr": 0.02}
        words = f"{num_clients} clients at a time, 5 steps of 5 inner steps, batches of 32, 784-80-60-10"
        waves = BenchSetting("moreau", num_clients, 256 if cpu else 4096, 1, asynchronous=True, **sizes)
        one_by_one = replace(waves, wave_width=1, num_rounds=128 if cpu else 512)
        peers = ("torch",) if num_clients == 300 else ()
        found.append(BenchRow(f"persafl-{num_clients}-waves", "persafl", f"{words}, in waves", waves, peers))
        found.append(BenchRow(f"persafl-{num_clients}-one-by-one", "persafl", f"{words}, sequentially", one_by_one))
    return found


def _scale(cpu: bool) -> list[BenchRow]:
    """FedAvg with a growing number of clients, 100 per round."""
    sizes = {"num_samples": 10, "num_steps": 5, "batch_size": 10, "input_shape": (64,), "widths": (32,), "lr": 0.1}
    words = "clients with 10 images of 64 pixels, 100 per round, 5 steps, batches of 10, 64-32-10"
    return [
        BenchRow(f"scale-{n}", "scale", f"{n} {words}", BenchSetting("fedavg", n, 256 if cpu else 2048, 100, **sizes))
        for n in (1_000, 10_000, 100_000, 1_000_000)
    ]


def _growth(cpu: bool) -> list[BenchRow]:
    """The Hessian-free MNIST row with one size varied at a time."""
    base = BenchSetting("hessian_free", 50, 16 if cpu else 512)
    less = lambda factor: max(1, int(base.num_rounds / factor))
    by_cohort = {f"cohort-{n}": replace(base, cohort_size=n, num_rounds=less(n / 10)) for n in COHORTS}
    by_steps = {f"steps-{n}": replace(base, num_steps=n, num_rounds=less(n / 10)) for n in STEPS}
    by_width = {f"width-{w[0]}": replace(base, widths=w, num_rounds=less(w[0] / 80)) for w in WIDTHS}
    words = "as mnist-hf, with a different number of"
    named = {
        "cohort": (by_cohort, "clients per round"),
        "steps": (by_steps, "local steps"),
        "width": (by_width, "units"),
    }
    return [
        BenchRow(f"growth-{name}", f"growth-{kind}", f"{words} {what}", setting)
        for kind, (found, what) in named.items()
        for name, setting in found.items()
    ]


def _own(cpu: bool) -> list[BenchRow]:
    """Networks written in Flax: equivalents of ours in the rows above, and others."""
    originals = {row.name: row for row in (*_mnist(cpu), *_cifar(cpu))}
    found = []
    for name in ("mnist-fedavg", "mnist-fo", "mnist-hf", "mnist-exact", "cifar-cnn"):
        row = originals[name]
        twin = replace(row.setting, network="flax-cnn" if name == "cifar-cnn" else "flax-mlp")
        found.append(BenchRow(f"own-{name}", "own", f"{row.words}, in Flax", twin, ("personax",)))
    image = BenchSetting("fedavg", 20, 2 if cpu else 64, num_samples=100, num_steps=5, batch_size=20, divided=cpu)
    networks = {
        "flax-cnn": ("CNN 32-64-128-10", {"input_shape": (32, 32, 3), "widths": (128,), "activation": "relu"}),
        "resnet": ("ResNet 16-32-64 with group normalization", {"input_shape": (32, 32, 3)}),
        "signal-cnn": ("1-D CNN 32-64-128-10 on 128 x 9 signals", {"input_shape": (128, 9)}),
        "lstm": ("LSTM 2 x 256 on 80 tokens", {"input_shape": (80,)}),
        "transformer": ("transformer with 2 layers of width 128 on 80 tokens", {"input_shape": (80,)}),
    }
    kinds: dict[str, Kind] = {"fedavg": "fedavg", "hf": "hessian_free"}
    for network, (words, options) in networks.items():
        for short, kind in kinds.items():
            setting = replace(image, network=network, algorithm=kind, **options)
            name = f"own-{network.removeprefix('flax-')}-{short}"
            peers = ("torch",) if cpu else BOTH
            found.append(
                BenchRow(name, "own", f"10 clients per round, 5 steps, batches of 20, {words}", setting, peers)
            )
    return found
