"""Personal adapters over a pretrained transformer: 100 authors, each with a little text.

Run `python examples/adapters.py`. It downloads nothing: the text is generated. A vocabulary of 64 words has a common
grammar (which words may follow which), and each author prefers some words and has turns of phrase of its own. A small
transformer is pretrained on 40 other authors and written to a file. Then 100 authors with 24 sentences each train
adapters of rank 4 over that frozen base:

- Local: each author trains adapters alone.
- Shared: one pair A, B for all (FedAvg over adapters).
- Personal: a shared A and a personal B (FedSA-LoRA).
- Mixed: a shared and a personal pair, mixed half and half (FedDPA).

All have the same cohorts, steps and batches. The step size of each is chosen on validation sentences; the table is of
test sentences.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

import personax as px

NUM_WORDS, LENGTH = 64, 16
WIDTH, NUM_HEADS, NUM_LAYERS = 48, 4, 2


class Size(NamedTuple):
    """The sizes of a comparison; `SMALL` is for a test."""

    num_authors: int
    cohort_size: int
    num_rounds: int
    num_pretraining_steps: int
    step_sizes: tuple[float, ...]
    num_seeds: int


FULL = Size(100, 20, 40, 1500, (0.0003, 0.001, 0.003, 0.01, 0.03), num_seeds=3)
SMALL = Size(8, 4, 3, 60, (0.01, 0.03), num_seeds=2)


# text


def grammar(rng: np.random.Generator) -> np.ndarray:
    """The common probabilities of the next word: each word has 8 successors."""
    table = np.zeros((NUM_WORDS, NUM_WORDS))
    for row in table:
        row[rng.choice(NUM_WORDS, 8, replace=False)] = rng.dirichlet(np.ones(8))
    return table


def style(common: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An author's probabilities: favorite words, and 8 words that a favorite of its own follows half of the time."""
    own = common * np.exp(1.5 * rng.normal(size=NUM_WORDS))
    own /= own.sum(axis=1, keepdims=True)
    habits = rng.choice(NUM_WORDS, 8, replace=False)
    own[habits] *= 0.5
    own[habits, rng.choice(NUM_WORDS, 8)] += 0.5
    return own


