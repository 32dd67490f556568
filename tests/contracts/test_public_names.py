"""The public names: which they are, that they explain themselves, and what importing them costs."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import stiefel

ROOT = Path(__file__).resolve().parents[2]

TOP = {
    "Constraint",
    "ManifoldParameter",
    "Stiefel",
    "attach",
    "constraints",
    "convert",
    "diagnostics",
    "errors",
    "geometry",
    "init",
    "manifolds",
    "models",
    "operator",
    "operators",
    "optim",
    "orthogonal",
    "parametrizations",
    "release",
    "tolerance",
}
PUBLIC_MODULES = [
    "stiefel",
    "stiefel.diagnostics",
    "stiefel.errors",
    "stiefel.experiments",
    "stiefel.geometry",
    "stiefel.init",
    "stiefel.manifolds",
    "stiefel.models",
    "stiefel.numerics",
    "stiefel.operators",
    "stiefel.optim",
    "stiefel.parameter",
    "stiefel.parametrizations",
]
EXTRAS = {
    "PIL",
    "geotorch",
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "matplotlib",
    "pooch",
    "pymanopt",
    "pytest",
    "pytorch_lightning",
    "rich",
    "sphinx",
    "tensorboard",
    "torchmetrics",
}


def _symbols() -> list[tuple[str, str]]:
    return [
        (module, name)
        for module in PUBLIC_MODULES
        for name in importlib.import_module(module).__all__
    ]


def test_the_front_page_is_exactly_this() -> None:
    assert set(stiefel.__all__) == TOP
    visible = {name for name in vars(stiefel) if not name.startswith("_")}
    # Submodules that a plain import loads are attributes by Python's rules.
    submodules = {name for name in visible if inspect.ismodule(getattr(stiefel, name))}
    assert visible - submodules <= TOP


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_all_is_explicit_and_resolves(module: str) -> None:
    loaded = importlib.import_module(module)
    assert len(loaded.__all__) == len(set(loaded.__all__))
    missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
    assert not missing, f"{module}.__all__ names what is not there: {missing}"


def _undocumented(owner: str, symbol: object) -> list[str]:
    """Names of a function, or of a class and its own public members, that have no docstring."""
    found = [] if inspect.getdoc(symbol) else [owner]
    if inspect.isclass(symbol):
        for name, member in vars(symbol).items():
            function = inspect.isfunction(member) or isinstance(
                member, (property, classmethod, staticmethod)
            )
            if function and not name.startswith("_") and not inspect.getdoc(getattr(symbol, name)):
                found.append(f"{owner}.{name}")
    return found


@pytest.mark.parametrize(("module", "name"), _symbols())
def test_every_public_symbol_has_a_docstring(module: str, name: str) -> None:
    symbol = getattr(importlib.import_module(module), name)
    if inspect.isclass(symbol) or inspect.isroutine(symbol) or inspect.ismodule(symbol):
        undocumented = _undocumented(f"{module}.{name}", symbol)
        assert not undocumented, f"no docstring: {undocumented}"


@pytest.mark.parametrize("module", [name for name in PUBLIC_MODULES if name != "stiefel.parameter"])
def test_every_public_module_has_a_page(module: str) -> None:
    # The documentation's own build fails for a name of __all__ that no page describes.
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert f".. automodule:: {module}\n" in pages


def test_import_brings_nothing_heavy() -> None:
    code = (
        "import sys, stiefel\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('stiefel.')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    roots, own = (set(line.split()) for line in result.stdout.splitlines())
    assert {"torch", "geoopt", "numpy"} <= roots
    assert not roots & EXTRAS, f"`import stiefel` loads {sorted(roots & EXTRAS)}"
    heavy = {name for name in own if name.startswith(("stiefel.experiments", "stiefel.cli"))}
    assert not heavy, f"`import stiefel` loads {sorted(heavy)}"
    assert {"stiefel.optim", "stiefel.models", "stiefel.geometry", "stiefel.init"} <= own


def test_version_is_the_installed_one() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{stiefel.__version__}]" in changelog
    assert f"\nversion: {stiefel.__version__}\n" in (ROOT / "CITATION.cff").read_text()
