"""The charts CWY and T-CWY: sizes, operators, reach, saving, rebasing."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import ConfigurationError, RepresentationError, ShapeError
from stiefel.geometry import haar
from stiefel.geometry.compact_wy import compact_wy
from stiefel.operators import CompactWY, Dense
from stiefel.parametrizations import CWY, TCWY
from tests.reflection_vectors import COMPLEX, REAL


def test_charts_choose_sizes_and_refuse_the_impossible():
    assert CWY(7).reflections == 7
    assert CWY(7, 3).reflections == 3
    assert TCWY(7, 3).reflections == 3
    for wrong in (8, 0, 2.0, True):
        with pytest.raises(ConfigurationError, match=rf"reflections= .* from 1 to 7, got {wrong}"):
            CWY(7, reflections=wrong)
    with pytest.raises(ConfigurationError, match="via='cwy'"):
        TCWY(7, 7)
    with pytest.raises(ConfigurationError, match="via='cwy'"):
        TCWY(7)
    with pytest.raises(ShapeError, match="wide"):
        CWY(3, 7)


def test_operator_is_compact_where_that_is_cheaper():
    for chart, kind in [
        (CWY(9), Dense),
        (CWY(9, reflections=4), CompactWY),
        (CWY(8, reflections=4), Dense),
        (TCWY(9, 4), CompactWY),
        (TCWY(9, 5), Dense),
    ]:
        V = chart.empty_originals(torch.float32).normal_()
        assert isinstance(chart.operator(V), kind)
        assert isinstance(chart.operator(V).mT, Dense) == (kind is Dense)


def test_thin_orbit_covers_tall_matrices():
    """T-CWY is onto St(n, p), p < n, with the extreme points too."""
    for n, p in [(2, 1), (3, 2), (8, 7), (8, 3)]:
        chart = TCWY(n, p)
        E = torch.eye(n, p, dtype=REAL)
        for X in (E, -E, haar(n, p, dtype=REAL), E.flip(0), E.flip(0).flip(1)):
            assert (chart(chart.right_inverse(X)) - X).abs().max() < 1e-12


def test_more_reflections_than_columns():
    chart = CWY(8, 3, reflections=6)
    X = haar(8, 3, dtype=REAL)
    V = chart.right_inverse(X)
    assert V.shape == (8, 6)
    assert (chart(V) - X).abs().max() < 1e-12


def test_spare_reflections_leave_many_directions_open():
    """At the identity n pairs of one vector would leave 11 of 66 directions (n = 12)."""
    chart = CWY(12)
    V = chart.right_inverse(torch.eye(12, dtype=REAL))
    J = torch.autograd.functional.jacobian(chart, V).reshape(144, 144)
    assert torch.linalg.matrix_rank(J, rtol=1e-9) == 51


def test_complex_weights_need_no_determinant():
    chart = CWY(5)
    chart.set_determinant(torch.tensor(1))
    X = haar(5, dtype=COMPLEX)
    assert chart.obstacle(X) is None
    assert (chart(*chart.right_inverse(X)) - X).abs().max() < 1e-12


@pytest.mark.parametrize("reflections", [5, 3])
def test_a_matrix_of_the_other_determinant_is_refused_for_its_determinant(reflections):
    chart = CWY(5, reflections=reflections)
    X = chart(torch.randn(5, reflections, dtype=REAL))
    X[-1] *= -1
    with pytest.raises(RepresentationError, match=r"has determinant .* now, the matrix") as caught:
        chart.right_inverse(X)
    assert chart.obstacle(X) == str(caught.value)


def test_flip_is_saved_and_survives_conversion():
    chart = CWY(5, batch=(2,))
    chart.set_determinant(torch.tensor([1, -1]))
    other = CWY(5, batch=(2,))
    other.load_state_dict(chart.state_dict())
    assert torch.equal(other.flip, torch.tensor([-1, 1], dtype=torch.int8))
    assert other.to(torch.float64).to(torch.bfloat16).flip.dtype == torch.int8


def test_start_repeats_with_its_generator():
    for dtype in (torch.float32, COMPLEX):
        one, two = (
            CWY(6).start(dtype, generator=torch.Generator().manual_seed(3)) for _ in range(2)
        )
        assert torch.equal(one, two)
        assert one.dtype == dtype


def test_changing_a_vector_in_place_changes_the_weight():
    chart = CWY(4)
    V = torch.randn(4, 4)
    X = chart(V)
    with torch.no_grad():
        V[:, 0] += 1
    assert not torch.allclose(chart(V), X)


def test_rebase_moves_every_known_moment_and_resets_the_rest():
    chart = CWY(5)
    V = 3 * torch.randn(5, 5)
    V[:, 2] = 0
    (new,), move = chart.rebase([V])
    norms = torch.linalg.vector_norm(V, dim=0)
    norms[2] = 1
    assert torch.allclose(new, V / norms)
    moment = torch.rand(5, 5)
    for key in ("exp_avg", "momentum_buffer", "grad_avg"):
        assert torch.allclose(move(0, key, moment), moment * norms)
    for key in ("exp_avg_sq", "square_avg", "max_exp_avg_sq", "sum"):
        assert torch.allclose(move(0, key, moment), moment * norms**2)
    assert move(0, "unheard_of", moment) is None
    assert move(0, "step", torch.tensor(3.0)) == 3
    phases = torch.rand(5)
    assert torch.equal(move(1, "exp_avg", phases), phases)


def test_gradient_descent_lengthens_the_vectors():
    """Scale invariance: steps are orthogonal to v, so |v| never shrinks under plain SGD."""
    V = torch.randn(6, 6, dtype=REAL, requires_grad=True)
    target = haar(6, dtype=REAL, determinant=1)
    norms = torch.linalg.vector_norm(V.detach(), dim=0)
    for _ in range(50):
        loss = (compact_wy(V) - target).square().sum()
        (g,) = torch.autograd.grad(loss, V)
        with torch.no_grad():
            V -= 0.1 * g
        longer = torch.linalg.vector_norm(V.detach(), dim=0)
        assert (longer >= norms * (1 - 1e-12)).all()
        norms = longer
    assert (compact_wy(V) - target).square().sum() < 1
