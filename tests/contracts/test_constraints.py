"""`constraints`, `convert`, `attach`, `release`: the abstraction over how a weight is trained."""

from __future__ import annotations

import copy
import itertools

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel import geometry
from stiefel.errors import ConfigurationError, LostManifoldError, RebaseError, RepresentationError
from stiefel.operators import CompactWY, Dense
from stiefel.parametrizations import CWY
from tests.square_layers import RightTranslated, square


class TestConstraints:
    def test_recursive_with_paths(self):
        model = nn.Sequential(square(), nn.Sequential(nn.Linear(2, 2), square("rgd-c-c")))
        found = list(stiefel.constraints(model))
        assert [(c.path, c.via) for c in found] == [
            ("0.weight", "cwy"),
            ("1.1.weight", "riemannian"),
        ]
        assert found[1].manifold == stiefel.Stiefel("canonical", "cayley")
        assert found[0].point.requires_grad is False
        assert [len(c.leaves) for c in found] == [1, 1]

    def test_bare_manifold_parameters_of_both_libraries(self):
        model = nn.Module()
        model.ours = stiefel.ManifoldParameter(torch.eye(4, 2))
        model.theirs = geoopt.ManifoldParameter(torch.eye(3, 2), manifold=geoopt.EuclideanStiefel())
        found = {c.name: c for c in stiefel.constraints(model)}
        assert set(found) == {"ours", "theirs"}
        assert found["theirs"].manifold is model.theirs.manifold
        found["ours"].assign(2 * torch.eye(4, 2))
        assert torch.allclose(model.ours, torch.eye(4, 2))

    def test_a_module_used_twice_is_one_constraint(self):
        layer = square()
        model = nn.ModuleDict({"a": layer, "b": layer})
        (c,) = stiefel.constraints(model)
        assert c.owners == ((layer, "weight"),)

    def test_tied_leaves_are_one_constraint_with_two_owners(self):
        shared = stiefel.ManifoldParameter(torch.eye(4, 2))
        a, b = nn.Module(), nn.Module()
        a.W = b.V = shared
        model = nn.ModuleList([a, b])
        (c,) = stiefel.constraints(model)
        assert c.owners == ((a, "W"), (b, "V"))
        stiefel.convert(model, "tcwy")
        assert torch.equal(a.W, b.V)
        assert len(list(model.parameters())) == 1
        stiefel.release(model)
        assert a.W is b.V
        assert type(a.W) is nn.Parameter

    def test_is_frozen(self):
        (c,) = stiefel.constraints(square())
        with pytest.raises(AttributeError):
            c.name = "other"


