"""What there is, for people who look for it and for those who cite it."""

from dataclasses import dataclass

from personax.datasets.registry import ENTRIES


@dataclass(frozen=True)
class Entry:
    """One thing that there is: its name, what it is in a line, the paper and the place in it, and keys of `BIBTEX`."""

    name: str
    what: str
    source: str
    citations: tuple[str, ...] = ()


ALGORITHMS = (
    Entry(
        "fedavg", "Clients train the shared model, the server averages", "McMahan 2017, Algorithm 1", ("mcmahan2017",)
    ),
    Entry("fedprox", "FedAvg with each client held near the model it downloaded", "Li 2020, Algorithm 2", ("li2020",)),
    Entry(
        "scaffold",
        "FedAvg with client drift corrected by control variates",
        "Karimireddy 2020, Algorithm 1, options I and II",
        ("karimireddy2020",),
    ),
    Entry(
        "aruba",
        "FedAvg with step sizes for each coordinate learned across clients",
        "Khodak 2019, Algorithm 2",
        ("khodak2019",),
    ),
    Entry("local_only", "Each client alone, nothing shared", "A baseline without a paper of its own"),
    Entry(
        "per_fedavg",
        "A start that is good after adaptation steps: exact, first-order or Hessian-free",
        "Fallah 2020, Algorithm 1; for several adaptation steps gMeta 2025, Algorithms 1 to 4",
        ("fallah2020", "jamali2025"),
    ),
    Entry(
        "pfedme",
        "Personal models held near the shared one by a Moreau envelope",
        "Dinh 2020, Algorithm 1",
        ("dinh2020",),
    ),
    Entry(
        "apfl",
        "A mixture of a local and the shared model, the weight fixed or learned",
        "APFL 2020, Algorithm 1, (5) and (6)",
        ("deng2020",),
    ),
    Entry(
        "fedasync",
        "Asynchronous averaging that adds deltas as they arrive",
        "PersA-FL 2023, Algorithms 1 and 2, Option A; after Xie 2019",
        ("toghani2023", "xie2019"),
    ),
    Entry(
        "fedasync_mixing",
        "Asynchronous averaging that mixes in models, stale ones less",
        "Xie 2019, Algorithm 1 and section 5.2",
        ("xie2019",),
    ),
    Entry(
        "fedbuff",
        "Asynchronous averaging with a buffer of updates",
        "Nguyen 2022, Algorithms 1 and 2",
        ("nguyen2022",),
    ),
    Entry(
        "persafl",
        "Asynchronous personalization: PersA-FL-MAML with `Meta`, PersA-FL-ME with `Moreau`",
        "PersA-FL 2023, Algorithms 1 and 2, Options B and C",
        ("toghani2023",),
    ),
)

OBJECTIVES = (
    Entry(
        "Erm",
        "The client's own loss at the shared model",
        "McMahan 2017; Fallah 2020, (1) and (2); PersA-FL 2023, Algorithm 2, Option A",
        ("mcmahan2017", "fallah2020", "toghani2023"),
    ),
    Entry("Proximal", "The client's loss plus a pull to the downloaded model", "Li 2020, (2)", ("li2020",)),
    Entry(
        "Meta",
        "The client's loss after any number of adaptation steps",
        "Fallah 2020, (3) and (4); gMeta 2025, (7), (8) and (11); PersA-FL 2023, (4)",
        ("fallah2020", "jamali2025", "toghani2023"),
    ),
    Entry(
        "Moreau",
        "The Moreau envelope of the client's loss",
        "Dinh 2020; PersA-FL 2023, (6) to (8) and (10)",
        ("dinh2020", "toghani2023"),
    ),
    Entry(
        "Mixture",
        "The client's loss at a mixture of its own model and the shared one",
        "APFL 2020, (3) to (6)",
        ("deng2020",),
    ),
    Entry("Scaffold", "The client's loss with control variates", "Karimireddy 2020, Algorithm 1", ("karimireddy2020",)),
    Entry("Aruba", "The client's loss, with learned step sizes", "Khodak 2019, Algorithm 2", ("khodak2019",)),
    Entry("LocalOnly", "The client's own loss at its own model", "A baseline without a paper of its own"),
)

PARTITIONS = (
    Entry("iid", "A shuffled pool cut into clients of equal size", "McMahan 2017, section 3", ("mcmahan2017",)),
    Entry(
        "shards",
        "Shards of the pool sorted by label, a few for each client",
        "McMahan 2017, section 3",
        ("mcmahan2017",),
    ),
    Entry(
        "classes_per_client",
        "A number of classes for each client, each class held equally often",
        "APFL 2020, appendix B.1; PersA-FL 2023, section 5",
        ("deng2020", "toghani2023"),
    ),
    Entry(
        "dirichlet",
        "A class distribution from a Dirichlet for each client, then samples by it",
        "gMeta 2025, section 5; Hsu 2019",
        ("jamali2025", "hsu2019"),
    ),
    Entry(
        "dirichlet_by_class",
        "Each class divided over the clients in proportions from a Dirichlet",
        "Yurochkin 2019",
        ("yurochkin2019",),
    ),
    Entry(
        "fallah_halves",
        "Half of the clients with the first half of the classes, the others with two classes each",
        "Fallah 2020, section 5",
        ("fallah2020",),
    ),
    Entry("natural", "The clients that the data came with", "APFL 2020, appendix B.1", ("deng2020",)),
)

_WHAT = {entry.name: entry.description for entry in ENTRIES}

DATASETS = (
    Entry("digits", _WHAT["digits"], "Alpaydin 1998, test part", ("alpaydin1998",)),
    Entry("mnist", _WHAT["mnist"], "LeCun 1998", ("lecun1998",)),
    Entry("cifar10", _WHAT["cifar10"], "Krizhevsky 2009", ("krizhevsky2009",)),
    Entry("synthetic", _WHAT["synthetic"], "APFL 2020, appendix B.1, after Li 2020", ("deng2020", "li2020")),
    Entry("femnist", _WHAT["femnist"], "Caldas 2018", ("caldas2018",)),
    Entry("leaf", "a folder of JSON files in the format of LEAF", "Caldas 2018", ("caldas2018",)),
    Entry("folder", "a federation that `Federation.save` wrote, read as it is needed", "Your own"),
    Entry("file", "a .csv, .parquet or .npz file with a column of clients", "Your own"),
)
