"""Names in docstrings: links where they are documented, plain code where they are not."""

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.domains.python import PyObject, PyXRefRole
from sphinx.transforms.post_transforms import SphinxPostTransform

from generate.public import public_objects


class Named(PyXRefRole):
    """The role of single backticks: a link if there is such an object, else code."""

    def process_link(
        self, env: Any, refnode: Any, has_explicit_title: bool, title: str, target: str
    ) -> tuple[str, str]:
        """Marks the reference as one that may point nowhere."""
        refnode["reftype"], refnode["refdomain"], refnode["may_miss"] = "obj", "py", True
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, target


INSTEAD = {
    "jrb.state.Buffer": "jrb.ReplayBuffer",
    "jrb.mix.Description": "jrb.ReplayBuffer",
}
"""Where names lead that only the inside of the package uses."""


def public_names() -> dict[str, str]:
    """Returns, by where each object is defined, the name by which it is documented."""
    names = dict(INSTEAD)
    for name, value in public_objects():
        if hasattr(value, "__qualname__"):
            names.setdefault(f"{value.__module__}.{value.__qualname__}", name)
    return names


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


class Linked(SphinxPostTransform):
    """Code in Markdown that is the name of something documented, such as `jrb.save(...)`, links."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """Looks at all inline code of a page."""
        domain = self.env.domains["py"]
        for node in list(self.document.findall(nodes.literal)):
            name = node.astext().split("(")[0]
            known = (f"jrb.{name}", name)[name.startswith("jrb.")]
            is_name = name[:1].isupper() or name.startswith("jrb.")
            inside = isinstance(node.parent, nodes.reference | nodes.title)
            if inside or not is_name or known not in domain.objects:
                continue
            copy = node.deepcopy()
            link = domain.resolve_xref(
                self.env, self.env.docname, self.app.builder, "obj", known, _XREF, copy
            )
            if link is not None:
                node.replace_self(link)


_XREF = pending_xref("", refdomain="py", reftype="obj")


def closed(app: Any, document: nodes.document) -> None:
    """Called by Sphinx: takes off the empty line that a doctest in Markdown ends with."""
    for node in document.findall(nodes.literal_block):
        text = node.astext()
        if text.endswith("\n"):
            node.rawsource = text.rstrip("\n")
            node.children = [nodes.Text(node.rawsource)]


def retitle() -> None:
    """What docstrings list as attributes is called so."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"


_COLON = "\ue000"
"""Stands for a colon in what `napoleon` reads."""


def hide_colons(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Called by Sphinx before `napoleon`, to which words before a colon are a property's type."""
    if what in ("property", "attribute", "data"):
        lines[:1] = [line.replace(":", _COLON) for line in lines[:1]]


def show_colons(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Called by Sphinx after `napoleon`."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def apart(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Called by Sphinx with each docstring: letters right behind a backtick, as in `x`s, may stand.

    reStructuredText wants something between; what is put there is not shown.
    """
    lines[:] = [re.sub(r"(?<!`)(`[^`\s][^`]*`)(?=\w)", r"\1\\ ", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.jrb_public_names = public_names()
    app.add_role("named", Named())
    app.add_post_transform(Linked)
    retitle()
    app.connect("doctree-read", closed)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)
    app.connect("autodoc-process-docstring", show_colons, priority=600)
    app.connect("autodoc-process-docstring", apart, priority=600)
    app.connect("missing-reference", resolve)
