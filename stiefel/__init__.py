"""Orthogonal, unitary and orthonormal-column weights for PyTorch."""

__version__ = "0.1.0"
