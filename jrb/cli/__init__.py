"""The command `jrb`: a file for each of its commands, and what they share.

What needs JAX is imported where it is used: what a store says of itself is told without.
"""

import importlib
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: those behind the name of the program; None for the program's own.

    Raises:
        SystemExit: always, with the status: 0; 1 for what is damaged or failed; 2 for a wrong call,
            or a path at which there is nothing of ours; 130 for an interrupt.
    """
    try:
        app = importlib.import_module("jrb.cli.app")
    except ModuleNotFoundError as error:
        raise SystemExit(f"jrb: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(app.run(sys.argv[1:] if arguments is None else list(arguments)))
