"""The command `jrb`.

Modules that need JAX are imported only where they are used: `inspect` and `verify` of a store do
not import it.
"""

import importlib
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: the arguments after the program's name; None for those in `sys.argv`.

    Raises:
        SystemExit: always, with the status: 0 for success; 1 for damage or a failure; 2 for wrong
            arguments, or a path that jrb cannot read; 130 for an interrupt.
    """
    # The next file opened would get the number of a closed stream, and libraries would write their
    # messages into this file.
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
