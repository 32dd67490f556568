"""Timings and laws of `stiefel` beside its peers, one file per question.

``python -m benchmarks --list`` names the questions, ``python -m benchmarks NAME`` answers one.
What is compared and how is told in ``docs/benchmarks.md``.
"""
