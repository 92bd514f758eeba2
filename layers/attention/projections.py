"""Projections of a stream to the heads of queries, keys and values.

Dims: B batch, S sequence, M model, N heads, K heads of keys and values, D head size.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from meshwright.framework.modeling.initializers import Constant, FanIn
from meshwright.framework.modeling.layer import Context, WeightSpec
from meshwright.framework.modeling.recompute import save_name
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.fused import BTKD
from meshwright.layers.attention.split.sequence_splits import BSND
from meshwright.layers.basic.linear import add_bias, contract_each, read_stream
from meshwright.layers.basic.normalization import RMSNorm

_NAMES = {"q": "query", "k": "key", "v": "value"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """How many heads there are, and the names of the dims of such tensors."""

    count: int
    dims: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections:
    """Makes queries, keys and values of a stream; they go by their first letters.

    Args:
      model_dims: M.
      num_heads: N.
      kv_heads: K.
      head_dim: D.
      use_bias: adds a bias to each projection.
      norm: normalizes each head's queries and keys; None: they stay as they are.
    """

    model_dims: int
    num_heads: int
    kv_heads: int
    head_dim: int
    use_bias: bool
    norm: RMSNorm | None

    def of(self, letter: str) -> Heads:
        """The heads of queries, keys or values."""
        if letter == "q" or self.kv_heads == self.num_heads:
            return Heads(count=self.num_heads, dims=BSND)
        return Heads(count=self.kv_heads, dims=BTKD)

    def weights(self) -> NestedMap:
        """A matrix for each letter, biases and norms."""
        specs = NestedMap()
        for letter in "qkv":
            heads = self.of(letter)
            specs[f"w_{letter}"] = WeightSpec(
                shape=(self.model_dims, heads.count, self.head_dim),
                dims=("model", *heads.dims[2:]),
                initializer=FanIn(),
                rows=1,
            )
            if self.use_bias:
                specs[f"b_{letter}"] = WeightSpec(
                    shape=(heads.count, self.head_dim),
                    dims=heads.dims[2:],
                    initializer=Constant(0.0),
                )
        if self.norm is not None:
            specs.query_norm = specs.key_norm = self.norm.weights()
        return specs

    def project(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, letters: str
    ) -> list[tf.Tensor]:
        """Queries, keys or values of `x` [B, S, M] for each letter of `letters`.

        Queries are [B, S, N, D], keys and values [B, S, K, D].
        """
        x = save_name(read_stream(ctx, x), "attention_in")
        projected = {}
        # Products with weights of one shape share the rows of `x`.
        for heads in {self.of(letter): None for letter in letters}:
            alike = [letter for letter in letters if self.of(letter) == heads]
            shape = (self.model_dims, heads.count, self.head_dim)
            weights = [theta[f"w_{letter}"] for letter in alike]
            products = contract_each(ctx, x, weights, shape=shape)
            products = [ctx.split(product, heads.dims) for product in products]
            projected |= zip(alike, products, strict=True)
        if self.use_bias:
            projected = {
                letter: add_bias(ctx, heads, theta[f"b_{letter}"])
                for letter, heads in projected.items()
            }
        projected = {k: save_name(heads, _NAMES[k]) for k, heads in projected.items()}
        if self.norm is not None:
            for letter in (letter for letter in "qk" if letter in projected):
                name = f"{_NAMES[letter]}_norm"
                with ctx.scope(name) as c:
                    projected[letter] = self.norm.fprop(
                        c, theta[name], projected[letter]
                    )
        return [projected[letter] for letter in letters]
