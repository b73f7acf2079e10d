"""How the documentation is built: `sphinx-build -W -n --keep-going -b html docs docs/_build`."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import jrb  # noqa: E402

project = "jrb"
author = "the authors of jrb"
project_copyright = "the authors of jrb, Apache-2.0"
version = release = jrb.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "generate",  # the folder beside this file
]
exclude_patterns = ["_build", "generate", "jupyter_execute"]
suppress_warnings = ["toc.empty_glob"]
default_role = "named"
nitpicky = True
# The arguments of `ReplayBuffer`, as type checkers see them.
nitpick_ignore = [("py:class", f"jrb.buffer.Buffer{name}") for name in ("Options", "Parts")]

html_theme = "furo"
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = f"jrb {release}"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["jrb.css"]
html_theme_options = {
    "navigation_with_keys": True,
    "footer_icons": [
        {"name": "GitHub", "url": "https://github.com/jrb-dev/jrb", "html": "GitHub", "class": ""}
    ],
}
html_show_sourcelink = False
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
maximum_signature_line_length = 78
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
