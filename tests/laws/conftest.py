"""Shapes and dtypes that the geometric laws run over."""

from __future__ import annotations

import pytest

from tests.registry import DOUBLE, DTYPES, SHAPES


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=DOUBLE, ids=str)
def double(request):
    return request.param
