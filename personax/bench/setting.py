"""The setting of a benchmark row, in plain values that can be sent to a peer in another environment."""

from typing import Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

Kind = Literal["fedavg", "first_order", "hessian_free", "exact", "apfl", "moreau"]
Network = Literal["mlp", "cnn", "flax-mlp", "flax-cnn", "resnet", "signal-cnn", "lstm", "transformer"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BenchSetting:
    """Clients with random images, a network, an algorithm and the length of a timed run.

    `network` is "mlp" with these hidden `widths`, or "cnn": two 3x3 convolutions with 32 and 64 channels without
    padding, 2x2 pooling and dense layers; the others are written in Flax (own.py). Asynchronous runs count events
    instead of rounds, and all clients train at the same time. `sampling="shuffled"` is one epoch of `num_steps`
    batches. With `divided`, the cores of a CPU act as separate devices that share a cohort.
    """

    algorithm: Kind
    num_clients: int
    num_rounds: int  # per call of `simulate`
    cohort_size: int = 10
    num_samples: int = 980  # per client
    num_steps: int = 10
    batch_size: int = 40
    sampling: Literal["replacement", "shuffled"] = "replacement"
    network: Network = "mlp"
    input_shape: tuple[int, ...] = (784,)
    widths: tuple[int, ...] = (80, 60)
    activation: Literal["elu", "relu"] = "elu"
    asynchronous: bool = False
    wave_width: int | None = None
    num_seeds: int = 1
    divided: bool = False
    lr: float = 1e-3
    adapt_lr: float = 0.01
    radius: float = 0.01  # of a Hessian-free product
    mix: float = 0.5
    strength: float = 20.0
    prox_lr: float = 0.02
    num_prox_steps: int = 5

    @property
    def steps_per_round(self) -> int:
        """Return the number of local steps of all clients and seeds in one round or event."""
        return (1 if self.asynchronous else self.cohort_size) * self.num_steps * self.num_seeds


SETTING = TypeAdapter(BenchSetting)