def sentences(table: np.ndarray, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Words `[num, LENGTH]` and the word that follows each."""
    words = np.empty((num, LENGTH + 1), np.int32)
    words[:, 0] = rng.integers(NUM_WORDS, size=num)
    bounds = np.cumsum(table, axis=1)
    for at in range(LENGTH):
        beyond = rng.random(num)[:, None] * bounds[words[:, at], -1:] > bounds[words[:, at]]
        words[:, at + 1] = beyond.sum(axis=1)
    return words[:, :-1], words[:, 1:]


class Text(NamedTuple):
    """The sentences of the authors that the base is pretrained on, and of those that are clients."""

    pretraining: tuple[np.ndarray, np.ndarray]
    federation: px.Federation
    tuning: px.Federation  # the same training sentences, with validation sentences in place of the test sentences


def generate(size: Size) -> Text:
    rng = np.random.default_rng(0)
    common = grammar(rng)
    before = [sentences(style(common, rng), 200, rng) for _ in range(40)]
    authors = [style(common, rng) for _ in range(size.num_authors)]
    train, test, validation = ([sentences(one, 24, rng) for one in authors] for _ in range(3))
    words, following = (np.concatenate(parts) for parts in zip(*before, strict=True))
    of = px.Federation.from_clients
    return Text((words, following), of(train, test), of(train, validation))


# the network, in plain functions


def transformer() -> px.Model:
    """A causal transformer: each position predicts the next word."""

    def init(key: jax.Array, x: jax.Array) -> px.Params:
        keys = iter(jax.random.split(key, 3 + 6 * NUM_LAYERS))
        normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])
        layer = lambda: {
            **{name: {"kernel": normal(WIDTH, WIDTH)} for name in ("query", "key", "value", "out")},
            "up": {"kernel": normal(WIDTH, 2 * WIDTH)},
            "down": {"kernel": normal(2 * WIDTH, WIDTH)},
        }
        return {
            "words": normal(NUM_WORDS, WIDTH),
            "positions": normal(LENGTH, WIDTH),
            "output": {"kernel": normal(WIDTH, NUM_WORDS)},
            **{f"layer_{at}": layer() for at in range(NUM_LAYERS)},
        }

    def apply(params: px.Params, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        at = params["words"][x] + params["positions"][None, : x.shape[1]]
        for layer in (params[f"layer_{place}"] for place in range(NUM_LAYERS)):
            at = at + attention(layer, normalized(at))
            at = at + jax.nn.gelu(normalized(at) @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
        return normalized(at) @ params["output"]["kernel"]

    return px.Model(init, apply)


def normalized(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(layer: px.Params, x: jax.Array) -> jax.Array:
    heads = lambda name: (x @ layer[name]["kernel"]).reshape(*x.shape[:2], NUM_HEADS, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key")) / np.sqrt(WIDTH / NUM_HEADS)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads("value"))
    return found.reshape(x.shape) @ layer["out"]["kernel"]


def pretrain(model: px.Model, text: tuple[np.ndarray, np.ndarray], num_steps: int, path: Path) -> None:
    """Train the base on all pretraining sentences, as the only client of one round, and write it to a file."""
    fed, key = px.Federation.from_clients([text]), jax.random.key(0)
    adam = px.optimizer("adam")
    algorithm = px.fedavg(lr=0.003, num_steps=num_steps, batch_size=32, optimizer=adam)
    params = px.simulate(algorithm, px.classification(model), fed, px.rounds(1, 1, 1, key=key), key=key).params
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(keys, simple=True, separator="."): np.asarray(leaf) for keys, leaf in leaves}
    safetensors.numpy.save_file(named, path)


# the comparison


class Contestant(NamedTuple):
    """An algorithm as a function of its step size, its network, and the model that is scored."""

    make: Callable[[float], px.Algorithm]
    model: px.Model
    scoring: px.Scoring


def contestants(base: px.Model) -> dict[str, Contestant]:
    """All train adapters of rank 4 on the layers, with 10 steps of Adam in each visit."""
    one, two = px.lora(base, 4, "layer_*.kernel"), px.dual_lora(base, 4, "layer_*.kernel")
    adam = {"batch_size": 8, "optimizer": px.optimizer("adam")}
    options = lambda lr: px.Local(lr, num_steps=10, **adam)
    frozen, server = px.Sharing(frozen="base"), px.synchronous()
    alone = lambda lr: px.Algorithm(px.LocalOnly(), options(lr), server, frozen)
    shared = lambda lr: px.Algorithm(px.Erm(), options(lr), server, frozen)
    personal = lambda lr: px.fedsa_lora(lr=lr, num_steps=10, **adam)
    mixed = lambda lr: px.feddpa(lr=lr, num_steps=5, **adam)
    own = px.Scoring("personal")
    return {
        "Local": Contestant(alone, one, own),
        "Shared": Contestant(shared, one, px.Scoring("global")),
        "Personal (FedSA-LoRA)": Contestant(personal, one, own),
        "Mixed (FedDPA)": Contestant(mixed, two, own),
    }


def score(
    one: Contestant, step_sizes: Sequence[float], keys: jax.Array, fed: px.Federation, size: Size
) -> px.Evaluation:
    """The scores after training, with a step size for each key."""
    algorithms, task = [one.make(lr) for lr in step_sizes], px.classification(one.model)
    schedules = [px.rounds(size.num_authors, size.num_rounds, size.cohort_size, key=key) for key in keys]
    result = px.simulate(algorithms, task, fed, schedules, key=keys)
    return px.evaluate(algorithms[0], task, fed, result, one.scoring, key=jax.random.key(2))


def choose(one: Contestant, text: Text, size: Size) -> float:
    """The step size with the lowest loss on validation sentences, for one seed."""
    keys = jnp.stack([jax.random.key(0)] * len(size.step_sizes))
    losses = score(one, size.step_sizes, keys, text.tuning, size).metrics["loss"].mean(axis=1)
    return size.step_sizes[int(np.argmin(losses))]


def compare(size: Size) -> px.Comparison:
    """Pretrain, choose step sizes, train and score."""
    text = generate(size)
    print(text.federation, end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.safetensors"
        pretrain(transformer(), text.pretraining, size.num_pretraining_steps, path)
        found = {}
        for name, one in contestants(px.pretrained(transformer(), path)).items():
            begin = time.perf_counter()
            lr = choose(one, text, size)
            keys = jax.random.split(jax.random.key(1), size.num_seeds)
            found[name] = score(one, [lr] * len(keys), keys, text.federation, size)
            print(f"{name:24}step size {lr:<6} {time.perf_counter() - begin:5.1f} s")
    return px.Comparison(found, local="Local", shared="Shared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few authors and rounds, to see that it works")
    print("\n" + compare(SMALL if parser.parse_args().small else FULL).table())


if __name__ == "__main__":
    main()
