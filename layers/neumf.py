"""Neural matrix factorization: how likely a user takes an item (He et al. 2017).

Dims: B pairs of a user and an item, F factors, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded, check_value
from meshwright.framework.modeling.initializers import FanIn, Normal
from meshwright.framework.modeling.layer import Context, Layer, WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.basic.embedding import Lookup, pick_rows
from meshwright.layers.basic.linear import add_bias, contract, per_feature

BM = ("batch", "model")
BH = ("batch", "hidden")

# The standard deviation of the tables, as in the paper.
_TABLE_STDDEV = 0.01


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuMF(Layer):
    """Two models of a pair, each with its own tables, and the sum of their scores.

    Generalized matrix factorization weighs the product of both vectors, factor by
    factor; a perceptron reads them side by side. Its first kernel is kept as two, one
    for each side: nothing is concatenated, and a plan may split the vectors.

    Args:
      users: rows of the users' tables, their dim "users".
      items: rows of the items' tables, their dim "items".
      factors: F of the product.
      mlp_dims: H of the perceptron, bottom up. The first is the size of its input: half
        of it is the user's and half the item's.
      lookup: how rows of tables are picked.

    Raises:
      ValueError: a size below 1; a perceptron without a layer, or one that reads an odd
        number.
    """

    users: int = bounded(at_least=1)
    items: int = bounded(at_least=1)
    factors: int = bounded(64, at_least=1)
    mlp_dims: Sequence[int] = (256, 256, 128, 64)
    lookup: Lookup = Lookup.GATHER

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "mlp_dims", tuple(self.mlp_dims))
        for i, size in enumerate(self.mlp_dims):
            check_value(f"NeuMF.mlp_dims[{i}]", size, at_least=1)
        if len(self.mlp_dims) < 2 or self.mlp_dims[0] % 2:
            raise ValueError(
                f"NeuMF.mlp_dims is {self.mlp_dims}: give how much the perceptron "
                "reads, an even number as half is the user's, and the width of each "
                "layer"
            )

    def weights(self) -> NestedMap:
        mlp = self._tables(self.mlp_dims[0] // 2)
        # Together the halves read mlp_dims[0] numbers.
        half = _kernel(self.mlp_dims[0] // 2, self.mlp_dims[1], scale=0.5)
        mlp.layer_1 = NestedMap(
            user_kernel=half, item_kernel=half, bias=per_feature(self.mlp_dims[1])
        )
        for i in range(2, len(self.mlp_dims)):
            mlp[f"layer_{i}"] = NestedMap(
                kernel=_kernel(*self.mlp_dims[i - 1 : i + 1]),
                bias=per_feature(self.mlp_dims[i]),
            )
        # The scores add up as if a single kernel read both.
        total = self.factors + self.mlp_dims[-1]
        gmf = self._tables(self.factors)
        gmf.score = _score(self.factors, "model", of=total)
        mlp.score = _score(self.mlp_dims[-1], "hidden", of=total)
        return NestedMap(gmf=gmf, mlp=mlp, bias=per_feature(1))

    def fprop(
        self, ctx: Context, theta: NestedMap, user: tf.Tensor, *, item: tf.Tensor
    ) -> tf.Tensor:
        """Logits of the probability that a user takes an item.

        Args:
          ctx: context.
          theta: weights.
          user: int32 [B], in [0, users).
          item: int32 [B], in [0, items).

        Returns:
          Logits [B], in the activation dtype.

        Raises:
          ValueError: `user` and `item` are not both [B].
        """
        if user.shape.rank != 1 or user.shape != item.shape:
            raise ValueError(
                f"layer {ctx.path!r} takes users and items [B], but was given "
                f"{user.shape} and {item.shape}"
            )
        with ctx.scope("gmf") as c:
            user_vector, item_vector = self._vectors(c, theta.gmf, user, item)
            score = contract(c, user_vector * item_vector, theta.gmf.score)
        with ctx.scope("mlp") as c:
            user_vector, item_vector = self._vectors(c, theta.mlp, user, item)
            score += contract(
                c, self._hidden(c, theta.mlp, user_vector, item_vector), theta.mlp.score
            )
        score = tf.squeeze(add_bias(ctx, score, theta.bias), -1)
        return ctx.split(score, ("batch",))

    def flops(self) -> int:
        """FLOPs of a pair, forward: those of all products."""
        pairs = zip(self.mlp_dims, [*self.mlp_dims[1:], 1], strict=True)
        return 2 * sum(a * b for a, b in pairs) + 3 * self.factors

    def _tables(self, width: int) -> NestedMap:
        def table(rows: int, name: str) -> WeightSpec:
            return WeightSpec(
                shape=(rows, width),
                dims=(name, "model"),
                initializer=Normal(_TABLE_STDDEV),
            )

        return NestedMap(
            user=table(self.users, "users"), item=table(self.items, "items")
        )

    def _vectors(self, ctx, theta, user, item) -> list[tf.Tensor]:
        """[B, width] of the users and of the items, activation dtype."""
        return [
            self._rows(ctx, theta.user, user),
            self._rows(ctx, theta.item, item),
        ]

    def _rows(self, ctx, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        # Not cast before: the gradients of many pairs for a row are added in float32.
        rows = pick_rows(ctx, table, ids, self.lookup)
        return ctx.split(rows, BM)

    def _hidden(
        self, ctx, theta, user_vector: tf.Tensor, item_vector: tf.Tensor
    ) -> tf.Tensor:
        """The perceptron's last layer, [B, H]."""
        first = theta.layer_1
        x = contract(ctx, user_vector, first.user_kernel)
        x = ctx.split(x + contract(ctx, item_vector, first.item_kernel), BH)
        x = tf.nn.relu(add_bias(ctx, x, first.bias))
        for i in range(2, len(self.mlp_dims)):
            layer = theta[f"layer_{i}"]
            x = ctx.split(contract(ctx, x, layer.kernel), BH)
            x = tf.nn.relu(add_bias(ctx, x, layer.bias))
        return x


def _kernel(read: int, made: int, scale: float = 1.0) -> WeightSpec:
    return WeightSpec(
        shape=(read, made), dims=("model", "hidden"), initializer=FanIn(scale=scale)
    )


def _score(read: int, dim: str, *, of: int) -> WeightSpec:
    """A kernel that makes a score of `read` numbers, out of `of` in all."""
    return WeightSpec(
        shape=(read, 1), dims=(dim, "score"), initializer=FanIn(scale=read / of)
    )
