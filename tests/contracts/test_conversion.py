"""Conversion, attachment and constraining again: refused or done whole, never by halves."""

from __future__ import annotations

import copy

import geoopt
import pytest
import torch
from torch import nn

import stiefel
from stiefel.errors import ConfigurationError, RebaseError
from stiefel.parametrizations import CWY
from tests.square_layers import RightTranslated, square


class TestOtherManifolds:
    def sphere(self):
        model = nn.Module()
        data = nn.functional.normalize(torch.randn(5, 3, dtype=torch.float64), dim=-1)
        model.S = geoopt.ManifoldParameter(data, manifold=geoopt.Sphere())
        return model

    def test_assign_projects_by_the_manifold_of_the_leaf(self):
        model = self.sphere()
        next(stiefel.constraints(model)).assign(3 * torch.randn(5, 3, dtype=torch.float64))
        assert (model.S.norm(dim=-1) - 1).abs().max() < 1e-14

    def test_convert_refuses_what_has_no_chart(self):
        model = self.sphere()
        before = model.S.detach().clone()
        with pytest.raises(ConfigurationError, match="S is on Sphere"):
            stiefel.convert(model, "rgd-c-c")
        assert torch.equal(model.S, before)


class TestNothingToConvert:
    def test_a_model_of_ordinary_weights(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with pytest.raises(
            ConfigurationError,
            match=r"got Sequential with none.*0\.weight, 1\.weight\).*stiefel\.orthogonal\(layer",
        ):
            stiefel.convert(model, "cwy")
        with pytest.raises(ConfigurationError, match="constrained weights"):
            stiefel.convert(model, "cwy", name="0.weight")

    def test_a_model_without_matrices(self):
        with pytest.raises(ConfigurationError, match=r"got ReLU with none.*in it: none"):
            stiefel.convert(nn.ReLU(), "rgd-c-c", optimizer=None)

    def test_after_release(self):
        with pytest.raises(ConfigurationError, match="constrained weights"):
            stiefel.convert(stiefel.release(square()), "rgd-c-c")


class TestWrongOptimizers:
    def test_convert_refuses_an_optimizer_of_another_model(self):
        layer = square()
        foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        leaf = next(stiefel.constraints(layer)).leaves[0]
        with pytest.raises(ConfigurationError, match="not trained by the SGD"):
            stiefel.convert(layer, CWY(4), optimizer=foreign)
        assert next(stiefel.constraints(layer)).leaves[0] is leaf

    def test_attach_refuses_what_derives_from_torchs_optimizers(self):
        class Derived(torch.optim.SGD):
            pass

        layer = square("rgd-c-c")
        with pytest.raises(ConfigurationError, match="Derived would move"):
            stiefel.attach(layer, Derived(layer.parameters(), lr=0.1))
        stiefel.attach(layer, geoopt.optim.RiemannianAdam(layer.parameters(), lr=0.1))

    def test_attaching_twice_is_attaching_once(self):
        layer = square(RightTranslated(4))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        stiefel.attach(layer, optimizer)
        stiefel.attach(layer, optimizer)
        chart = layer.parametrizations.weight[0]
        bases = []
        for _ in range(3):
            layer(torch.randn(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            bases.append(chart.base.clone())
        assert not torch.equal(bases[0], bases[1])
        assert torch.equal(bases[1], bases[2])

    def test_a_copy_has_no_schedule_until_it_is_attached(self):
        layer = square(RightTranslated(4))
        stiefel.attach(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        twin = copy.deepcopy(layer)
        x = torch.randn(2, 4, dtype=torch.float64)
        twin(x), twin(x)
        with pytest.raises(RebaseError):
            twin(x)

    def test_a_refusal_half_way_changes_nothing(self):
        model = nn.Sequential(
            stiefel.orthogonal(nn.Linear(4, 4)), stiefel.orthogonal(nn.Linear(4, 4).bfloat16())
        )
        optimizer = stiefel.optim.build(model, lr=0.1)
        with pytest.raises(TypeError, match="float32 or better"):
            stiefel.convert(model, "rgd-c-c", optimizer=optimizer)
        assert [c.via for c in stiefel.constraints(model)] == ["cwy", "cwy"]
        optimizer.check()

    def test_scheduled_tensor_rates_are_each_their_own(self):
        model = nn.Sequential(square("cwy"), square("rgd-c-c"))
        optimizer = stiefel.optim.build(model, lr=torch.tensor(1.0))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        scheduler.step(1.0)
        scheduler.step(2.0)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([0.5, 0.05, 0.05])

    def test_state_of_another_model_is_refused_before_a_step(self):
        def trained(reflections):
            chart = CWY(4, reflections=reflections)
            layer = square(chart, init="chart")
            optimizer = stiefel.optim.build(layer, lr=0.1)
            layer(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
            return optimizer

        with pytest.raises(ConfigurationError, match=r"shape \(4, 2\).*\(4, 3\)"):
            trained(2).load_state_dict(trained(3).state_dict())


class TestGroups:
    def two_leaves(self):
        linear = nn.Linear(4, 4, bias=False, dtype=torch.complex128)
        return stiefel.orthogonal(linear, via="cwy")

    def test_new_leaves_join_one_group(self):
        layer = self.two_leaves()
        optimizer = torch.optim.SGD([{"params": [leaf]} for leaf in layer.parameters()], lr=0.1)
        assert len(optimizer.param_groups) > 1
        stiefel.convert(layer, "matrix_exp", optimizer=optimizer)
        held = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        assert [id(leaf) for leaf in held] == [id(leaf) for leaf in layer.parameters()]

    def test_names_of_leaves_that_are_gone_go_too(self):
        layer = self.two_leaves()
        optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1)
        stiefel.convert(layer, "matrix_exp", optimizer=optimizer)
        (group,) = optimizer.state_dict()["param_groups"]
        assert len(group.get("param_names", group["params"])) == len(group["params"])
        optimizer.load_state_dict(optimizer.state_dict())

    def test_a_group_that_refuses_a_leaf_refuses_before_anything_is_changed(self):
        model = nn.Sequential(square("rgd-c-c"), square("cwy"))
        groups = [{"params": [leaf]} for leaf in model.parameters()]
        groups[-1]["weight_decay"] = 0.1
        optimizer = stiefel.optim.RGD(groups, lr=0.1, euclidean="sgd")
        leaves = list(model.parameters())
        with pytest.raises(ConfigurationError, match="weight_decay=0"):
            stiefel.convert(model, "riemannian", optimizer=optimizer)
        assert all(a is b for a, b in zip(model.parameters(), leaves, strict=True))
        held = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        assert all(a is b for a, b in zip(held, leaves, strict=True))

    def test_lbfgs_holds_its_leaves_for_good(self):
        layer = square("cwy")
        leaves = list(layer.parameters())
        optimizer = torch.optim.LBFGS(layer.parameters())
        with pytest.raises(ConfigurationError, match=r"LBFGS .* make a new one"):
            stiefel.convert(layer, "matrix_exp", optimizer=optimizer)
        assert all(a is b for a, b in zip(layer.parameters(), leaves, strict=True))


class TestConstrainingAgain:
    def test_goes_on_from_the_point_with_its_view(self):
        cell = nn.LSTMCell(3, 5, dtype=torch.float64)
        stiefel.orthogonal(cell, "weight_hh", view=("blocks", 4))
        W = cell.weight_hh.detach().clone()
        stiefel.orthogonal(cell, "weight_hh", via="rgd-c-c")
        assert (cell.weight_hh - W).abs().max() < 1e-13
        assert next(stiefel.constraints(cell)).point.shape == (4, 5, 5)

    def test_does_not_round_through_the_emitted_dtype(self):
        layer = stiefel.orthogonal(nn.Linear(6, 6), weight_dtype=torch.bfloat16)
        storage = layer.parametrizations.weight
        X = storage.exact_point()
        assert layer.weight.dtype == torch.bfloat16
        for change in (
            lambda: stiefel.orthogonal(layer, via="rgd-c-c"),
            lambda: stiefel.convert(layer, "cwy"),
        ):
            change()
            assert layer.weight.dtype == torch.bfloat16
            assert (layer.parametrizations.weight.exact_point() - X).abs().max() < 1e-6

    def test_convert_keeps_the_projected_distance(self):
        layer = square()
        distance = next(stiefel.constraints(layer)).projected_distance
        assert distance > 0
        stiefel.convert(layer, "rgd-c-c")
        assert next(stiefel.constraints(layer)).projected_distance == distance
