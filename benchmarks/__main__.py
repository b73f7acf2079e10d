"""Runs `jrb bench`, as `python -m benchmarks`."""

import sys

from jrb import cli

if __name__ == "__main__":
    cli.main(["bench", *sys.argv[1:]])
