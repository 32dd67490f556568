"""Pure functions on batches of matrices ``(..., n, p)`` with n >= p, real or complex.

Projections, metrics, retractions, transports, exponentials, sampling and residuals. Nothing here
keeps state, works in place, or knows about modules and optimizers.
"""

from stiefel.geometry.cayley_map import cayley_coordinates, cayley_map
from stiefel.geometry.descent import DESCENTS, cayley_descent, cholesky_qr_descent
from stiefel.geometry.dimension import manifold_dimension
from stiefel.geometry.distances import LOGARITHMS, canonical_distance, euclidean_distance
from stiefel.geometry.exponential_products import exponential_of_coordinates, skew_exponential
from stiefel.geometry.exponentials import (
    EXPONENTIALS,
    canonical_exponential,
    euclidean_exponential,
)
from stiefel.geometry.factors import cholesky_qr_factor, polar_factor, qr_factor
from stiefel.geometry.frame_exponential import frame_exponential
from stiefel.geometry.guard import check_point_shape
from stiefel.geometry.hessians import HESSIANS, canonical_hessian, euclidean_hessian
from stiefel.geometry.inverse_root import gram_polar_factor
from stiefel.geometry.logarithms import canonical_logarithm, unitary_logarithm
from stiefel.geometry.metrics import (
    canonical_gradient,
    canonical_inner,
    euclidean_gradient,
    euclidean_inner,
)
from stiefel.geometry.newton_schulz import newton_schulz_factor
from stiefel.geometry.polish import polish
from stiefel.geometry.product import product
from stiefel.geometry.realify import realify, realify_vector
from stiefel.geometry.residuals import orthonormality_residual, tangency_residual
from stiefel.geometry.retractions import (
    RETRACTIONS,
    cayley_retraction,
    cholesky_qr_retraction,
    polar_retraction,
    qr_retraction,
)
from stiefel.geometry.sampling import haar, with_determinant
from stiefel.geometry.shooting import euclidean_logarithm
from stiefel.geometry.tangent import random_tangent, skew, sym, tangent_projection
from stiefel.geometry.transports import cayley_transport, projection_transport

__all__ = [
    "DESCENTS",
    "EXPONENTIALS",
    "HESSIANS",
    "LOGARITHMS",
    "RETRACTIONS",
    "canonical_distance",
    "canonical_exponential",
    "canonical_gradient",
    "canonical_hessian",
    "canonical_inner",
    "canonical_logarithm",
    "cayley_coordinates",
    "cayley_descent",
    "cayley_map",
    "cayley_retraction",
    "cayley_transport",
    "check_point_shape",
    "cholesky_qr_descent",
    "cholesky_qr_factor",
    "cholesky_qr_retraction",
    "euclidean_distance",
    "euclidean_exponential",
    "euclidean_gradient",
    "euclidean_hessian",
    "euclidean_inner",
    "euclidean_logarithm",
    "exponential_of_coordinates",
    "frame_exponential",
    "gram_polar_factor",
    "haar",
    "manifold_dimension",
    "newton_schulz_factor",
    "orthonormality_residual",
    "polar_factor",
    "polar_retraction",
    "polish",
    "product",
    "projection_transport",
    "qr_factor",
    "qr_retraction",
    "random_tangent",
    "realify",
    "realify_vector",
    "skew",
    "skew_exponential",
    "sym",
    "tangency_residual",
    "tangent_projection",
    "unitary_logarithm",
    "with_determinant",
]
