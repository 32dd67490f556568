"""Models with orthogonal weights: recurrent networks, and the recurrence they are made of."""

from stiefel.models.activations import NONLINEARITIES, ModReLU, activate, modrelu
from stiefel.models.layer import RecurrentLayer
from stiefel.models.recurrent import OrthogonalRNN
from stiefel.models.rollout import rollout
from stiefel.models.sequence import SequenceModel

__all__ = [
    "NONLINEARITIES",
    "ModReLU",
    "OrthogonalRNN",
    "RecurrentLayer",
    "SequenceModel",
    "activate",
    "modrelu",
    "rollout",
]
