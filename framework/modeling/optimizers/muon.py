"""Muon: the momentum of a matrix, made orthogonal."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.modeling.optimizers.optimizer import (
    Optimizer,
    WeightUpdate,
    slot_spec,
)
from meshwright.framework.nested_map import NestedMap

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: singular values from 0 to 1 come near 1 in five steps."""
_SMALLEST = 1e-7
_HEADS = ("heads", "head_dim")


@gin.constants_from_enum
class MuonScale(enum.Enum):
    """The size of an update of a matrix of R rows and C columns, per learning rate.

    SPECTRAL: singular values of about sqrt(max(1, C / R)) (Jordan et al. 2024). ADAM: a
    root mean square of about 0.2, as Adam's, so that both take the same learning rate
    (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2).
    """

    SPECTRAL = "spectral"
    ADAM = "adam"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices.

    The momentum of a matrix is divided by its norm, and Newton-Schulz iterations bring
    all its singular values near 1. Heads and their size are one dim of it; each of
    stacked weights and of experts is a matrix. All other weights (scales, biases,
    kernels of convolutions, tables of embeddings and output layers) are updated by
    `others`.

    Args:
      learning_rate: a schedule by step, or a number; of matrices.
      clip_global_norm: limit of the gradients' global norm.
      momentum: m = momentum * m + grad, in [0, 1).
      nesterov: make grad + momentum * m orthogonal, instead of m.
      iterations: how many Newton-Schulz iterations.
      scale: the size of updates.
      weight_decay: learning rate * weight_decay * weight is subtracted from matrices.
      others: the optimizer of the other weights, with its own rate; its
        `clip_global_norm` must be None.
      other_dims: matrices with one of these logical dims are among the others.

    Raises:
      ValueError: a field is out of range; `others` clips gradients, or is a Muon.
    """

    reads_dims: ClassVar[bool] = True

    momentum: float = bounded(0.95, at_least=0, below=1)
    nesterov: bool = True
    iterations: int = bounded(5, at_least=1)
    scale: MuonScale = MuonScale.ADAM
    weight_decay: float = bounded(0.0, at_least=0)
    others: Optimizer
    other_dims: Sequence[str] = (
        *("vocab", "relative_buckets", "gate_experts", "classes", "score"),
        *("window", "users", "items"),
    )

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.others, Optimizer) or isinstance(self.others, Muon):
            raise ValueError(
                f"Muon.others is {self.others!r}; it must be the optimizer of all "
                "weights that are no matrices, such as Adam(...), in gin @Adam()"
            )
        if self.others.clip_global_norm is not None:
            raise ValueError(
                f"Muon.others clips gradients to {self.others.clip_global_norm}, but "
                "their norm is over all weights: set Muon.clip_global_norm instead"
            )

    def rows(self, spec: WeightSpec) -> int | None:
        """The number of dims of a matrix's rows; None for a weight of `others`."""
        dims = spec.dims[spec.stack_rank :]
        if spec.is_statistic or set(dims) & set(self.other_dims):
            return None
        if len(dims) == 2 and dims != _HEADS:
            return 1
        if len(dims) == 3 and dims[1:] == _HEADS:
            return 1
        return 2 if len(dims) == 3 and dims[:2] == _HEADS else None

    def slots_of(self, spec):
        if self.rows(spec) is None:
            return self.others.slots_of(spec)
        return NestedMap(m=slot_spec(spec)) if self.momentum else NestedMap()

    def rule(self, step, rate):
        other = self.others.rule(step, self.others.learning_rate(step))

        def update(grad, weight, slots, spec):
            if (rows := self.rows(spec)) is None:
                return other(grad, weight, slots, spec)
            along, new_slots = grad, NestedMap()
            if self.momentum:
                m = self.momentum * slots.m + grad
                along = grad + self.momentum * m if self.nesterov else m
                new_slots = NestedMap(m=m)
            along = self._orthogonal(along, spec.stack_rank, rows)
            if self.weight_decay:
                along += self.weight_decay * weight
            return WeightUpdate(weight=weight - rate * along, slots=new_slots)

        return update

    def _orthogonal(self, x: tf.Tensor, stack_rank: int, rows: int) -> tf.Tensor:
        """`x` with singular values near 1, and scaled."""
        stack, shape = x.shape[:stack_rank], x.shape[stack_rank:]
        height, width = math.prod(shape[:rows]), math.prod(shape[rows:])
        matrix = tf.reshape(x, [*stack, height, width])
        made = newton_schulz(matrix, self.iterations)
        if self.scale is MuonScale.SPECTRAL:
            made *= math.sqrt(max(1.0, width / height))
        else:
            made *= 0.2 * math.sqrt(max(height, width))
        return tf.reshape(made, x.shape)


def newton_schulz(x: tf.Tensor, iterations: int) -> tf.Tensor:
    """Brings singular values of matrices near 1.

    Args:
      x: float32 [..., rows, columns].
      iterations: how many; each is three products.

    Returns:
      Of the shape of `x`; zeros for a matrix of zeros.
    """
    is_high = x.shape[-2] > x.shape[-1]
    a, b, c = _QUINTIC
    norm = tf.sqrt(tf.reduce_sum(tf.square(x), [-2, -1], keepdims=True))
    x = x / (norm + _SMALLEST)
    for _ in range(iterations):
        # The product of the shorter dims is the smaller one.
        square = tf.matmul(x, x, transpose_a=is_high, transpose_b=not is_high)
        change = b * square + c * (square @ square)
        x = a * x + (x @ change if is_high else change @ x)
    return x
