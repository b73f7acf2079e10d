"""The command `jrb`."""

from typing import Annotated

from jrb._base import extras


def main() -> None:
    """Runs the command line."""
    typer = extras.require("typer", "demo")
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="The replay buffer for JAX.")
    option = typer.Option

    @app.callback()
    def group() -> None:
        """The replay buffer for JAX."""

    @app.command()
    def demo(
        env: Annotated[str, option(help="a gymnax environment with discrete actions")] = (
            "Breakout-MinAtar"
        ),
        steps: Annotated[int, option(help="environment steps of each training", min=1)] = 400_000,
        seeds: Annotated[int, option(help="trainings side by side, under vmap", min=1)] = 1,
        seed: Annotated[int, option(help="the first seed")] = 0,
        out: Annotated[str, option(help="where the picture goes")] = "jrb-demo.png",
    ) -> None:
        """Trains a double DQN with prioritized replay, all of it inside one jit."""
        from jrb.demo import report

        report.main(env=env, steps=steps, seeds=seeds, seed=seed, out=out)

    app()
