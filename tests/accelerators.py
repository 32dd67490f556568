"""The way that the library goes on an accelerator, on any machine."""

from __future__ import annotations

import sys


def as_on_an_accelerator(monkeypatch):
    """Where the CPU would look at a number for nothing, no number is looked at."""
    for name, module in list(sys.modules.items()):
        if name.startswith("stiefel.") and hasattr(module, "readable"):
            monkeypatch.setattr(module, "readable", lambda _: False)
