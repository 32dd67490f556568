"""Models with orthogonal weights: recurrent networks, layers and an adapter."""

from stiefel.models.activations import NONLINEARITIES, ModReLU, activate, modrelu
from stiefel.models.adapter import HouseholderAdapter
from stiefel.models.conv_lstm import ConvLSTM, ConvLSTMLayer
from stiefel.models.conv_neru import ConvNERU, ConvNERULayer
from stiefel.models.convolution import SameConv2d, box_
from stiefel.models.layer import RecurrentLayer
from stiefel.models.layers import OrthogonalConv2d, OrthogonalLinear
from stiefel.models.recurrent import OrthogonalRNN
from stiefel.models.rollout import rollout
from stiefel.models.sequence import SequenceModel

__all__ = [
    "NONLINEARITIES",
    "ConvLSTM",
    "ConvLSTMLayer",
    "ConvNERU",
    "ConvNERULayer",
    "HouseholderAdapter",
    "ModReLU",
    "OrthogonalConv2d",
    "OrthogonalLinear",
    "OrthogonalRNN",
    "RecurrentLayer",
    "SameConv2d",
    "SequenceModel",
    "activate",
    "box_",
    "modrelu",
    "rollout",
]
