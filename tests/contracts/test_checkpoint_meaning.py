"""A checkpoint whose coordinates would mean another weight is refused before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stiefel


def constrained(rows, columns, via, dtype=torch.float32, **options):
    linear = nn.Linear(columns, rows, dtype=dtype)
    return stiefel.orthogonal(linear, via=via, init="chart", **options).eval()


def assert_refused(model, state, match, strict):
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=match):
        model.load_state_dict(state, strict=strict)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("shape", "source", "target", "match"),
    [
        ((6, 6), ("cayley", {"negative": 2}), ("cayley", {"negative": 4}), "negative=2.*negative"),
        ((6, 6), ("cayley", {}), ("cayley", {"rebase_every": 1}), "base=False.*base=True"),
        ((6, 6), ("cayley", {"rebase_every": 1}), ("cayley", {}), "base=True.*base=False"),
        ((6, 6), ("exprnn", {}), ("dtriv", {}), "base=False.*base=True"),
        ((6, 6), ("dtriv", {}), ("exprnn", {}), "base=True.*base=False"),
        ((6, 3), ("own", {}), ("own", {"center": True}), "center=False.*center=True"),
    ],
)
def test_other_options(shape, source, target, match, strict):
    rows, columns = shape
    state = constrained(rows, columns, source[0], **source[1]).state_dict()
    assert_refused(constrained(rows, columns, target[0], **target[1]), state, match, strict)


def test_options_that_change_nothing_do_not_matter():
    source = constrained(6, 6, "cayley", negative=2, rebase_every=1)
    target = constrained(6, 6, "cayley", negative=4, rebase_every=3)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.weight, target.weight)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("via", "buffer"),
    [("cwy", "flip"), ("cayley", "flip"), ("matrix_exp", "base"), ("dtriv", "rebases")],
)
def test_a_plain_dict_without_a_buffer_of_the_chart(via, buffer, strict):
    state = dict(constrained(6, 6, via).state_dict())
    del state[f"parametrizations.weight.0.{buffer}"]
    assert_refused(constrained(6, 6, via), state, f"no parametrizations.weight.0.{buffer}", strict)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize(
    ("via", "options"), [("cayley", {"rebase_every": 2}), ("matrix_exp", {}), ("dtriv", {})]
)
def test_a_base_in_16_bits_is_brought_back_to_the_manifold(via, options, assign, low):
    state = {
        key: value.to(low) if value.is_floating_point() else value
        for key, value in constrained(6, 6, via, **options).state_dict().items()
    }
    model = constrained(6, 6, via, weight_dtype=torch.float32, **options)
    model.load_state_dict(state, assign=assign)
    weight = model.weight
    assert weight.dtype == torch.float32
    bound = stiefel.tolerance(torch.float32, 6, 6)
    assert stiefel.geometry.orthonormality_residual(weight) < bound


@pytest.mark.parametrize("via", ["cwy", "cayley", "givens", "matrix_exp", "own", "rgd-c-c"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_coordinates_that_are_not_finite(via, value):
    state = constrained(4, 4, via).state_dict()
    key = "parametrizations.weight.original"
    state[key] = torch.full_like(state[key], value)
    assert_refused(constrained(4, 4, via), state, r"NaN or an infinity|not finite|off the", True)


@pytest.mark.parametrize(
    "options", [{"via": "cayley", "rebase_every": 9}, {"via": "rgd-c-c"}, {"via": "matrix_exp"}]
)
def test_a_checkpoint_of_torchs_own_orthogonal_is_refused_with_the_way(options):
    """Its keys are ours and its coordinates are not."""
    theirs = torch.nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley")
    layer = stiefel.orthogonal(nn.Linear(4, 4), **options)
    W = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"another parametrization.*remove_parametrizations"):
        layer.load_state_dict(theirs.state_dict(), strict=False)
    assert torch.equal(layer.weight, W)
    nn.utils.parametrize.remove_parametrizations(theirs, "weight")
    stiefel.orthogonal(theirs, **options)
    layer.load_state_dict(theirs.state_dict())
    assert torch.equal(layer.weight, theirs.weight)


@pytest.mark.parametrize("via", ["matrix_exp", "cwy"])
@pytest.mark.parametrize("wrong", ["missing", "of another shape"])
def test_coordinates_that_do_not_come_leave_the_chart_as_it_is(via, wrong):
    """A base without its coordinates, or the flip, would be another weight."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)]
    for layer, sign in zip(layers, (-1, 1), strict=True):
        stiefel.orthogonal(layer, via=via, init="haar", determinant=sign)
        layer.parametrizations.weight.determinant = None
    source, target = layers
    state, before = source.state_dict(), target.weight.detach().clone()
    coordinates = state.pop("parametrizations.weight.original")
    if wrong == "missing":
        assert target.load_state_dict(state, strict=False).missing_keys
    else:
        state["parametrizations.weight.original"] = coordinates[:, :3]
        with pytest.raises(RuntimeError, match="size mismatch"):
            target.load_state_dict(state)
    assert torch.equal(target.weight, before)
