"""The film of the first page: an agent plays MinAtar Breakout, beside its learning curve.

    PYTHONPATH=docs python -m generate.film

Trains like `jrb demo`, about a minute on two cores, keeps the network at three points of the
training, and lets each of them play. The film has a dark ground of its own, so that it can be read
on light and dark pages, and letters that stay readable on a telephone.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from jrb.demo import training

PATH = pathlib.Path(__file__).parents[1] / "_static" / "breakout.gif"
STAGES = ((1, 60), (5, 70), (40, 240))
"""After how many chunks of ten thousand steps an agent plays, and for how many steps."""
MILLISECONDS = 70  # a step is shown
SIZE = (680, 340)
BOARD, CELL = (20, 52), 26  # the top left of the board, and the side of a cell, in pixels
GROUND, EMPTY, INK, FAINT, CURVE = "#16181d", "#23262d", "#f0f3f6", "#aab2bb", "#56b4e9"
CELLS = (("#56b4e9", 0), ("#b5651d", 3), ("#6b7280", 2), ("#ffffff", 1))
"""The colour and the plane of the paddle, the bricks, the trail and the ball, the last on top."""


def font(size: int) -> Any:
    """Returns matplotlib's font, which comes with it."""
    path = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)


def train(config: training.Config) -> tuple[list[Any], np.ndarray]:
    """Returns the networks of the stages, and the mean return of each chunk."""
    agent = training.Agent(config)
    carry = jax.jit(agent.init)(jax.random.key(config.seed))
    run = jax.jit(agent.chunk, donate_argnums=0)
    networks, curve = {}, []
    for chunk in range(1, config.chunks + 1):
        carry, (returns, episodes) = run(carry)
        curve.append(float(returns) / max(1, int(episodes)))
        networks[chunk] = jax.device_get(carry.network)
    return [networks[chunk] for chunk, _ in STAGES], np.array(curve)


def play(env_name: str, network: Any, steps: int, key: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the boards `[steps, 10, 10, 4]` and the points of the episode before each step.

    The agent is greedy; a new episode begins where one ends.
    """
    env = training.Environment(env_name, num_envs=1)

    def step(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        state, observation, points = carry
        action = jnp.argmax(training.action_values(network, observation), axis=1)
        following, after = env.step(key, state, action)
        first, fresh = env.reset(key)
        done, points_after = after["done"][0], points + after["reward"][0]
        choose = lambda new, old: jnp.where(done, new, old)
        carry = (
            jax.tree.map(choose, fresh, following),
            choose(env.flat(first), after["observation"]),
            choose(0.0, points_after),
        )
        return carry, (observation[0], points)

    observation, state = env.reset(key)
    keys = jax.random.split(key, steps)
    first = (state, env.flat(observation), jnp.float32(0))
    _, (boards, points) = jax.lax.scan(step, first, keys)
    return np.asarray(boards).reshape(steps, 10, 10, -1), np.asarray(points)


def background(config: training.Config, curve: np.ndarray, chunk: int) -> Image.Image:
    """Returns the right side: the learning curve, with a dot where the agent is that plays."""
    width, height = SIZE[0] - 20 * 2 - 10 * CELL, SIZE[1]
    figure = Figure(figsize=(width / 100, height / 100), dpi=100, facecolor=GROUND)
    axes = figure.add_axes((0.2, 0.19, 0.74, 0.63), facecolor=GROUND)
    steps = np.arange(1, config.chunks + 1) * config.played / config.chunks
    axes.plot(steps / 1000, curve, color="#4a5462", linewidth=2)
    axes.plot(steps[:chunk] / 1000, curve[:chunk], color=CURVE, linewidth=3)
    axes.plot(steps[chunk - 1] / 1000, curve[chunk - 1], "o", color="#ffffff", markersize=9)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelsize=13)
    axes.set_xlabel("thousands of steps", color=FAINT, fontsize=14)
    figure.text(0.06, 0.9, "Mean return", color=INK, fontsize=15.5)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def frames(config: training.Config, networks: list[Any], curve: np.ndarray) -> list[Image.Image]:
    """Returns the pictures of the film, in a palette that all of them share."""
    pictures = []
    for number, ((chunk, steps), network) in enumerate(zip(STAGES, networks, strict=True)):
        sheet = Image.new("RGB", SIZE, GROUND)
        right = background(config, curve, chunk)
        sheet.paste(right, (SIZE[0] - right.width, 0))
        played = chunk * config.played // config.chunks
        ImageDraw.Draw(sheet).text((BOARD[0], 12), f"{round(played, -4):,} steps", INK, font(21))
        boards, points = play(config.env, network, steps, jax.random.key(number))
        for board, sum_so_far in zip(boards, points, strict=True):
            picture = sheet.copy()
            pen = ImageDraw.Draw(picture)
            draw_board(pen, board)
            end = BOARD[0] + 10 * CELL - 2
            pen.text((end, 12), f"points: {sum_so_far:.0f}", CURVE, font(21), anchor="ra")
            pictures.append(picture)
    palette = pictures[-1].quantize(48, dither=Image.Dither.NONE)
    return [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]


def draw_board(pen: ImageDraw.ImageDraw, board: np.ndarray) -> None:
    """Draws the cells of a board `[10, 10, 4]`."""
    for row, column in np.ndindex(10, 10):
        x, y = BOARD[0] + CELL * column, BOARD[1] + CELL * row
        there = [color for color, plane in CELLS if board[row, column, plane]]
        pen.rectangle((x, y, x + CELL - 3, y + CELL - 3), [EMPTY, *there][-1])


def main() -> None:
    """Trains, plays and writes the film; its comment says what was trained."""
    config = training.Config()
    networks, curve = train(config)
    first, *others = frames(config, networks, curve)
    first.save(
        PATH,
        save_all=True,
        append_images=others,
        duration=MILLISECONDS,
        loop=0,
        comment=repr(config),
    )


if __name__ == "__main__":
    main()
