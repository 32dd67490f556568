"""Models with orthogonal weights: recurrent networks, layers and an adapter."""

from stiefel.models.activations import NONLINEARITIES, ModReLU, activate, modrelu
from stiefel.models.adapter import HouseholderAdapter
from stiefel.models.asrnn import ASRNN, AdaptiveLayer
from stiefel.models.attention import AdditiveAttention
from stiefel.models.base import RecurrentNetwork
from stiefel.models.conv_lstm import ConvLSTM, ConvLSTMLayer
from stiefel.models.conv_neru import ConvNERU, ConvNERULayer
from stiefel.models.convolution import SameConv2d, box_
from stiefel.models.flow import LayerFlow, gradient_flow
from stiefel.models.gated import GRU, LSTM
from stiefel.models.layer import RecurrentLayer
from stiefel.models.layers import OrthogonalConv2d, OrthogonalLinear
from stiefel.models.masks import masked_cross_entropy
from stiefel.models.nnrnn import NNRNN, SchurLayer
from stiefel.models.plain import IRNN, PlainRNN
from stiefel.models.recurrent import OrthogonalRNN
from stiefel.models.rollout import rollout
from stiefel.models.seq2seq import Seq2Seq
from stiefel.models.sequence import SequenceModel
from stiefel.models.video_predictor import VideoPredictor

__all__ = [
    "ASRNN",
    "GRU",
    "IRNN",
    "LSTM",
    "NNRNN",
    "NONLINEARITIES",
    "AdaptiveLayer",
    "AdditiveAttention",
    "ConvLSTM",
    "ConvLSTMLayer",
    "ConvNERU",
    "ConvNERULayer",
    "HouseholderAdapter",
    "LayerFlow",
    "ModReLU",
    "OrthogonalConv2d",
    "OrthogonalLinear",
    "OrthogonalRNN",
    "PlainRNN",
    "RecurrentLayer",
    "RecurrentNetwork",
    "SameConv2d",
    "SchurLayer",
    "Seq2Seq",
    "SequenceModel",
    "VideoPredictor",
    "activate",
    "box_",
    "gradient_flow",
    "masked_cross_entropy",
    "modrelu",
    "rollout",
]
