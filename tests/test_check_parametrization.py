"""Checks of charts: those of the registry pass, planted mistakes are found and explained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stiefel
from stiefel.diagnostics import check_parametrization
from stiefel.errors import ConfigurationError
from stiefel.parametrizations import CWY, OWN, MatrixExp
from tests.registry import CHARTS


def small(case):
    """A small shape of a case; one with a batch where its place in the list is odd."""
    sizes = sorted(case.shapes, key=lambda shape: (abs(shape[1] - 4), shape[2]))
    batched = [shape for shape in sizes if shape[0]]
    return batched[0] if batched and CHARTS.index(case) % 2 else sizes[0]


CASES = [(case, shape) for case in CHARTS for shape in case.shapes]


@pytest.mark.parametrize("case", CHARTS, ids=str)
def test_charts_of_the_registry_pass(case):
    report = check_parametrization(case.make(small(case)), directions=2)
    assert report.ok, str(report)
    names = {finding.name for finding in report.findings}
    assert {
        "forward on the manifold",
        "finite gradients",
        "error of the slope",
        "operator",
    } <= names
    assert ("right inverse" in names) == case.inverts
    assert any(curve.order == 2 for curve in report.curves)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "shape"), CASES, ids=[f"{c}-{s}" for c, s in CASES])
def test_charts_of_the_registry_pass_at_every_shape(case, shape):
    """Run with ``--runslow``."""
    report = check_parametrization(case.make(shape))
    assert report.ok, str(report)


@pytest.mark.parametrize("via", ["cwy", "matrix_exp", "polar"])
def test_a_weight_of_a_module(via):
    layer = nn.Linear(5, 3)
    stiefel.orthogonal(layer, via=via)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    report = check_parametrization(layer, "weight")
    assert report.ok, str(report)
    assert "5, 3" in report.subject
    assert not any("complex" in finding.name for finding in report.findings)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_a_complex_weight_of_a_module():
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    stiefel.orthogonal(layer, via="cwy")
    report = check_parametrization(layer, "weight")
    assert report.ok, str(report)
    assert "rank of the differential, of 16 (complex128)" in {f.name for f in report.findings}


def test_the_rank_is_told():
    report = check_parametrization(MatrixExp(4))
    assert report["rank of the differential, of 6 (float64)"].measured == 6
    few = check_parametrization(CWY(5, 5, reflections=1))
    assert few["rank of the differential, of 10 (float64)"].measured == 4  # a unit vector of five


# ------------------------------------------------------------------------------ what is wrong
class Scaled(CWY):
    """Off the manifold by a factor."""

    def forward(self, *originals):
        return 1.001 * super().forward(*originals)


class Raw(OWN):
    """A Gram-Schmidt that divides by zero."""

    def forward(self, V):
        return self.emit(torch.linalg.qr(V / V.norm())[0], V)


class HalfBackward(CWY):
    """Its backward pass loses half of the gradient."""

    def forward(self, *originals):
        half = [v / 2 + (v / 2).detach() for v in originals]
        return super().forward(*half)


class BentBackward(CWY):
    """Its backward pass loses the gradient of the first row."""

    def forward(self, *originals):
        X = super().forward(*originals)
        return torch.cat([X[..., :1, :].detach(), X[..., 1:, :]], dim=-2)


class WrongInverse(MatrixExp):
    def right_inverse(self, X):
        return 1.01 * super().right_inverse(X)


class OtherOperator(CWY):
    def operator(self, *originals):
        return super().operator(*originals).mT


class WrongFlip(CWY):
    def set_determinant(self, sign):
        super().set_determinant(-sign)


class WrongShape(CWY):
    def forward(self, *originals):
        return super().forward(*originals)[..., :2]


class Mixing(OWN):
    """Subtracts the mean over the batch."""

    def forward(self, V):
        return super().forward(V - V.mean(0, keepdim=True) / 10)


class Constant(CWY):
    def forward(self, *originals):
        return super().forward(*(0 * v + 1 for v in originals))


class Raising(CWY):
    def right_inverse(self, X):
        raise RuntimeError("not finished")


@pytest.mark.parametrize(
    ("chart", "names", "said"),
    [
        (Scaled(5), ["forward on the manifold"], "leaves the manifold"),
        (Raw(4, 3), ["forward on the manifold", "finite gradients"], "division by a norm"),
        (
            HalfBackward(5),
            ["order of the first-order model", "error of the slope"],
            "2 times as fast",
        ),
        (
            BentBackward(5),
            ["order of the first-order model", "error of the slope"],
            "a term is missing or wrong",
        ),
        (WrongInverse(4, base="identity"), ["right inverse"], "would be another one"),
        (OtherOperator(4), ["operator", "gradient of the operator"], "multiplies through"),
        (WrongFlip(4), ["determinant"], "flip the last row"),
        (WrongShape(5, 3), ["shape of the weight"], "return (*batch, n, p)"),
        (Mixing(4, 2, batch=(3,)), ["batch"], "a reduction runs over a batch dimension"),
        (Constant(4), ["rank of the differential, of 6 (float64)"], "cannot leave this place"),
        (Raising(4), ["right inverse"], "RuntimeError: not finished"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_mistakes_are_found_and_explained(chart, names, said):
    report = check_parametrization(chart, directions=2)
    failed = {finding.name: finding for finding in report.failures}
    assert set(names) <= set(failed), str(report)
    assert any(said in failed[name].meaning for name in names)
    with pytest.raises(AssertionError, match="WRONG"):
        report.raise_for_failures()


@pytest.mark.parametrize("kind", [HalfBackward, OtherOperator, WrongFlip])
def test_nothing_else_is_blamed(kind):
    blamed = {finding.name for finding in check_parametrization(kind(4), directions=2).failures}
    assert "forward on the manifold" not in blamed
    assert "finite gradients" not in blamed
    assert len(blamed) <= 3


# --------------------------------------------------------------------------- wrong arguments
def test_errors_teach():
    layer = stiefel.orthogonal(nn.Linear(3, 3), via="rgd-c-c")
    for call, match in [
        (lambda: check_parametrization(CWY), "expected a chart.*got CWY"),
        (lambda: check_parametrization(nn.Linear(3, 3), "weight"), "Linear and 'weight'"),
        (lambda: check_parametrization(layer), "name of a weight"),
        (lambda: check_parametrization(layer, "weight"), "the point itself is the parameter"),
    ]:
        with pytest.raises(ConfigurationError, match=match):
            call()
