"""One case of the matrix, and how cases are run and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import Partitioner, compile_program
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.use import Use

MESHES = (
    DeviceMesh(("X", "Y"), (2, 4)),
    DeviceMesh(("X", "Y"), (4, 2)),
    DeviceMesh(("X", "Y", "Z"), (2, 2, 2)),
)
ONE_DEVICE = DeviceMesh(("X",), (1,))
# After the partitioner, which is what is compared here, LLVM need not try hard.
_FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Of the largest element, or of 1 if that is less.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An operator in a program: its use, and how its tensors lie on a mesh.

    Args:
      operator: its name.
      use: the operator with sizes and settings.
      mesh: of eight devices.
      arrives: for each input its sharding at the program's border; a float input's
        gradient leaves with it.
      annotated: for each input its sharding where the operator reads it; None leaves
        it to completion.
      result: the same for each of the operator's results.
      leaves: for each result its sharding at the border.
    """

    operator: str
    use: Use
    mesh: DeviceMesh
    arrives: tuple[Sharding, ...]
    annotated: tuple[Sharding | None, ...]
    result: tuple[Sharding | None, ...]
    leaves: tuple[Sharding, ...]

    def __repr__(self) -> str:
        lines = [f"{self.operator}: {self.use.expression}  on mesh ({self.mesh})"]
        for (name, one), arrives, annotated in zip(
            self.use.inputs.items(), self.arrives, self.annotated, strict=True
        ):
            limit = f" below {one.limit}" if one.limit else ""
            lines.append(
                f"  {name}: {one.kind.name.lower()}{limit} {list(one.shape)}, arrives "
                f"{arrives}, annotated {annotated}"
            )
        for shape, annotated, leaves in zip(
            self.use.result_shapes, self.result, self.leaves, strict=True
        ):
            lines.append(
                f"  result: {list(shape)}, annotated {annotated}, leaves {leaves}"
            )
        return "\n".join(lines)

    def on_one_device(self) -> Case:
        """The same without any sharding."""

        def alone(shardings):
            return tuple(Sharding.replicated(ONE_DEVICE, s.rank) for s in shardings)

        return dataclasses.replace(
            self,
            mesh=ONE_DEVICE,
            arrives=alone(self.arrives),
            annotated=(None,) * len(self.annotated),
            result=(None,) * len(self.result),
            leaves=alone(self.leaves),
        )

    def compute(self, *inputs: tf.Tensor) -> dict[str, list[tf.Tensor]]:
        """The operator's results and the gradients of its float inputs."""
        with tf.GradientTape() as tape:
            tape.watch(_floats(inputs))
            pairs = zip(inputs, self.annotated, strict=True)
            results = tf.nest.flatten(self.use.fn(*[_laid(x, s) for x, s in pairs]))
            results = [_laid(y, s) for y, s in zip(results, self.result, strict=True)]
            floats = _floats(results)
            loss = sum((tf.reduce_sum(y * _weights(y)) for y in floats), tf.zeros([]))
        gradients = tape.gradient(loss, _floats(inputs), unconnected_gradients="zero")
        return {
            "results": results,
            "gradients": [tf.convert_to_tensor(g) for g in gradients],
        }

    def specs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(v.shape, v.dtype) for v in self.use.values]

    def border(self) -> dict[str, list[Sharding]]:
        values = zip(self.use.values, self.arrives, strict=True)
        gradients = [s for v, s in values if v.dtype == np.float32]
        return {"results": list(self.leaves), "gradients": gradients}

    def complaint(self, got: dict[str, list[np.ndarray]]) -> str | None:
        """What is wrong with what a mesh computed, if anything is."""
        if self.use.eager:
            want = self.compute(*map(tf.constant, self.use.values))
        else:
            want = run([self.on_one_device()], Partitioner.SHARDY)[0]
        for part in want:
            for i, (a, b) in enumerate(zip(got[part], want[part], strict=True)):
                if wrong := _difference(np.asarray(a), np.asarray(b), self.use.exact):
                    return f"{self}\n  {part}[{i}]: {wrong}"
        return None


def _floats(tensors: Sequence) -> list:
    return [x for x in tensors if x.dtype == tf.float32]


def _weights(y: tf.Tensor) -> np.ndarray:
    """Different for each element, so that a gradient out of place shows."""
    count = y.shape.num_elements()
    return np.cos(np.arange(count, dtype=np.float32)).reshape(y.shape)


def _laid(x: tf.Tensor, sharding: Sharding | None) -> tf.Tensor:
    return x if sharding is None else annotate(x, sharding)


def _difference(got: np.ndarray, want: np.ndarray, exact: bool) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {got.shape} instead of {want.dtype} {want.shape}"
    if exact or want.dtype.kind != "f":
        off = got != want
        allowed = 0
    else:
        allowed = TOLERANCE * max(1, np.abs(want).max())
        off = ~(np.abs(got - want) <= allowed)  # NaN is off.
    if not off.any():
        return None
    at = tuple(int(i) for i in np.argwhere(off)[0])
    return (
        f"{off.sum()} of {off.size} elements are off by more than {allowed:g}, the "
        f"first at {at}: {got[at]} instead of {want[at]}"
    )


def run(cases: Sequence[Case], partitioner: Partitioner) -> list[dict]:
    """What each case computes, in one program for the mesh that they share."""

    def program(*inputs):
        return [case.compute(*x) for case, x in zip(cases, inputs, strict=True)]

    compiled = compile_program(
        program,
        [case.specs() for case in cases],
        cases[0].mesh,
        in_shardings=[list(case.arrives) for case in cases],
        out_shardings=[case.border() for case in cases],
        partitioner=partitioner,
        compiler_options=_FAST_COMPILE,
    )
    return compiled.unshard(compiled(*[case.use.values for case in cases]))
