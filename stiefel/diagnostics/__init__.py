"""Is the implementation right, is the weight on the manifold, is training at a stationary point?"""

from stiefel.diagnostics.report import Curve, Finding, Report

__all__ = ["Curve", "Finding", "Report"]
