"""The layer library; importing it registers every layer with gin."""

from meshwright.layers.attention import MultiHeadAttention
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
from meshwright.layers.normalization import LayerNorm, RMSNorm
from meshwright.layers.repeat import Repeat
from meshwright.layers.transformer import TransformerLayer
from meshwright.layers.transformer_stack import TransformerStack

__all__ = [
    "Capacity",
    "Dropout",
    "ExpertChoice",
    "ExpertFeedForward",
    "FeedForward",
    "Hash",
    "LayerNorm",
    "MoE",
    "MultiHeadAttention",
    "RMSNorm",
    "Repeat",
    "Sinkhorn",
    "Softmax",
    "Switch",
    "TokenEmbedding",
    "Top2",
    "TopK",
    "TransformerLayer",
    "TransformerStack",
]
