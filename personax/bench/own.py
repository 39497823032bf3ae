"""Networks written in Flax, as users write them, for the rows `own-*` of the benchmark."""

from typing import Any

from flax import linen

from personax.models import from_flax
from personax.typing import Array, Model

NUM_TOKENS = 256  # one per byte value


class Mlp(linen.Module):
    """The equivalent of `px.mlp`."""

    widths: tuple[int, ...]
    num_outputs: int

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = linen.elu(linen.Dense(width)(x))
        return linen.Dense(self.num_outputs)(x)


class Cnn(linen.Module):
    """The equivalent of `px.cnn` with two 3x3 convolutions without padding and one pooling layer."""

    channels: tuple[int, ...]
    widths: tuple[int, ...]
    num_outputs: int

    @linen.compact
    def __call__(self, x: Array) -> Array:
        for num in self.channels:
            x = linen.relu(linen.Conv(num, (3, 3), padding="VALID")(x))
        x = linen.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        for width in self.widths:
            x = linen.relu(linen.Dense(width)(x))
        return linen.Dense(self.num_outputs)(x)


class ResNet(linen.Module):
    """Three residual blocks with group normalization."""

    num_outputs: int
    channels: tuple[int, ...] = (16, 32, 64)

    @linen.compact
    def __call__(self, x: Array) -> Array:
        conv = lambda num, size=3, stride=1: linen.Conv(num, (size, size), stride, use_bias=False)
        x = linen.relu(linen.GroupNorm(8)(conv(self.channels[0])(x)))
        for at, num in enumerate(self.channels):
            stride = 1 if at == 0 else 2
            y = linen.relu(linen.GroupNorm(8)(conv(num, stride=stride)(x)))
            y = linen.GroupNorm(8)(conv(num)(y))
            x = linen.relu(y + (x if at == 0 else conv(num, 1, stride)(x)))
        return linen.Dense(self.num_outputs)(x.mean((1, 2)))


class SignalCnn(linen.Module):
    """A network with two convolutions over time."""

    num_outputs: int

    @linen.compact
    def __call__(self, x: Array) -> Array:
        for num in (32, 64):
            x = linen.max_pool(linen.relu(linen.Conv(num, (5,))(x)), (2,), (2,))
        x = linen.relu(linen.Dense(128)(x.reshape(len(x), -1)))
        return linen.Dense(self.num_outputs)(x)


class Lstm(linen.Module):
    """Two recurrent layers over a sequence of tokens, with a classifier on the last output."""

    num_outputs: int
    width: int = 256

    @linen.compact
    def __call__(self, x: Array) -> Array:
        hidden: Any = linen.Embed(NUM_TOKENS, 8)(x)
        for _ in range(2):
            hidden = linen.RNN(linen.OptimizedLSTMCell(self.width))(hidden)
        return linen.Dense(self.num_outputs)(hidden[:, -1])


class Transformer(linen.Module):
    """Two attention blocks over a sequence of tokens."""

    num_outputs: int
    width: int = 128

    @linen.compact
    def __call__(self, x: Array) -> Array:
        places = self.param("places", linen.initializers.normal(0.02), (x.shape[1], self.width))
        x = linen.Embed(NUM_TOKENS, self.width)(x) + places[None]
        for _ in range(2):
            x = x + linen.MultiHeadDotProductAttention(4)(linen.LayerNorm()(x))
            y = linen.gelu(linen.Dense(4 * self.width)(linen.LayerNorm()(x)))
            x = x + linen.Dense(self.width)(y)
        return linen.Dense(self.num_outputs)(linen.LayerNorm()(x).mean(1))


def own_model(network: str, channels: tuple[int, ...], widths: tuple[int, ...], num_outputs: int) -> Model:
    """Return the network of this name; some have fixed sizes."""
    made: dict[str, Any] = {
        "flax-mlp": lambda: Mlp(widths, num_outputs),
        "flax-cnn": lambda: Cnn(channels, widths, num_outputs),
        "resnet": lambda: ResNet(num_outputs),
        "signal-cnn": lambda: SignalCnn(num_outputs),
        "lstm": lambda: Lstm(num_outputs),
        "transformer": lambda: Transformer(num_outputs),
    }
    return from_flax(made[network]())
