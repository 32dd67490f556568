"""``stiefel diagnose --experiment theorem4``: its tables, its page, its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stiefel.cli import main


def test_theorem4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["diagnose", "--experiment", "theorem4", "--steps", "400", "--seeds", "2"]
    assert main(words) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("theorem4-2")
    assert {path.name for path in folder.iterdir()} == {"diagnosis.png", "diagnosis.json"}
    assert (folder / "diagnosis.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    found = json.loads((folder / "diagnosis.json").read_text())
    assert (found["experiment"], found["steps"], found["seeds"]) == ("theorem4", 400, 2)
    assert len(found["trajectories"]) == 4
    printed = capsys.readouterr().out
    for part in (
        *("slope of the minimum", "slope over [k/2, k]", "quadratic", "procrustes"),
        *("step identity", "orthogonal steps", "non-decreasing norms"),
        *("constant step", "momentum", "weight decay", str(Path("runs") / folder.name)),
    ):
        assert part in printed, part
    broken = {row["control"]: row["breaks"].split(", ") for row in found["controls"]}
    conditions = ["step identity", "orthogonal steps", "non-decreasing norms"]
    for control, count in (("constant step", 1), ("momentum", 2), ("weight decay", 3)):
        assert broken[control] == conditions[:count]