class TestConvert:
    @pytest.mark.parametrize(
        "pair", list(itertools.permutations(["cwy", "rgd-c-c", "tcwy", "rgd-e-qr"], 2))
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
    def test_keeps_point_and_output(self, pair, dtype):
        model = stiefel.orthogonal(nn.Linear(4, 7, dtype=dtype), via=pair[0])
        x = torch.randn(3, 4, dtype=dtype)
        expected, y = model.weight.detach().clone(), model(x)
        stiefel.convert(model, pair[1])
        bound = 1e-6 if dtype == torch.float32 else 1e-12
        assert (model.weight - expected).abs().max() < bound
        assert (model(x) - y).abs().max() < 10 * bound

    def test_on_meta(self):
        with torch.device("meta"):
            layer = stiefel.orthogonal(nn.Linear(4, 4))
        stiefel.convert(layer, "rgd-c-c")
        source = stiefel.orthogonal(nn.Linear(4, 4), via="rgd-c-c")
        layer.load_state_dict(source.state_dict(), assign=True)
        assert torch.equal(layer.weight, source.weight)

    def test_one_weight_by_name(self):
        model = nn.Sequential(square(), square())
        stiefel.convert(model, "rgd-c-qr", name="1.weight")
        assert [c.via for c in stiefel.constraints(model)] == ["cwy", "riemannian"]
        with pytest.raises(ConfigurationError, match=r"0\.weight, 1\.weight"):
            stiefel.convert(model, "cwy", name="2.weight")

    def test_all_or_nothing(self):
        model = nn.Sequential(square("rgd-c-c"), square("rgd-c-c"))
        next(stiefel.constraints(model)).assign(
            CWY(4, reflections=1)(torch.randn(4, 1, dtype=torch.float64)).detach()
        )
        with pytest.raises(RepresentationError, match="rank"):
            stiefel.convert(model, "cwy", reflections=1)
        assert [c.via for c in stiefel.constraints(model)] == ["riemannian"] * 2

    def test_plain_torch_optimizer_takes_the_new_leaves(self):
        model = nn.Sequential(square("cwy"), nn.Linear(4, 2, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        old = next(stiefel.constraints(model)).leaves[0]
        stiefel.convert(model, CWY(4), optimizer=optimizer)
        new = next(stiefel.constraints(model)).leaves[0]
        held = [p for g in optimizer.param_groups for p in g["params"]]
        assert any(p is new for p in held)
        assert not any(p is old for p in held)
        assert old not in optimizer.state
        before = model[0].weight.detach().clone()
        model(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert not torch.allclose(model[0].weight, before)
        with pytest.raises(ConfigurationError, match=r"optim\.build"):
            stiefel.convert(model, "rgd-c-c", optimizer=optimizer)
        assert next(stiefel.constraints(model)).via == "cwy"

    @pytest.mark.parametrize("pair", list(itertools.permutations(["cwy", "rgd-c-c"], 2)))
    def test_built_optimizer_goes_on_training(self, pair):
        model = nn.Sequential(square(pair[0]), nn.Linear(4, 2, dtype=torch.float64))
        optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
        x = torch.randn(16, 4, dtype=torch.float64)

        def step():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            optimizer.step()
            return loss.item()

        step()
        stiefel.convert(model, pair[1], optimizer=optimizer)
        first = step()
        before = model[0].weight.detach().clone()
        assert [step() for _ in range(20)][-1] < first
        assert not torch.allclose(model[0].weight, before)
        assert geometry.orthonormality_residual(model[0].weight) < 1e-12


class TestRelease:
    @pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
    def test_plain_parameters_with_todays_values(self, via):
        model = nn.Sequential(square(via), stiefel.orthogonal(nn.Conv1d(2, 3, 3), via=via))
        expected = [model[0].weight.detach().clone(), model[1].weight.detach().clone()]
        assert stiefel.release(model) is model
        assert type(model[0]) is nn.Linear
        assert not list(stiefel.constraints(model))
        for layer, W in zip(model, expected, strict=True):
            assert type(layer.weight) is nn.Parameter
            assert torch.equal(layer.weight, W)
            assert set(layer.state_dict()) == {"weight", "bias"}


class TestRebasing:
    def test_cwy_rebase_keeps_the_weight_and_moves_the_moments(self):
        layer = square()
        (c,) = stiefel.constraints(layer)
        (V,) = c.leaves
        with torch.no_grad():
            V.mul_(torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64))
        optimizer = torch.optim.Adam(layer.parameters())
        layer.weight.square().sin().sum().backward()
        optimizer.step()
        W, norms = layer.weight.detach().clone(), V.detach().norm(dim=0)
        m = optimizer.state[V]["exp_avg"].clone()
        c.rebase(optimizer)
        assert (layer.weight - W).abs().max() < 1e-14
        assert (V.norm(dim=0) - 1).abs().max() < 1e-14
        assert torch.allclose(optimizer.state[V]["exp_avg"], m * norms)

    def test_a_schedule_nobody_keeps_raises_once(self):
        layer = square(RightTranslated(4))
        x = torch.randn(2, 4, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(5):
                layer(x)
        layer(x), layer(x)
        with pytest.raises(RebaseError, match=r"every 2 .*build.*attach"):
            layer(x)
        layer(x)

    @pytest.mark.parametrize("how", ["attach", "build"])
    def test_the_schedule_is_kept(self, how):
        layer = square(RightTranslated(4))
        if how == "attach":
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
            stiefel.attach(layer, optimizer)
        else:
            optimizer = stiefel.optim.build(layer, lr=0.1, optimizer="sgd")
        chart = layer.parametrizations.weight[0]
        bases = []
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.randn(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            bases.append(chart.base.clone())
        moved = [not torch.equal(a, b) for a, b in itertools.pairwise(bases)]
        assert moved == [True, False, True, False]
        assert geometry.orthonormality_residual(layer.weight) < 1e-12

    def test_attach_checks_the_leaves(self):
        layer = nn.Linear(4, 4)
        early = torch.optim.SGD(layer.parameters(), lr=0.1)
        stiefel.orthogonal(layer)
        with pytest.raises(ConfigurationError, match=r"after stiefel\.orthogonal"):
            stiefel.attach(layer, early)
        stiefel.convert(layer, "rgd-c-c")
        with pytest.raises(ConfigurationError, match=r"off its manifold.*build"):
            stiefel.attach(layer, torch.optim.Adam(layer.parameters()))


def test_a_leaf_that_lost_its_manifold_is_reported():
    layer = square("rgd-c-c")
    plain = nn.Parameter(layer.parametrizations.weight.original.detach().clone())
    layer.parametrizations.weight.original = plain
    with pytest.raises(LostManifoldError, match="weight"):
        next(stiefel.constraints(layer)).check()
    with pytest.raises(LostManifoldError):
        stiefel.optim.build(layer, lr=0.1)


class TestOperator:
    @pytest.mark.parametrize("via", ["cwy", "tcwy", "rgd-c-c"])
    @pytest.mark.parametrize("shape", [(7, 2), (2, 7)])
    def test_is_the_weight(self, via, shape):
        layer = stiefel.orthogonal(nn.Linear(shape[1], shape[0], dtype=torch.float64), via=via)
        op = stiefel.operator(layer)
        assert tuple(op.shape) == shape
        assert (op.to_dense() - layer.weight).abs().max() < 1e-13
        h = torch.randn(3, shape[1], dtype=torch.float64)
        assert (h @ op.mT - h @ layer.weight.mT).abs().max() < 1e-13

    def test_is_matrix_free_for_few_reflections(self):
        with pytest.warns(UserWarning, match="rank"):
            layer = square(n=16, reflections=2)
        assert isinstance(stiefel.operator(layer), CompactWY)
        assert isinstance(stiefel.operator(square(n=16)), Dense)

    def test_of_a_plain_weight(self):
        layer = nn.Linear(3, 2)
        assert stiefel.operator(layer).to_dense() is layer.weight
        with pytest.raises(ConfigurationError, match="weights"):
            stiefel.operator(layer, "weights")


def test_deepcopied_models_have_constraints_of_their_own():
    model = nn.Sequential(square(), square("rgd-c-c"))
    twin = copy.deepcopy(model)
    ours = {id(leaf) for c in stiefel.constraints(model) for leaf in c.leaves}
    theirs = {id(leaf) for c in stiefel.constraints(twin) for leaf in c.leaves}
    assert len(ours) == len(theirs) == 2
    assert not ours & theirs


def test_releasing_a_copy_leaves_the_original_constrained():
    layer = square()
    twin = copy.deepcopy(layer)
    stiefel.release(twin)
    assert type(twin) is nn.Linear
    assert torch.equal(layer.weight, twin.weight)
    assert next(stiefel.constraints(layer)).via == "cwy"
    other = copy.deepcopy(layer)
    stiefel.release(layer)
    assert torch.equal(other.weight, layer.weight)
