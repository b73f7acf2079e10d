"""Names in docstrings: links where they are documented, plain code where they are not."""

import importlib
import re
from typing import Any

from docutils import nodes
from sphinx.domains.python import PyXRefRole

ROOMS = (
    "jrb",
    "jrb.checkpoint",
    "jrb.interop",
    "jrb.datasets",
    "jrb.layouts",
    "jrb.limits",
    "jrb.sum_tree",
    "jrb.ring",
    "jrb.storages",
    "jrb.testing",
    "jrb.transforms",
    "jrb.types",
)
"""Where public names are imported from; the first that has a name is where it is documented."""


class Named(PyXRefRole):
    """The role of single backticks: a link if there is such an object, else code."""

    def process_link(
        self, env: Any, refnode: Any, has_explicit_title: bool, title: str, target: str
    ) -> tuple[str, str]:
        """Marks the reference as one that may point nowhere."""
        refnode["reftype"], refnode["refdomain"], refnode["may_miss"] = "obj", "py", True
        return super().process_link(env, refnode, has_explicit_title, title, target)


INSTEAD = {
    "jrb.state.Buffer": "jrb.ReplayBuffer",
    "jrb.mix.Description": "jrb.ReplayBuffer",
}
"""Where names lead that only the inside of the package uses."""


def public_names() -> dict[str, str]:
    """From where each object is defined to where it is imported from."""
    found = dict(INSTEAD)
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if hasattr(value, "__qualname__"):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", f"{room}.{name}")
    return found


def resolve(app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """A link to where an object is documented; code for what is not ours, or may miss."""
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    public = app.jrb_public_names.get(target)
    if public is not None and public != target:
        found = env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", public, node, content
        )
        if found is not None:
            return found
    ours = target.split(".")[0] == "jrb" and "._" not in target
    return None if ours and not node.get("may_miss") else content


def apart(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Called by Sphinx with each docstring: letters right behind a backtick, as in `x`s, may stand.

    reStructuredText wants something between; what is put there is not shown.
    """
    lines[:] = [re.sub(r"(?<!`)(`[^`\s][^`]*`)(?=\w)", r"\1\\ ", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.jrb_public_names = public_names()
    app.add_role("named", Named())
    app.connect("autodoc-process-docstring", apart)
    app.connect("missing-reference", resolve)
