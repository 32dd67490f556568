"""Errors of the library: each says what was expected, what came, and what to do.

Every error derives from `StiefelError` and from the built-in exception that a reader would
expect, so that both ``except stiefel.errors.StiefelError`` and ``except ValueError`` work.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

__all__ = [
    "ConfigurationError",
    "DataError",
    "DiagnosisError",
    "DoubleBackwardError",
    "DtypeError",
    "ForwardModeError",
    "LostManifoldError",
    "NonFiniteError",
    "OffManifoldError",
    "RebaseError",
    "RepresentationError",
    "ShapeError",
    "StiefelError",
    "UnknownNameError",
    "did_you_mean",
    "naming",
    "unknown",
]


class StiefelError(Exception):
    """Base of all errors raised on purpose by this library."""


class ShapeError(StiefelError, ValueError):
    """A tensor has the wrong shape."""


class DtypeError(StiefelError, TypeError):
    """A tensor has the wrong dtype, or two tensors disagree on dtype or device."""


class OffManifoldError(StiefelError, ValueError):
    """A matrix that should have orthonormal columns does not, within `tolerance`."""


class RepresentationError(StiefelError, ValueError):
    """A chart cannot represent the point that it was asked to hold."""


class UnknownNameError(StiefelError, ValueError):
    """A name is none of the valid ones; the message lists them."""


class LostManifoldError(StiefelError, RuntimeError):
    """A leaf that should live on a manifold has become an ordinary parameter."""


class NonFiniteError(StiefelError, ValueError):
    """A NaN or an infinity where finite numbers are needed."""


class DoubleBackwardError(StiefelError, RuntimeError):
    """A second derivative was asked of a kernel that has only the first."""


class ForwardModeError(StiefelError, NotImplementedError):
    """A derivative in forward mode was asked of a kernel that has only the reverse one."""


class RebaseError(StiefelError, RuntimeError):
    """A chart that must be rebased every K steps is not being rebased by any optimizer."""


class DataError(StiefelError, ValueError):
    """A data file is missing, truncated, or not what it claims to be."""


class DiagnosisError(StiefelError, AssertionError):
    """A check of `stiefel.diagnostics` found something wrong; the message is its report."""


class ConfigurationError(StiefelError, ValueError):
    """Options that do not go together, or a value out of range."""


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Puts a place in front of the text of an error of this library that is raised inside.

    Args:
        place: Where it happens, such as ``"encoder.layers.0.weight"``; nothing is added for an
            empty one, nor to a text that begins with it.

    Example:
        >>> from stiefel.errors import ShapeError, naming
        >>> with naming("layers.0.weight"):
        ...     raise ShapeError("expected two dimensions, got one")
        Traceback (most recent call last):
        stiefel.errors.ShapeError: layers.0.weight: expected two dimensions, got one
    """
    try:
        yield
    except StiefelError as error:
        text = str(error)
        if place and not text.startswith((f"{place}:", f"{place} ")):
            error.args = (f"{place}: {text}",)
        raise


def unknown(kind: str, got: object, valid: Iterable[str]) -> UnknownNameError:
    """Builds the error for a name that is not in a list.

    Args:
        kind: What the name stands for, such as ``"retraction"``.
        got: The name that came.
        valid: The names that would have been accepted.

    Returns:
        An error whose message lists the valid names and the closest of them.
    """
    names = sorted(valid)
    hint = did_you_mean(got, names)
    return UnknownNameError(f"unknown {kind} {got!r}: expected one of {', '.join(names)}.{hint}")


def did_you_mean(got: object, valid: Iterable[str]) -> str:
    """``" Did you mean 'cayley'?"``, with the closest of the valid names; empty if none is."""
    close = difflib.get_close_matches(str(got), list(valid), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
