"""The film of the first page shows the training that `jrb demo` runs."""

import pathlib

import pytest

image = pytest.importorskip("PIL.Image")
training = pytest.importorskip("jrb.demo.training")

PATH = pathlib.Path(__file__).parents[2] / "docs" / "_static" / "breakout.gif"


def test_the_film_is_small_and_shows_what_the_demo_trains():
    assert PATH.stat().st_size < 1_000_000
    with image.open(PATH) as film:
        assert film.n_frames > 100
        trained = film.info["comment"].decode()
    why = "the demo trains otherwise than in the film: python -m generate.film draws it again"
    assert trained == repr(training.Config()), why
