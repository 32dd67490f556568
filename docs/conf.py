"""Sphinx configuration: ``sphinx-build -W docs docs/_build``."""

import importlib
import re
import warnings

# geoopt decorates its functions with torch.jit.script when it is imported.
warnings.filterwarnings("ignore", "`torch.jit.script` is", DeprecationWarning)

from sphinx.util import logging  # noqa: E402

import stiefel  # noqa: E402 - after the filter

project = "stiefel"
author = "The stiefel maintainers"
copyright = "The stiefel maintainers"
release = version = stiefel.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

default_role = "code"  # single backticks in docstrings

html_theme = "furo"
html_title = f"stiefel {release}"


def check_public_names(app, env):
    """Every name in the ``__all__`` of a documented module is described, or the build warns."""
    described = env.domains["py"].objects
    modules = [name for name, entry in described.items() if entry.objtype == "module"]
    documented = [name for name in modules if name.count(".") <= 1]
    for module in documented:
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", []):
            if f"{module}.{name}" not in described:
                logging.getLogger(__name__).warning(
                    "%s.%s is public but not described", module, name
                )


def escape_bars(app, what, name, obj, options, lines):
    """Bars in a docstring are norms and absolute values, not reStructuredText substitutions."""
    parts = "\n".join(lines).split("``")
    parts[::2] = [
        re.sub(r"^(?!\s*(>>>|\.\.\.)).*", _escaped, part, flags=re.M) for part in parts[::2]
    ]
    lines[:] = "``".join(parts).split("\n")


def _escaped(line):
    return line[0].replace("|", r"\|")


def setup(app):
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("env-check-consistency", check_public_names)
