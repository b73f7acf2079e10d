"""Chromium without a window, driven by its command line: no package and no port is needed."""

import html
import json
import re
import shutil
import subprocess

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
)
SECONDS = 240
BUDGET = 60_000  # milliseconds of the page's own clock, which stands still while files are read
PAGE = """<!doctype html><meta charset="utf-8">
<body>{frames}<pre id="result"></pre>
<script>
addEventListener("load", async () => {{
  const frames = [...document.querySelectorAll("iframe")];
  const values = await Promise.all(frames.map({measure}));
  document.getElementById("result").textContent = JSON.stringify(values);
}});
</script>
"""


def find():
    """Returns the path of chromium; skips the test where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    return found or pytest.skip("needs a browser: chromium or google-chrome in the PATH")


def measure(folder, pages, widths, function):
    """Loads pages into frames of these widths, and returns what a function says of each.

    Args:
        folder: where the page of frames is written, and chromium keeps its profile.
        pages: paths of HTML files, relative to `folder`, with a query behind it where wanted.
        widths: in pixels, one for each frame of a page.
        function: JavaScript that takes a frame when all are loaded, and returns JSON or a promise.

    Returns:
        A list, for each page a list with a value for each width.
    """
    frames = "\n".join(
        f'<iframe src="{html.escape(page)}" width="{width}" height="900"></iframe>'
        for page in pages
        for width in widths
    )
    file = folder / "frames.html"
    file.write_text(PAGE.format(frames=frames, measure=function))
    command = [find(), *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    command += [f"--virtual-time-budget={BUDGET}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result and result[1], f"chromium: expected a result, got {done.stderr[-2000:]}"
    values = json.loads(html.unescape(result[1]))
    step = len(widths)
    return [values[at : at + step] for at in range(0, len(values), step)]
