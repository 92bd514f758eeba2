"""The layer library; importing it registers every layer with gin."""

from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.mask_rules import NearMask, PrefixMask
from meshwright.layers.attention.positions import (
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
)
from meshwright.layers.attention.relative.relative_attention import RelativeAttention
from meshwright.layers.attention.relative.relative_positions import (
    RelativeSinusoids,
    RelativeVectors,
)
from meshwright.layers.basic.dropout import Dropout
from meshwright.layers.basic.embedding import Softmax, TokenEmbedding
from meshwright.layers.basic.feed_forward import FeedForward
from meshwright.layers.basic.normalization import (
    BatchNorm,
    GroupNorm,
    LayerNorm,
    RMSNorm,
)
from meshwright.layers.conformer import ConformerLayer, ConvolutionModule
from meshwright.layers.convolutions.convolution import (
    Convolution,
    ConvSubsampling,
    DepthwiseConv1D,
    TransposedConvolution,
)
from meshwright.layers.convolutions.resnet import ResNet
from meshwright.layers.convolutions.unet3d import UNet3D
from meshwright.layers.experts.dropless import Dropless
from meshwright.layers.experts.gating import Capacity
from meshwright.layers.experts.gatings import (
    ExpertChoice,
    Hash,
    Sinkhorn,
    Switch,
    Top2,
    TopK,
)
from meshwright.layers.experts.moe import ExpertFeedForward, MoE
from meshwright.layers.neumf import NeuMF
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.pipelines.pipeline_function import pipeline
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.stacks.shared_bias import SharedRelativeBias
from meshwright.layers.transformer import TransformerLayer

__all__ = [
    "BatchNorm",
    "Capacity",
    "ConformerLayer",
    "ConvSubsampling",
    "Convolution",
    "ConvolutionModule",
    "DepthwiseConv1D",
    "Dropless",
    "Dropout",
    "ExpertChoice",
    "ExpertFeedForward",
    "FeedForward",
    "GroupNorm",
    "Hash",
    "LayerNorm",
    "LinearScaling",
    "Llama3Scaling",
    "MoE",
    "MultiHeadAttention",
    "NearMask",
    "NeuMF",
    "Pipeline",
    "PrefixMask",
    "RMSNorm",
    "RelativeAttention",
    "RelativeSinusoids",
    "RelativeVectors",
    "Repeat",
    "ResNet",
    "Sequential",
    "SharedRelativeBias",
    "Sinkhorn",
    "Softmax",
    "Switch",
    "TokenEmbedding",
    "Top2",
    "TopK",
    "TransformerLayer",
    "TransposedConvolution",
    "UNet3D",
    "YarnScaling",
    "pipeline",
]
