"""The command line: ``stiefel train TASK --method METHOD`` and ``stiefel diagnose RUN``.

Needs the extra ``stiefel[experiments]``; without it `main` says so in one line.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from stiefel.errors import ConfigurationError, DataError, StiefelError, UnknownNameError

__all__ = ["main"]

_EXTRA = ("jsonargparse", "lightning", "matplotlib", "pooch", "rich", "tensorboard", "yaml")
_FAILED, _WRONG_INPUT = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The words after ``stiefel``; those of the process if None.

    Returns:
        The exit status: 0 when all went well, 2 for a wrong option or file, 1 for a failed run.
        A word that the parser itself refuses ends the process with status 2.
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"the command line needs {', '.join(missing)}"
        return _complain(f'{needed}: pip install "stiefel[experiments]"', _WRONG_INPUT)
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except (ConfigurationError, DataError, OSError, UnknownNameError) as error:
        return _complain(str(error), _WRONG_INPUT)
    except StiefelError as error:
        return _complain(str(error), _FAILED)


def _run(words: list[str]) -> int:
    from stiefel.experiments.arguments import parse
    from stiefel.experiments.options import DiagnoseOptions

    options = parse(words)
    # what follows takes seconds to import: only for words that parse
    if isinstance(options, DiagnoseOptions):
        from stiefel.experiments.diagnose import diagnose

        diagnose(options)
    else:
        from stiefel.experiments.training import train

        train(options)
    return 0


def _complain(message: str, status: int) -> int:
    print(f"stiefel: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
