"""Random bits as a pure function of (seed, stream, counter): nothing to save, nothing to replay.

Training data is keyed by (seed, step), so a run that was killed at step k and resumed sees at
step k + 1 what it would have seen, and process r of w takes rows r, r + w, r + 2w, ... of the
batch that a single process would have taken whole. The bits come from the counter-based
generator Philox 4x64 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
2011) and are used raw, so that they do not depend on any library's choice of algorithms on top.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stiefel.errors import ConfigurationError

__all__ = ["EVALUATION", "TRAINING", "permutation", "random_bits", "shard"]

#: Streams of one seed, disjoint: the words of a training step are never those of an evaluation.
TRAINING, EVALUATION = 0, 1


def random_bits(seed: int, stream: int, counter: int, count: int) -> npt.NDArray[np.uint64]:
    """Draws `count` words of 64 random bits for the key (seed, stream) at `counter`.

    Args:
        seed: The run's seed, 0 <= seed < 2^64.
        stream: `TRAINING` or `EVALUATION`.
        counter: What is being drawn: a step or an epoch, 0 <= counter < 2^64.
        count: Number of words.

    Returns:
        A uint64 array of shape (count,). Different counters never share a word: the counter is
        the top word of Philox's 256-bit counter.

    Raises:
        ConfigurationError: If the seed or the counter is out of range.
    """
    for name, value in (("seed", seed), ("counter", counter)):
        if not 0 <= value < 2**64:
            raise ConfigurationError(f"expected 0 <= {name} < 2^64, got {value}")
    key = np.array([seed, stream], dtype=np.uint64)
    start = np.array([0, 0, 0, counter], dtype=np.uint64)
    return np.random.Philox(key=key, counter=start).random_raw(count)


def permutation(seed: int, stream: int, counter: int, count: int) -> npt.NDArray[np.int64]:
    """A random order of 0 .. count - 1 for the key (seed, stream) at `counter`: an epoch's order.

    The order that sorts `count` random words; ties, of probability count^2 / 2^65, keep their
    order.
    """
    return np.argsort(random_bits(seed, stream, counter, count), kind="stable")


def shard(rank: int, world: int) -> slice:
    """The rows of a batch that belong to process `rank` of `world`: rank, rank + world, ...

    Raises:
        ConfigurationError: If not 0 <= rank < world.
    """
    if not 0 <= rank < world:
        raise ConfigurationError(f"expected 0 <= rank < world, got rank {rank} of {world}")
    return slice(rank, None, world)
