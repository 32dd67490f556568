"""What the README and the documentation show is run, and says the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from stiefel.init import INITIALIZERS
from stiefel.parameter import via_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
#: Pages whose blocks sketch code that a reader would write, with bodies left out.
SKETCHES = {"docs/extending.md"}


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SKETCHES])
def test_examples_run(page: str) -> None:
    namespace: dict[str, object] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, page, "exec"), namespace)


def test_the_readme_has_fifteen_lines_of_use() -> None:
    (block,) = _blocks("README.md", "python")
    assert len([line for line in block.splitlines() if line.strip()]) == 15
    assert 'start-after: "<!-- use: begin -->"' in (ROOT / "docs/index.md").read_text()


def test_the_readme_has_two_commands() -> None:
    first, second = _blocks("README.md", "sh")
    assert len(first.splitlines()) == len(second.splitlines()) == 1
    assert first.startswith("python3.11 -m venv")
    assert "'.[experiments]'" in first
    assert first.endswith("stiefel train copying\n")
    assert "'.[test]'" in second
    assert second.endswith("pytest -n auto\n")
    assert "\npytest -n auto" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_resolve(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).is_file(), f"{page} points to {target}"


def _first_column(page: str, head: str) -> list[str]:
    """The names, in backticks, in the first column of the table whose first column is `head`."""
    table = re.search(rf"^\| {head} \|.*\n(?:\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    return re.findall(r"^\| `([^`]+)` \|", table[0], re.MULTILINE)[head.startswith("`") :]


def test_every_benchmark_is_described() -> None:
    assert sorted(_first_column("docs/benchmarks.md", "name")) == sorted(NAMES)


def test_every_name_that_is_chosen_is_described() -> None:
    ways = _first_column("docs/choosing.md", "`via`") + _first_column("docs/choosing.md", "short")
    assert sorted(ways) == via_names()
    assert sorted(_first_column("docs/choosing.md", "`init`")) == sorted(INITIALIZERS)


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    begun = re.findall(r"^<!-- (\w+): begin -->$", text, re.MULTILINE)
    parts = dict(re.findall(r"^<!-- (\w+): begin -->\n(.*?)^<!-- \1: end -->$", text, re.S | re.M))
    assert begun == list(parts), f"{page}: a part begins and does not end, or stands there twice"
    assert [name for name, part in parts.items() if not part.strip()] == []
