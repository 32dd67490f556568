"""Parameters of other libraries' Cayley maps, carried over: the same weights, the same steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal

from stiefel.errors import DtypeError, ShapeError
from stiefel.geometry import cayley_map, haar
from stiefel.parametrizations import Cayley
from stiefel.parametrizations.conventions import (
    from_boft,
    from_geotorch,
    from_oft,
    from_torch,
    to_boft,
    to_geotorch,
    to_oft,
    to_torch,
)

REAL, COMPLEX = torch.float64, torch.complex128


def torch_layer(dtype, trivialized, n=5):
    layer = nn.Linear(n, n, bias=False, dtype=dtype)
    orthogonal(layer, orthogonal_map="cayley", use_trivialization=trivialized)
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(n, n, dtype=dtype))
    return layer, getattr(layer.parametrizations.weight[0], "base", None)


def chart_at(base, n=5):
    chart = Cayley(n) if base is None else Cayley(n, rebase_every=10)
    chart.set_base(torch.eye(n) if base is None else base)
    return chart


def peft_square(R):
    """BOFT: (I - S) (I + S)^-1 with S = (R - R^T) / 2."""
    S, eye = (R - R.mT) / 2, torch.eye(R.shape[-1], dtype=R.dtype)
    return (eye - S) @ torch.linalg.inv(eye + S)


def peft_vector(R, b, neumann, terms=5):
    """OFT: S from its upper triangle, the same map; or I + 2 S + ... + 2 S^(k-2) + S^(k-1)."""
    S, eye = torch.zeros(*R.shape[:-1], b, b, dtype=R.dtype), torch.eye(b, dtype=R.dtype)
    k = 0
    for i in range(b):
        for j in range(i + 1, b):
            S[..., i, j], S[..., j, i] = R[..., k], -R[..., k]
            k += 1
    if not neumann:
        return (eye - S) @ torch.linalg.inv(eye + S)
    powers = [torch.linalg.matrix_power(S, k) for k in range(terms)]
    return eye + 2 * sum(powers[1:-1]) + powers[-1]


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize("trivialized", [True, False])
def test_torch(dtype, trivialized):
    layer, base = torch_layer(dtype, trivialized)
    X = from_torch(layer.parametrizations.weight.original, base)
    Q = chart_at(base)(X)
    torch.testing.assert_close(Q, layer.weight)
    expected = layer.weight.detach()
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(to_torch(X, base))
    torch.testing.assert_close(layer.weight, expected)
    torch.testing.assert_close(from_torch(to_torch(X, base), base), X)


@pytest.mark.parametrize("lower", [True, False])
def test_geotorch(lower):
    geotorch = pytest.importorskip("geotorch", reason="a peer: pip install '.[benchmarks]'")
    layer = nn.Linear(5, 5, bias=False, dtype=REAL)
    with torch.no_grad():
        layer.weight.copy_(haar(5, dtype=REAL, determinant=1))
    manifold = geotorch.SO((5, 5), triv="cayley", lower=lower).double()
    parametrize.register_parametrization(layer, "weight", manifold, unsafe=True)
    R = layer.parametrizations.weight.original
    with torch.no_grad():
        R.normal_()
    X = from_geotorch(R, manifold.base, lower=lower)
    torch.testing.assert_close(chart_at(manifold.base)(X), layer.weight)
    expected = layer.weight.detach()
    with torch.no_grad():
        R.copy_(to_geotorch(X, manifold.base, lower=lower))
    torch.testing.assert_close(layer.weight, expected)


def test_peft_blocks():
    R = torch.randn(3, 4, 4, dtype=REAL)
    X = from_boft(R)
    torch.testing.assert_close(cayley_map(X), peft_square(R))
    torch.testing.assert_close(peft_square(to_boft(X)), peft_square(R))


def test_peft_vectors():
    R = torch.randn(3, 6, dtype=REAL)
    X = from_oft(R, use_cayley_neumann=False)
    torch.testing.assert_close(cayley_map(X), peft_vector(R, 4, False))
    assert torch.equal(to_oft(X, use_cayley_neumann=False), R)


def test_peft_series_has_the_other_sign():
    """The series tends to our weight as terms are added; with the sign of the solve it does not."""
    R = 0.1 * torch.randn(3, 6, dtype=REAL)
    Q = cayley_map(from_oft(R, use_cayley_neumann=True))
    errors = [(peft_vector(R, 4, True, terms) - Q).abs().max() for terms in (3, 5, 9, 40)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-14
    assert torch.equal(to_oft(from_oft(R, use_cayley_neumann=True), use_cayley_neumann=True), R)
    wrong = cayley_map(from_oft(R, use_cayley_neumann=False))
    assert (peft_vector(R, 4, True, 40) - wrong).abs().max() > 0.05


def torch_map(R):
    S, eye = R.tril(-1) - R.tril(-1).mT, torch.eye(R.shape[-1], dtype=R.dtype)
    return torch.linalg.solve(eye - S / 2, eye + S / 2)


@pytest.mark.parametrize(
    ("theirs", "carry", "shape", "sgd", "adam"),
    [
        (torch_map, from_torch, (4, 4), 1 / 4, 1 / 2),
        (peft_square, from_boft, (4, 4), 1 / 2, 1),
        (
            lambda R: peft_vector(R, 4, False),
            lambda R: from_oft(R, use_cayley_neumann=False),
            (6,),
            1,
            1,
        ),
    ],
    ids=["torch", "boft", "oft"],
)
def test_rates_that_make_the_same_steps(theirs, carry, shape, sgd, adam):
    """The multiples of their rate that docs/choosing.md gives, for weights without a base."""
    target = torch.randn(4, 4, dtype=REAL)
    for kind, factor in [(torch.optim.SGD, sgd), (torch.optim.Adam, adam)]:
        R = torch.randn(*shape, dtype=REAL).requires_grad_()
        X = carry(R).requires_grad_()
        one, two = kind([R], lr=0.02), kind([X], lr=0.02 * factor)
        for _ in range(10):
            for leaf, optimizer, weight in ((R, one, theirs), (X, two, cayley_map)):
                optimizer.zero_grad()
                (weight(leaf) - target).square().sum().backward()
                optimizer.step()
            torch.testing.assert_close(theirs(R), cayley_map(X), rtol=0, atol=1e-6)


def test_what_has_no_counterpart_is_refused():
    with pytest.raises(ShapeError, match=r"square.*init='keep'"):
        from_torch(torch.zeros(4, 3))
    with pytest.raises(ShapeError, match=r"b \(b - 1\) / 2.*from_boft"):
        from_oft(torch.zeros(3, 7), use_cayley_neumann=False)
    with pytest.raises(DtypeError, match="geotorch"):
        from_geotorch(torch.zeros(4, 4, dtype=COMPLEX))
    with pytest.raises(DtypeError, match="peft"):
        to_oft(torch.zeros(4, 4, dtype=COMPLEX), use_cayley_neumann=True)
