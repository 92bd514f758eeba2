"""The layer library; importing it registers every layer with gin."""

from meshwright.layers.attention import MultiHeadAttention
from meshwright.layers.conformer import ConformerLayer, ConvolutionModule
from meshwright.layers.convolution import (
    Convolution,
    ConvSubsampling,
    DepthwiseConv1D,
    TransposedConvolution,
)
from meshwright.layers.dropout import Dropout
from meshwright.layers.embedding import Softmax, TokenEmbedding
from meshwright.layers.feed_forward import FeedForward
from meshwright.layers.gating import Capacity
from meshwright.layers.gatings import (
    ExpertChoice,
    Hash,
    Sinkhorn,
    Switch,
    Top2,
    TopK,
)
from meshwright.layers.moe import ExpertFeedForward, MoE
from meshwright.layers.neumf import NeuMF
from meshwright.layers.normalization import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from meshwright.layers.pipeline import Pipeline
from meshwright.layers.relative_attention import RelativeAttention
from meshwright.layers.repeat import Repeat
from meshwright.layers.resnet import ResNet
from meshwright.layers.sequential import Sequential
from meshwright.layers.transformer import TransformerLayer
from meshwright.layers.unet3d import UNet3D

__all__ = [
    "BatchNorm",
    "Capacity",
    "ConformerLayer",
    "ConvSubsampling",
    "Convolution",
    "ConvolutionModule",
    "DepthwiseConv1D",
    "Dropout",
    "ExpertChoice",
    "ExpertFeedForward",
    "FeedForward",
    "GroupNorm",
    "Hash",
    "LayerNorm",
    "MoE",
    "MultiHeadAttention",
    "NeuMF",
    "Pipeline",
    "RMSNorm",
    "RelativeAttention",
    "Repeat",
    "ResNet",
    "Sequential",
    "Sinkhorn",
    "Softmax",
    "Switch",
    "TokenEmbedding",
    "Top2",
    "TopK",
    "TransformerLayer",
    "TransposedConvolution",
    "UNet3D",
]
