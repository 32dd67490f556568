"""Layers of rotations against products of block matrices; Clements' angles; the chart itself."""

from __future__ import annotations

import math

import pytest
import torch

import stiefel
from stiefel.errors import ConfigurationError, RepresentationError, UnknownNameError
from stiefel.geometry import givens as kernel
from stiefel.geometry import givens_matrix as matrix_kernel
from stiefel.geometry import haar, orthonormality_residual
from stiefel.geometry.clements import clements_angles
from stiefel.geometry.givens import rotate
from stiefel.geometry.givens_matrix import rotation_matrix
from stiefel.numerics import tolerance
from stiefel.operators import Dense, Rotations
from stiefel.parametrizations import Givens

REAL, COMPLEX = torch.float64, torch.complex128
LAYERS = [
    (1, 1, "tunable"),
    (2, 2, "tunable"),
    (5, 5, "tunable"),
    (6, 3, "tunable"),
    (4, 9, "tunable"),
    (8, 3, "fft"),
    (4, 5, "fft"),
    (1, 1, "fft"),
]
#: Also as many layers that there are more angles than entries of the matrix.
MANY_LAYERS = [*LAYERS, (7, 9, "tunable"), (3, 11, "tunable"), (4, 9, "fft")]


def pairs_of(n, k, style):
    """The pairs of layer k = 0, 1, ..., from the definition."""
    if style == "tunable":
        return [(i, i + 1) for i in range(k % 2, n - 1, 2)]
    bit = 1 << (k % max(n.bit_length() - 1, 1))
    return [(i, i + bit) for i in range(n) if not i & bit and i + bit < n]


def explicit(n, layers, style, theta, phi=None, omega=None):
    """D F_L ... F_1 as a product of n x n matrices of 2 x 2 blocks."""
    dtype = REAL if phi is None else COMPLEX
    W, number = torch.eye(n, dtype=dtype), 0
    for k in range(layers):
        F = torch.eye(n, dtype=dtype)
        for a, b in pairs_of(n, k, style):
            c, s = math.cos(theta[number]), math.sin(theta[number])
            e = 1.0 if phi is None else complex(math.cos(phi[number]), math.sin(phi[number]))
            F[a, a], F[a, b], F[b, a], F[b, b] = c, -e * s, s, e * c
            number += 1
        W = F @ W
    assert number == len(theta)
    if omega is not None:
        W = torch.diag(torch.polar(torch.ones_like(omega), omega)) @ W
    return W


def count(n, layers, style):
    return sum(len(pairs_of(n, k, style)) for k in range(layers))


def random_angles(batch, n, layers, style, dtype):
    sizes = [count(n, layers, style)]
    if dtype.is_complex:
        sizes += [sizes[0], n]
    return [3 * torch.randn(*batch, size, dtype=REAL) for size in sizes]


@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
class TestAgainstBlockMatrices:
    @pytest.mark.parametrize(("n", "layers", "style"), LAYERS)
    def test_the_weight(self, n, layers, style, dtype):
        chart = Givens(n, layers=layers, style=style)
        angles = random_angles((), n, layers, style, dtype)
        assert chart.rotations == len(angles[0])
        W = explicit(n, layers, style, *angles)
        assert (chart(*angles) - W).abs().max() < 1e-14

    @pytest.mark.parametrize(("n", "layers", "style"), LAYERS)
    @pytest.mark.parametrize("adjoint", [False, True])
    @pytest.mark.parametrize("columns", [2, 9])  # fewer and more than there are matrices
    def test_products_and_their_gradients(self, n, layers, style, adjoint, columns, dtype):
        angles = random_angles((3,), n, layers, style, dtype)
        X = torch.randn(3, n, columns, dtype=dtype)
        W = torch.stack(
            [explicit(n, layers, style, *(angle[i] for angle in angles)) for i in range(3)]
        )
        W = W.mH if adjoint else W
        inputs = [tensor.requires_grad_() for tensor in (X, *angles)]

        def product(*args):
            rest = args[1:] if dtype.is_complex else (args[1], None, None)
            return rotate(args[0], *rest, layers=layers, style=style, adjoint=adjoint)

        assert (product(*inputs) - W @ X).abs().max() < 1e-13
        assert torch.autograd.gradcheck(product, inputs, fast_mode=True)

    @pytest.mark.parametrize(("n", "layers"), [(16, 16), (37, 37), (40, 50), (21, 7)])
    @pytest.mark.parametrize("h", [1, 2, 4, 8])
    def test_blocks_are_the_layers(self, n, layers, h, dtype, monkeypatch):
        angles = random_angles((2,), n, layers, "tunable", dtype)
        X = torch.randn(2, n, 5, dtype=dtype)
        inputs = [tensor.requires_grad_() for tensor in (X, *angles)]
        G = torch.randn(2, n, 5, dtype=dtype)
        results = []
        for size in (0, h):
            monkeypatch.setattr(kernel, "block_size", lambda *_, size=size: size)
            Y = rotate(*inputs, layers=layers)
            results.append([Y, *torch.autograd.grad(Y, inputs, G)])
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() < 1e-12


