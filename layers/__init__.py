"""The layer library; importing it registers every layer with gin."""

from meshwright.layers.attention import MultiHeadAttention
from meshwright.layers.dropout import Dropout
from meshwright.layers.embedding import Softmax, TokenEmbedding
from meshwright.layers.feed_forward import FeedForward
from meshwright.layers.normalization import LayerNorm, RMSNorm
from meshwright.layers.repeat import Repeat
from meshwright.layers.transformer import TransformerLayer

__all__ = [
    "Dropout",
    "FeedForward",
    "LayerNorm",
    "MultiHeadAttention",
    "RMSNorm",
    "Repeat",
    "Softmax",
    "TokenEmbedding",
    "TransformerLayer",
]
