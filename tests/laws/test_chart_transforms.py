"""What torch does to functions, done to every chart: transforms, second derivatives, graphs."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import DoubleBackwardError, ForwardModeError
from tests.chart_cases import SOME, every, every_double, over, random_originals
from tests.registry import DOUBLE


def plain_loss(chart):
    """A loss whose gradient depends on everything: sum |sin-like map of the weight|."""
    G = torch.linspace(-1, 1.5, chart.n * chart.p, dtype=torch.float64)
    G = G.reshape(chart.n, chart.p)

    def loss(*originals):
        X = chart(*originals)
        return (X.abs().square() * G.square().to(X.device)).sum() + (X.real * G.to(X.device)).sum()

    return loss


@every_double
def test_functional_gradients_and_vmap(case, shape, dtype, device):
    chart = case.make(((), *shape[1:])).to(device)
    loss = plain_loss(chart)
    batch = [random_originals(chart, dtype, device) for _ in range(3)]
    stacked = tuple(torch.stack(o) for o in zip(*batch, strict=True))
    indices = tuple(range(len(stacked)))
    mapped = torch.vmap(chart)(*stacked)
    gradients = torch.vmap(torch.func.grad(loss, argnums=indices))(*stacked)
    swapped = torch.vmap(chart, in_dims=-1)(*(o.movedim(0, -1) for o in stacked))
    torch.testing.assert_close(swapped, mapped)
    for i, one in enumerate(batch):
        torch.testing.assert_close(mapped[i], chart(*one))
        alone = torch.func.grad(loss, argnums=indices)(*one)
        leaves = tuple(o.clone().requires_grad_() for o in one)
        reverse = torch.autograd.grad(loss(*leaves), leaves)
        for a, b, c in zip(gradients, alone, reverse, strict=True):
            torch.testing.assert_close(a[i], b)
            torch.testing.assert_close(b, c)


@every
def test_functional_jacobian(case, shape, device):
    chart = case.make(shape).to(device)
    dtype = torch.float64 if torch.float64 in case.dtypes else torch.complex128
    originals = random_originals(chart, dtype, device)
    kinds = [original.is_complex() for original in originals]
    parts = tuple(torch.view_as_real(o).clone() if o.is_complex() else o for o in originals)

    def real_parts(*parts):  # jacrev takes and gives real tensors only
        X = chart(
            *(torch.view_as_complex(o) if c else o for o, c in zip(parts, kinds, strict=True))
        )
        return torch.view_as_real(X) if X.is_complex() else X

    indices = tuple(range(len(parts)))
    jacobian = torch.func.jacrev(real_parts, argnums=indices)(*parts)
    reference = torch.autograd.functional.jacobian(real_parts, parts)
    torch.testing.assert_close(jacobian, reference)


@every_double
def test_double_backward_is_right_or_a_clear_error(case, shape, dtype, device):
    chart = case.make(shape).to(device)
    originals = tuple(o.requires_grad_() for o in random_originals(chart, dtype, device))
    for loss in (lambda X: X.real.sum(), lambda X: (X.abs().square() * X.real).sum()):
        g = torch.autograd.grad(loss(chart(*originals)), originals, create_graph=True)
        try:
            sum(h.abs().square().sum() for h in g).backward()
        except DoubleBackwardError:  # its text is the kernel's own
            continue
        assert torch.autograd.gradgradcheck(chart, originals, fast_mode=True)


def forward_modes(f, originals, tangents):
    """Four ways to ask torch for the derivative of f along tangents in forward mode."""

    def dual():
        with torch.autograd.forward_ad.dual_level():
            pairs = zip(originals, tangents, strict=True)
            X = f(*(torch.autograd.forward_ad.make_dual(o, t) for o, t in pairs))
            return torch.autograd.forward_ad.unpack_dual(X).tangent

    def mapped():
        rows = tuple(t.unsqueeze(0) for t in tangents)
        push = torch.vmap(lambda *t: torch.func.jvp(f, originals, t)[1])
        return push(*rows)[0]

    def within():
        lifted = (tuple(x.unsqueeze(0) for x in xs) for xs in (originals, tangents))
        return torch.func.jvp(torch.vmap(f), *lifted)[1][0]

    return [lambda: torch.func.jvp(f, originals, tangents)[1], dual, mapped, within]


@every_double
def test_forward_mode_is_right_or_a_clear_error(case, shape, dtype, device):
    chart = case.make(shape).to(device)
    originals = random_originals(chart, dtype, device)
    tangents = tuple(torch.randn_like(o) for o in originals)
    ahead, behind = (
        chart(*(o + s * t for o, t in zip(originals, tangents, strict=True))) for s in (1e-6, -1e-6)
    )
    said = "reverse mode.*forward mode.*vjp.*via='riemannian'"
    for derivative in forward_modes(chart, originals, tangents):
        try:
            found = derivative()
        except NotImplementedError:
            with pytest.raises(ForwardModeError, match=said):
                derivative()
        else:
            torch.testing.assert_close(found, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-6)


# Tracing an autograd.Function, torch instantiates one itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@over(SOME, *DOUBLE)
def test_compiles_to_one_graph(case, shape, dtype, device):
    chart = case.make(shape).to(device)
    one, two = (
        tuple(o.requires_grad_() for o in random_originals(chart, dtype, device)) for _ in "ab"
    )
    torch.compiler.reset()
    compiled = torch.compile(lambda *o: chart(*o) * 2, fullgraph=True, backend="aot_eager")
    for originals in (one, two):
        X, Y = compiled(*originals), chart(*originals) * 2
        G = torch.randn_like(Y)
        torch.testing.assert_close(X, Y)
        torch.testing.assert_close(
            torch.autograd.grad(X, originals, G), torch.autograd.grad(Y, originals, G)
        )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*one), chart(*one) * 2)


@over(SOME, *DOUBLE)
def test_exports(case, shape, dtype, device):
    chart = case.make(shape).to(device)
    originals = random_originals(chart, dtype, device)
    program = torch.export.export(chart, originals)
    torch.testing.assert_close(program.module()(*originals), chart(*originals))
