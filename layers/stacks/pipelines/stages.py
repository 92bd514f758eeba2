"""The stages of a pipeline: equal computations, each on its part of a mesh axis.

Dims: L stages, Q layers of a stage; a "stacked" tensor has a leading dim L.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence

import gin
import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.python.eager import record

from meshwright.framework.modeling.recompute import Saved
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.manual import auto_to_manual, manual_to_auto
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.vectorize import NoRuleError, vectorize
from meshwright.layers.basic.entries import read, write


@gin.constants_from_enum
class StageMode(enum.Enum):
    """How a program for one stage becomes a program for all.

    VECTORIZED gives every op a leading stage dim, which the compiler splits: TF must
    have a rule for each op (`tf.vectorized_map`). MANUAL puts the body into manual
    subgroups over the stage axis (GSPMD 3.4), which needs no rules, but GSPMD refuses
    some ops there (FFT, Cholesky); where a device has several stages, these are
    vectorized.
    """

    VECTORIZED = "vectorized"
    MANUAL = "manual"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The sharding of stages, and how they compute, pass results on, and look up.

    Args:
      mesh: the program's mesh.
      axes: the axes that split the stage dim.
      count: L, a multiple of the devices along `axes`.
      mode: how a program for one stage becomes a program for all.

    Raises:
      ValueError: the axes do not divide L, or there are none.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]
    count: int
    mode: StageMode

    def __post_init__(self):
        if not self.axes and self.count > 1 and self.mesh.size > 1:
            raise ValueError(
                f"pipeline: the plan's weights name no axis for 'stages', so that each "
                f"device would run all {self.count}: set "
                "ShardingPlan.weights['stages'], or num_stages to 1"
            )
        devices = self.mesh.axes_size(self.axes)
        if self.count % devices:
            raise ValueError(
                f"pipeline: {self.count} stages do not divide by the {devices} devices "
                f"along {', '.join(self.axes)} of the mesh ({self.mesh}): make "
                "num_stages a multiple of them"
            )

    def run(
        self,
        fn: Callable[..., Sequence[tf.Tensor]],
        stacked: Sequence[tf.Tensor],
        common: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """`fn` of every stage's entries and then what is common to all, stacked."""
        if self.mode is StageMode.VECTORIZED:
            return _vectorized(lambda *entries: fn(*entries, *common), stacked)

        def on_device(stacked, common):
            if stacked[0].shape[0] > 1:
                return _vectorized(lambda *entries: fn(*entries, *common), stacked)
            return [t[None] for t in fn(*(t[0] for t in stacked), *common)]

        return self._locally(on_device, stacked, common)

    def read(
        self, stack: tf.Tensor, slot: tf.Tensor, sharding: Sharding | None = None
    ) -> tf.Tensor:
        """The entry `slot` of a stack [L, Q, ...], an int32 scalar or [L]: [L, ...].

        GSPMD needs the stack's `sharding`, if it is split by other axes too: it does
        not propagate into a manual region, and would gather the stack.
        """
        if slot.shape.rank == 0:
            return read(stack, slot, dim=1)

        def on_device(stacked, _):
            stack, slot = stacked
            return [_each(lambda s, i: read(s, i, dim=0), stack, slot)]

        return self._locally(on_device, [stack, slot], shardings=[sharding, None])[0]

    def entry(self, table: np.ndarray, t: tf.Tensor) -> tf.Tensor:
        """The entry `t` of a table [iterations, L]: [L], split by stage."""
        return self.annotate(read(tf.constant(table), t, dim=0))

    def where(
        self,
        mask: tf.Tensor,
        values: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor] | None = None,
    ) -> list[tf.Tensor]:
        """Stacked `values` of stages of the mask, bool [L]; else `others`, or 0."""
        others = [tf.zeros_like(v) for v in values] if others is None else others
        return [
            tf.where(tf.reshape(mask, [-1] + [1] * (v.shape.rank - 1)), v, other)
            for v, other in zip(values, others, strict=True)
        ]

    def write(
        self,
        stack: tf.Tensor,
        value: tf.Tensor,
        slot: tf.Tensor,
        sharding: Sharding | None = None,
    ) -> tf.Tensor:
        """A stack [L, Q, ...] with `value` [L, ...] at `slot` [L]; see `read`."""
        return self._changed(write, stack, value, slot, sharding)

    def add(
        self,
        stack: tf.Tensor,
        value: tf.Tensor,
        slot: tf.Tensor,
        sharding: Sharding | None = None,
    ) -> tf.Tensor:
        """A stack [L, Q, ...] with `value` [L, ...] added at `slot`; see `read`."""
        if slot.shape.rank == 0:
            return _added(stack, value, slot, dim=1)
        return self._changed(_added, stack, value, slot, sharding)

    def _changed(self, change, stack, value, slot, sharding) -> tf.Tensor:
        """A stack whose entry at `slot` [L] each stage changes by `value`."""

        def on_device(stacked, _):
            return [_each(functools.partial(change, dim=0), *stacked)]

        shardings = _of_stack(sharding)
        return self._locally(on_device, [stack, value, slot], shardings=shardings)[0]

    def add_among(
        self,
        stack: tf.Tensor,
        value: tf.Tensor,
        slot: tf.Tensor,
        slots: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """`add`, where `slot` is one of the scalars `slots`, which may be equal.

        This is linear in what it adds, so that a partial sum stays unreduced; but it
        reads and writes an entry of the stack for each of `slots`.
        """
        if slot.shape.rank == 0:
            return self.add(stack, value, slot)
        left = tf.ones_like(slot, tf.bool)
        for one_slot in slots:
            here, left = left & (slot == one_slot), left & (slot != one_slot)
            mask = tf.reshape(here, [-1, *[1] * (value.shape.rank - 1)])
            part = tf.where(mask, value, tf.zeros_like(value))
            stack = _added(stack, part, one_slot, dim=1)
        return stack

    def pick(self, table: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """The entries `index` [L] of a table [Q, ...] of all stages: [L, ...]."""

        def on_device(stacked, common):
            return [_each(lambda i: read(common[0], i, dim=0), stacked[0])]

        return self._locally(on_device, [index], [table])[0]

    def shift(
        self, state: tf.Tensor, first: tf.Tensor, takes: tf.Tensor, *, circular: bool
    ) -> tf.Tensor:
        """The state [L, ...] moved to the next stage; one CollectivePermute.

        Args:
          state: the stages' outputs.
          first: [...], the first stage's input from outside.
          takes: bool scalar, whether it takes this; if not, the last stage's output.
          circular: whether it ever takes the last stage's output.
        """
        if circular:
            moved = tf.concat([state[-1:], state[:-1]], axis=0)
        else:
            moved = _pad(state, 1, -1)
        return tf.where(self._is_stage(0, state) & takes, first[None], moved)

    def shift_back(
        self, state: tf.Tensor, last: tf.Tensor, round_: tf.Tensor, *, circular: bool
    ) -> tf.Tensor:
        """The gradient [L, ...] of the stages' outputs, moved to the stage before.

        Args:
          state: the gradient of their inputs in the next iteration.
          last: [...], the gradient of the last stage's output to the outside.
          round_: bool scalar, whether its output went to the first stage instead.
          circular: whether it ever goes there.
        """
        if circular:
            moved = tf.concat([state[1:], state[:1]], axis=0)
        else:
            moved = _pad(state, -1, 1)
        return tf.where(self._is_stage(-1, state) & ~round_, last[None], moved)

    def last(self, state: tf.Tensor) -> tf.Tensor:
        """The last stage's entry of [L, ...]: [...], on the devices of all stages."""
        others = tf.zeros_like(state)
        # A sum, which is reduced and cut in one where the result is split.
        return tf.reduce_sum(tf.where(self._is_stage(-1, state), state, others), axis=0)

    def annotate(
        self, tensor: tf.Tensor, like: Saved | None = None, *, before: int = 0
    ) -> tf.Tensor:
        """`tensor` split by stage, after `before` dims, and otherwise as `like` is.

        Dims that `like` does not have are unsharded; dims that it leaves open, or all
        if it has no sharding, are left to propagation.
        """
        rank = tensor.shape.rank
        if like is None or like.sharding is None:
            start = before + 1 if like is None else rank - like.spec.shape.rank
            dims = [()] * rank
            dims[before] = self.axes
            sharding, unspecified = Sharding(self.mesh, tuple(dims)), range(start, rank)
        else:
            start = rank - like.spec.shape.rank
            sharding = self.sharding(like, start, before=before)
            unspecified = [start + dim for dim in like.unspecified_dims]
        return annotate(tensor, sharding.opened(unspecified))

    def sharding(self, like: Saved, more: int, *, before: int = 0) -> Sharding | None:
        """The sharding of a tensor like `like` after `more` dims, one of them stages.

        None if `like` has none. Dims that it leaves open are unsharded.
        """
        if like.sharding is None:
            return None
        proto = xla_data_pb2.OpSharding.FromString(like.sharding)
        layout = Sharding.from_op_sharding(self.mesh, proto, like.spec.shape.rank)
        dims = [()] * more
        dims[before] = self.axes
        return Sharding(self.mesh, (*dims, *layout.dims))

    def _is_stage(self, stage: int, like: tf.Tensor) -> tf.Tensor:
        """bool [L, 1, ...]."""
        mask = tf.range(self.count) == stage % self.count
        return tf.reshape(mask, [self.count] + [1] * (like.shape.rank - 1))

    def _locally(
        self,
        fn,
        stacked: Sequence[tf.Tensor],
        common: Sequence[tf.Tensor] = (),
        shardings: Sequence[Sharding | None] = (),
    ) -> list[tf.Tensor]:
        """`fn` (a device's entries, common) in a manual region over the stage axes.

        `shardings` are the shardings of `stacked` where they are known.
        """

        def dims(tensor):
            return [self.axes, *[()] * (tensor.shape.rank - 1)]

        if tf.executing_eagerly():  # There is no mesh, as for annotations.
            return list(fn(stacked, common))

        def enter(tensor, mapping):
            return auto_to_manual(tensor, self.mesh, mapping, manual_axes=self.axes)

        entered = [enter(t, dims(t)) for t in stacked]
        for i, sharding in enumerate(shardings):
            if sharding is not None:
                inner = ((), *sharding.dims[1:])
                entered[i] = annotate(
                    entered[i], dataclasses.replace(sharding, dims=inner)
                )
        replicated = [enter(t, [()] * t.shape.rank) for t in common]
        return [
            manual_to_auto(t, self.mesh, dims(t), manual_axes=self.axes)
            for t in fn(entered, replicated)
        ]


def _of_stack(sharding: Sharding | None) -> list[Sharding | None]:
    """The shardings of a stack [L, Q, ...], an entry [L, ...], and its slot [L]."""
    if sharding is None:
        return [None, None, None]
    dims = sharding.dims
    return [sharding, dataclasses.replace(sharding, dims=(dims[0], *dims[2:])), None]


def _vectorized(fn, stacked: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    try:
        # The pipeline has its own gradient: an eager tape need not know one of each op.
        with record.stop_recording():
            return vectorize(fn, stacked)
    except NoRuleError as error:
        raise ValueError(
            f"pipeline: {error}: use StageMode.MANUAL on a mesh with one stage to a "
            "device, which needs no rule for it"
        ) from error


def _added(stack: tf.Tensor, value: tf.Tensor, slot: tf.Tensor, *, dim: int):
    # Fused with the write, the read keeps the TPU compiler from writing in place:
    # gradients would be in memory twice.
    total = xla.optimization_barrier(read(stack, slot, dim=dim) + value)[0]
    return write(stack, total, slot, dim=dim)


def _each(fn, *stacked: tf.Tensor) -> tf.Tensor:
    """`fn` of a device's stages in turn: mostly there is a single stage."""
    count = stacked[0].shape[0]
    return tf.stack([fn(*(t[i] for t in stacked)) for i in range(count)])


def _pad(state: tf.Tensor, low: int, high: int) -> tf.Tensor:
    rest = [0] * (state.shape.rank - 1)
    zero = tf.zeros([], state.dtype)
    return xla.pad(state, zero, [low, *rest], [high, *rest], [0, *rest])
