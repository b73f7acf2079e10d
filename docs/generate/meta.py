"""What search engines and chat programs show of a page: its first sentences, as a description."""

import html
import re
from typing import Any

from docutils import nodes

LONGEST = 200  # characters; search engines show about 160
DEFAULT = "jrb is a replay buffer for JAX: pure functions, in place, exact."


def description(document: nodes.document | None) -> str:
    """Returns the first sentences of a page that fit, at least one."""
    found = [] if document is None else document.findall(nodes.paragraph)
    paragraphs = [paragraph for paragraph in found if not paragraph["classes"]]
    words = next((text for text in (p.astext() for p in paragraphs) if len(text) > 40), DEFAULT)
    sentences = re.split(r"(?<=[.:!?])\s+", " ".join(words.split()))
    shown = sentences[0]
    for sentence in sentences[1:]:
        if len(shown) + len(sentence) >= LONGEST:
            break
        shown += f" {sentence}"
    return shown


def add(app: Any, page: str, template: str, context: dict[str, Any], document: Any) -> None:
    """Called by Sphinx for each page."""
    title = html.escape(re.sub(r"<.*?>", "", html.unescape(context.get("title", "jrb"))))
    words = html.escape(description(document))
    context["metatags"] = (
        f'{context.get("metatags", "")}\n<meta name="description" content="{words}">'
        f'\n<meta property="og:title" content="{title}">'
        f'\n<meta property="og:description" content="{words}">'
    )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", add)