class TestMatrices:
    @pytest.mark.parametrize(("n", "layers", "style"), MANY_LAYERS)
    @pytest.mark.parametrize("count", [0, 3, 20])  # on both sides of the size of the matrices
    def test_matrices_and_their_gradients(self, n, layers, style, count):
        (theta,) = random_angles((count,), n, layers, style, REAL)
        W = [explicit(n, layers, style, theta[i]) for i in range(count)]
        theta.requires_grad_()

        def matrix(theta):
            return rotation_matrix(theta, n, layers=layers, style=style)

        assert matrix(theta).shape == (count, n, n)
        for mine, theirs in zip(matrix(theta), W, strict=True):
            assert (mine - theirs).abs().max() < 1e-13
        assert torch.autograd.gradcheck(matrix, theta, fast_mode=True)

    def test_parts_of_a_batch(self, monkeypatch):
        (theta,) = random_angles((3, 10), 5, 5, "tunable", REAL)
        theta.requires_grad_()
        G = torch.randn(3, 10, 5, 5, dtype=REAL)
        results = []
        for size in (2**18, 7 * 25):  # the last part is smaller
            monkeypatch.setattr(matrix_kernel, "_PART", size)
            W = rotation_matrix(theta, 5, layers=5)
            results.append([W, *torch.autograd.grad(W, theta, G)])
        for a, b in zip(*results, strict=True):
            assert (a - b).abs().max() < 1e-13


class TestAngles:
    @pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
    def test_n_layers_have_as_many_as_the_group_has_dimensions(self, n):
        assert Givens(n).rotations == n * (n - 1) // 2

    @pytest.mark.parametrize("style", ["tunable", "fft"])
    def test_zero_is_the_identity(self, style):
        chart = Givens(8, style=style)
        for dtype in (REAL, COMPLEX):
            originals = chart.empty_originals(dtype)
            zeros = [torch.zeros_like(o) for o in (originals if dtype.is_complex else [originals])]
            assert torch.equal(chart(*zeros), torch.eye(8, dtype=dtype))

    def test_an_fft_has_a_layer_for_each_bit(self):
        assert Givens(8, style="fft").layers == 3
        assert Givens(1, style="fft").layers == 1

    @pytest.mark.parametrize("n", [4, 6])
    @pytest.mark.parametrize("determinant", [1, -1])
    def test_a_random_target_is_reached_by_gradient_descent(self, n, determinant):
        chart = Givens(n)
        target = haar(n, dtype=REAL, determinant=determinant)
        chart.set_determinant(torch.tensor(determinant))
        best = math.inf
        for _ in range(5):  # other starts: the loss has saddles, where descent is slow
            theta = chart.starting_originals(REAL).requires_grad_()
            for _ in range(3000):
                loss = (chart(theta) - target).square().sum()
                (g,) = torch.autograd.grad(loss, theta)
                with torch.no_grad():
                    theta -= 0.2 * g
                if loss.detach() < 1e-13:
                    break
            best = min(best, float((chart(theta.detach()) - target).abs().max()))
            if best < 1e-6:
                break
        assert best < 1e-6

    def test_the_start_is_uniform_and_reproducible(self):
        chart = Givens(40, batch=(3,))
        draws = [
            chart.starting_originals(COMPLEX, generator=torch.Generator().manual_seed(1))
            for _ in "ab"
        ]
        for a, b in zip(*draws, strict=True):
            assert torch.equal(a, b)
            assert a.abs().max() <= math.pi
        assert abs(float(draws[0][0].square().mean()) - math.pi**2 / 3) < 0.3
        X = chart.start(COMPLEX, generator=torch.Generator().manual_seed(1))
        assert torch.equal(X, chart(*draws[0]))


