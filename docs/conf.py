"""How Sphinx builds these pages; `make docs` turns every warning into an error."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "lowkey"
author = "the lowkey authors"
copyright = "the lowkey authors, Apache-2.0"
version = release = installed_version("lowkey")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"lowkey {release}"
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings write `names` in single backticks, as Markdown does.
default_role = "code"

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": False}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Fields", "params_style"),
    "Guarantee",
    "Assumes",
    "Cost",
    "Scope",
]
