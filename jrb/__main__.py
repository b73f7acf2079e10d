"""`python -m jrb` is the command `jrb`."""

from jrb import cli

if __name__ == "__main__":
    cli.main()
