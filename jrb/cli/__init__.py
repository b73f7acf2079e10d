"""The command `jrb`.

What needs JAX is imported where it is used: a store is inspected and verified without it.
"""

import importlib
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: those behind the name of the program; None for the program's own.

    Raises:
        SystemExit: always, with the status: 0; 1 for damage or a failure; 2 for a wrong call,
            or a path without a file of ours; 130 for an interrupt.
    """
    # The number of a closed stream would go to the next file that is opened, into which libraries
    # would then write their messages.
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        app = importlib.import_module("jrb.cli.app")
    except ModuleNotFoundError as error:
        raise SystemExit(f"jrb: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(app.run(sys.argv[1:] if arguments is None else list(arguments)))