class TestClements:
    def special(self, n):
        E = torch.eye(n, dtype=REAL)
        yield from (E, -E, E.flip(-1), E[torch.randperm(n)], E.roll(1, 0))
        yield torch.block_diag(*(haar(k, dtype=REAL) for k in (n // 2, n - n // 2)))

    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13])
    def test_special_matrices(self, n):
        chart = Givens(n)
        for X in self.special(n):
            chart.set_determinant(torch.linalg.det(X).sign())
            assert (chart(chart.right_inverse(X)) - X).abs().max() < 1e-14
            for Z in (X.to(COMPLEX), 1j * X):
                assert (chart(*chart.right_inverse(Z)) - Z).abs().max() < 1e-14

    @pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
    def test_large_and_batched(self, dtype):
        for n, batch in ((100, ()), (9, (2, 5))):
            chart = Givens(n, batch=batch)
            sign = None if dtype.is_complex else 1
            X = haar(n, n, batch, dtype=dtype, determinant=sign)
            before = X.clone()
            angles = clements_angles(X)
            assert torch.equal(X, before)
            assert (chart(*angles) - X).abs().max() < 1e-13
            assert all(angle.abs().max() <= math.pi for angle in angles)

    def test_further_layers_are_at_rest(self):
        chart = Givens(5, layers=8)
        X = haar(5, dtype=REAL, determinant=1)
        theta = chart.right_inverse(X)
        assert theta.shape == (16,)
        assert torch.equal(theta[10:], torch.zeros(6, dtype=REAL))
        assert (chart(theta) - X).abs().max() < 1e-14


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
    @pytest.mark.parametrize("size", [0, 16])
    def test_hundreds_of_layers_stay_orthonormal(self, dtype, size, monkeypatch):
        monkeypatch.setattr(kernel, "block_size", lambda *_: size)
        X = Givens(256).start(dtype)
        assert orthonormality_residual(X).max() < 0.5 * tolerance(dtype, 256, 256)


class TestRefusals:
    def test_options_that_do_not_go_together(self):
        with pytest.raises(ConfigurationError, match=r"power of 2, got n = 6.*tunable"):
            Givens(6, style="fft")
        with pytest.raises(UnknownNameError, match=r"unknown style 'brick'.*fft, tunable"):
            Givens(6, style="brick")
        for wrong in (0, -1, 2.0, True):
            with pytest.raises(ConfigurationError, match="layers= to be a whole number >= 1"):
                Givens(6, layers=wrong)
        with pytest.raises(ConfigurationError, match="square matrices only"):
            Givens(6, 3)

    @pytest.mark.parametrize("options", [{"layers": 3}, {"style": "fft"}])
    def test_a_given_matrix_with_the_remedy(self, options):
        layer = torch.nn.Linear(8, 8)
        with pytest.raises(RepresentationError, match=r"layers=8 and style='tunable'"):
            stiefel.orthogonal(layer, via="givens", init="keep", **options)
        with pytest.warns(UserWarning, match="takes its own start"):
            stiefel.orthogonal(layer, via="givens", determinant=-1, **options)
        assert torch.linalg.det(layer.weight).item() == pytest.approx(-1, abs=1e-5)


class TestThroughTheDoor:
    """Real coordinates of complex weights: the chart, not the leaf, says which field it is."""

    def unitary(self, **options):
        layer = torch.nn.Linear(4, 4, dtype=torch.complex64)
        X = haar(4, dtype=torch.complex64)
        with torch.no_grad():
            layer.weight.copy_(X)
        return stiefel.orthogonal(layer, via="givens", **options), X

    def test_a_complex_weight_is_kept(self):
        layer, X = self.unitary(init="keep")
        leaves = list(layer.parametrizations.weight.originals)
        assert [leaf.dtype for leaf in leaves] == 3 * [torch.float32]
        assert layer.weight.dtype == torch.complex64
        assert (layer.weight - X).abs().max() < 1e-5
        layer.weight = 1j * X
        assert (layer.weight - 1j * X).abs().max() < 1e-5

    def test_it_converts_and_comes_back(self):
        layer, X = self.unitary()
        for via in ("cwy", "rgd-c-c", "eurnn"):
            stiefel.convert(layer, via)
            assert layer.weight.dtype == torch.complex64
            assert (layer.weight - X).abs().max() < 1e-5
        stiefel.orthogonal(layer, via="cwy")
        assert layer.weight.dtype == torch.complex64
        assert (layer.weight - X).abs().max() < 1e-5

    def test_its_precision_follows_the_coordinates(self):
        layer, X = self.unitary()
        layer.double()
        assert layer.weight.dtype == COMPLEX
        assert orthonormality_residual(layer.weight) < 1e-13
        assert (layer.weight - X).abs().max() < 1e-5

    def test_a_checkpoint_without_metadata_is_read(self):
        (layer, X), (other, _) = self.unitary(), self.unitary()
        other.load_state_dict(dict(layer.state_dict().items()))
        assert (other.weight - X).abs().max() < 1e-5

    def test_short_form(self):
        layer = stiefel.orthogonal(torch.nn.Linear(6, 6), via="eurnn", layers=2, init="chart")
        (constraint,) = stiefel.constraints(layer)
        assert constraint.via == "givens"
        assert constraint.leaves[0].shape == (5,)


class TestOperator:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
    def test_few_layers_of_a_large_matrix_are_not_formed(self, dtype):
        chart = Givens(1024, layers=3)
        originals = chart.starting_originals(dtype)
        originals = originals if dtype.is_complex else (originals,)
        chart.set_determinant(torch.tensor(-1))
        op, X = chart.operator(*originals), chart(*originals)
        assert isinstance(op, Rotations)
        assert op.dtype == dtype
        assert (op.to_dense() - X).abs().max() < 1e-5
        h = torch.randn(2, 3, 1024, dtype=dtype)
        assert (h @ op.mT - h @ X.mT).abs().max() < 1e-4
        assert (h @ op - h @ X).abs().max() < 1e-4

    def test_elsewhere_the_weight_is_formed(self):
        for chart in (Givens(64, layers=1), Givens(1024, layers=17)):
            assert isinstance(chart.operator(chart.starting_originals(torch.float32)), Dense)
