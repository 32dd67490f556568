"""What the diagnostics measure, the slow way: plain weights, bases of tangent spaces, numpy."""

from __future__ import annotations

import copy
import math

import numpy as np

import stiefel
from stiefel.numerics import double_dtype


def real_columns(A):
    """Matrices (k, n, p), real or complex, as real columns."""
    flat = A.reshape(len(A), -1)
    return np.concatenate([flat.real, flat.imag], axis=1).T if np.iscomplexobj(A) else flat.T


def tangent_basis(X):
    """An orthonormal basis (d, n, p) of {u : X^H u + u^H X = 0}: the null space of that map."""
    n, p = X.shape
    units = np.eye(n * p).reshape(n * p, n, p)
    if np.iscomplexobj(X):
        units = np.concatenate([units, 1j * units])
    S = np.einsum("ji,kjl->kil", X.conj(), units)
    constraint = real_columns(S + S.conj().transpose(0, 2, 1))
    _, sigma, V = np.linalg.svd(constraint)
    rank = int((sigma > 1e-9).sum())
    return np.einsum("dk,kij->dij", V[rank:], units)


def slow_figures(X, G):
    """The figures of single matrices, as lengths of coordinates in a basis of tangent vectors."""
    X, G = X.numpy(), G.numpy()
    n, p = X.shape
    basis = tangent_basis(X)
    dual = np.array([np.vdot(u, G).real for u in basis])  # the derivative along each of them
    M = np.eye(n) - X @ X.conj().T / 2
    metric = np.array([[np.vdot(u, M @ v).real for v in basis] for u in basis])
    D = np.zeros_like(G)
    for a in range(p):  # D = G - X G^H X, column by column
        D[:, a] = G[:, a] - sum(X[:, b] * np.vdot(G[:, b], X[:, a]) for b in range(p))
    L = X.conj().T @ G
    canonical = dual @ np.linalg.pinv(metric) @ dual if len(basis) else 0.0
    return {
        "euclidean_norm": math.sqrt(dual @ dual),
        "canonical_norm": math.sqrt(canonical),
        "kkt_residual": np.linalg.norm(D),
        "symmetry_residual": np.linalg.norm(L - L.conj().T) / 2,
        "gradient_norm": np.linalg.norm(G),
    }


def batch_figures(X, G):
    """The figures of a batch: roots of sums of squares."""
    pairs = zip(X.reshape(-1, *X.shape[-2:]), G.reshape(-1, *G.shape[-2:]), strict=True)
    rows = [slow_figures(x, g) for x, g in pairs]
    figures = {key: math.sqrt(sum(row[key] ** 2 for row in rows)) for key in rows[0]}
    figures["relative"] = figures["euclidean_norm"] / figures["gradient_norm"]
    return figures


def plain_gradients(model, loss):
    """X and dL/dX by path, from a copy whose weights are plain parameters W = view(X)."""
    plain = stiefel.release(copy.deepcopy(model))
    weights = {}
    for each in stiefel.constraints(model):
        owner = plain.get_submodule(each.path.rpartition(".")[0])
        weights[each.path] = owner._parameters[each.name]
    loss(plain).backward()
    found = {}
    for each in stiefel.constraints(model):
        W = weights[each.path]
        X = each.point.detach().clone().requires_grad_()
        view = (lambda X: X) if each.storage is None else each.storage.view
        inner = (W.grad.conj() * view(X)).sum()  # Re <G_W, view(X)>: the view is linear
        (inner.real if inner.is_complex() else inner).backward()
        kind = double_dtype(X.dtype)
        found[each.path] = (X.detach().to(kind), X.grad.to(kind))
    return found


def assert_figures(found, X, G, tolerance=1e-9):
    """Compares a `Stationarity` with the slow figures, relative to |G|."""
    assert found.missing is None
    for key, value in batch_figures(X, G).items():
        scale = 1.0 if key == "relative" else max(float(G.norm()), 1e-300)
        assert abs(getattr(found, key) - value) <= tolerance * scale, (key, value, found)
