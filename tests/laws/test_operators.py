"""Laws of the matrix-free operators: each is its dense form."""

from __future__ import annotations

import pytest
import torch

from stiefel.errors import ShapeError
from stiefel.operators import Operator
from tests.registry import DTYPES, OPERATOR_DTYPES, OPERATORS

BOUND = {torch.float32: 1e-4, torch.float64: 1e-12, torch.complex128: 1e-12}
CASES = [(name, dtype) for name in OPERATORS for dtype in OPERATOR_DTYPES.get(name, DTYPES)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name}-{d}" for name, d in CASES])
class TestProducts:
    def test_are_those_of_the_dense_form(self, name, dtype, device):
        op = OPERATORS[name](dtype, device)
        M, bound = op.to_dense(), BOUND[dtype]
        assert isinstance(op, Operator)
        assert M.shape == op.shape
        assert M.dtype == op.dtype == dtype
        *_, n, p = op.shape
        columns = torch.randn(2, p, 4, dtype=dtype, device=device)
        rows = torch.randn(2, 3, n, dtype=dtype, device=device)
        assert (op @ columns - M @ columns).abs().max() < bound
        assert (rows @ op - rows @ M).abs().max() < bound

    def test_transpose(self, name, dtype, device):
        op = OPERATORS[name](dtype, device)
        M, bound = op.to_dense(), BOUND[dtype]
        assert op.mT.shape == M.mT.shape
        assert torch.equal(op.mT.to_dense(), M.mT)
        assert torch.equal(op.mT.mT.to_dense(), M)
        h = torch.randn(2, 3, op.shape[-1], dtype=dtype, device=device)
        assert (h @ op.mT - h @ M.mT).abs().max() < bound

    def test_wrong_sizes_are_refused(self, name, dtype, device):
        op = OPERATORS[name](dtype, device)
        with pytest.raises(ShapeError):
            op @ torch.randn(2, 7, 1, dtype=dtype, device=device)
