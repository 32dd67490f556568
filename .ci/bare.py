"""Checks an environment that holds the bare install: what it requires, and that it works alone."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

CORE = {"torch", "geoopt", "numpy", "scipy"}
EXTRAS = ("lightning", "jsonargparse", "tensorboard", "matplotlib", "pooch", "rich", "pytest")

required = {
    re.split(r"[^\w.-]", line)[0]
    for line in importlib.metadata.requires("stiefel") or []
    if "extra ==" not in line
}
assert required == CORE, f"core dependencies: expected {sorted(CORE)}, got {sorted(required)}"

present = [name for name in EXTRAS if importlib.util.find_spec(name)]
assert not present, f"the bare install brought {present}"

import stiefel  # noqa: E402 - after the checks on what is installed

example = re.search(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
assert example, "README.md has no example"
exec(compile(example[1], "README.md", "exec"), {})
print(
    f"stiefel {stiefel.__version__} on Python {sys.version.split()[0]}: the README's example runs"
)
