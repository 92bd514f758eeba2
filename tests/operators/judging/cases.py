"""One case of the matrix, and how cases are run and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from meshwright.framework.compiler.program import Program, compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import annotate
from meshwright.framework.sharding.manual import manual_partition
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.definitions.use import HALVES, Use

# By how many devices they have: tensors of a program may be annotated over several.
MESHES = (
    DeviceMesh(("X", "Y"), (2, 4)),
    DeviceMesh(("X", "Y"), (4, 2)),
    DeviceMesh(("X", "Y", "Z"), (2, 2, 2)),
    DeviceMesh(("X",), (8,)),
    DeviceMesh(("X", "Y"), (3, 2)),
)
OTHER_MESHES = (
    *MESHES,
    DeviceMesh(("X", "Y"), (2, 4), (5, 2, 7, 0, 3, 6, 1, 4)),
    DeviceMesh(("X", "Y"), (2, 3)),
    DeviceMesh(("X",), (6,), (3, 1, 5, 0, 2, 4)),
)
ONE_DEVICE = DeviceMesh(("X",), (1,))
# After the partitioner, which is what is compared here, LLVM need not try hard.
_FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# What formats of fewer digits may be off, in units of the last place of the largest
# element, or of 1 if that is more.
ULPS = 8
FLOATS = (tf.float32, tf.bfloat16, tf.float16, tf.complex64, tf.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An operator in a program: its use, and how its tensors lie on a mesh.

    Args:
      operator: its name.
      use: the operator with sizes and settings.
      mesh: of the program.
      arrives: for each input its sharding at the program's border; a float input's
        gradient leaves with it.
      annotated: for each input its sharding where the operator reads it, perhaps over
        another mesh; None leaves it to completion.
      result: the same for each of the operator's results.
      leaves: for each result its sharding at the border.
      inner: for each tensor that the expression lays out inside the same.
      region: the axes of a manual region that the operator and its annotations are in;
        all devices along them compute the same.
    """

    operator: str
    use: Use
    mesh: DeviceMesh
    arrives: tuple[Sharding, ...]
    annotated: tuple[Sharding | None, ...]
    result: tuple[Sharding | None, ...]
    leaves: tuple[Sharding, ...]
    inner: tuple[Sharding | None, ...] = ()
    region: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The text that `case_of` reads."""
        lines = [f"{self.operator}: {self.use.expression}  on mesh ({self.mesh})"]
        if flags := self.use.flags():
            lines.append(f"  with {flags}")
        if self.region:
            lines.append(f"  in a region manual along {', '.join(self.region)}")
        for (name, spec), arrives, annotated in zip(
            self.use.inputs.items(), self.arrives, self.annotated, strict=True
        ):
            lines.append(
                f"  {name}: {spec}, arrives {arrives}, annotated "
                f"{self._annotation(annotated)}"
            )
        for shape, annotated, leaves in zip(
            self.use.result_shapes, self.result, self.leaves, strict=True
        ):
            lines.append(
                f"  result: {list(shape)}, annotated {self._annotation(annotated)}, "
                f"leaves {leaves}"
            )
        for i, annotated in enumerate(self.inner):
            lines.append(f"  inside, {i}: annotated {self._annotation(annotated)}")
        return "\n".join(lines)

    def _annotation(self, sharding: Sharding | None) -> str:
        if sharding is None or sharding.mesh == self.mesh:
            return str(sharding)
        ids = sharding.mesh.device_ids
        order = f" of devices {list(ids)}" if ids else ""
        return f"{sharding} over ({sharding.mesh}){order}"

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
            inner=(None,) * len(self.inner),
            region=(),
        )

    def compute(self, *inputs: tf.Tensor) -> dict[str, list[tf.Tensor]]:
        """The operator's results and the gradients of its float inputs."""
        with tf.GradientTape() as tape:
            tape.watch(_floats(inputs))
            results = self._results(inputs)
            loss = sum(map(_weighted_sum, _floats(results)), tf.zeros([]))
        gradients = []
        if self.use.differentiable:
            floats = _floats(inputs)
            gradients = tape.gradient(loss, floats, unconnected_gradients="zero")
        return {
            "results": results,
            "gradients": [tf.convert_to_tensor(g) for g in gradients],
        }

    def _results(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def annotated(*inputs):
            pairs = zip(inputs, self.annotated, strict=True)
            laid = [_laid(x, s) for x, s in pairs]
            results = tf.nest.flatten(self.use.fn(*laid, lay=self._lay))
            return [_laid(y, s) for y, s in zip(results, self.result, strict=True)]

        if not self.region:
            return annotated(*inputs)
        shapes = [x.shape for x in inputs], self.use.result_shapes
        in_dims, out_dims = ([[None] * len(s) for s in of] for of in shapes)
        return manual_partition(
            annotated,
            mesh=self.mesh,
            in_dims=in_dims,
            out_dims=out_dims,
            manual_axes=self.region,
        )(*inputs)

    def _lay(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        return _laid(tensor, self.inner[number])

    def border(self) -> dict[str, list[Sharding]]:
        pairs = zip(self.use.inputs.values(), self.arrives, strict=True)
        gradients = [
            s
            for value, s in pairs
            if tf.as_dtype(value.dtype) in FLOATS and self.use.differentiable
        ]
        return {"results": list(self.leaves), "gradients": gradients}

    def complaint(self, got: dict[str, list[np.ndarray]], want: dict) -> str | None:
        """What is wrong with what a mesh computed, if anything is."""
        for part in want:
            for i, (a, b) in enumerate(zip(got[part], want[part], strict=True)):
                if wrong := self._difference(np.asarray(a), np.asarray(b)):
                    return f"{part}[{i}]: {wrong}"
        return None

    def _difference(self, got: np.ndarray, want: np.ndarray) -> str | None:
        if got.shape != want.shape:
            return f"{got.shape} instead of {want.shape}"
        is_float = tf.as_dtype(want.dtype) in FLOATS
        if not is_float and got.dtype != want.dtype:
            return f"{got.dtype} instead of {want.dtype}"
        allowed = 0
        if is_float:
            wide = "c16" if want.dtype.kind == "c" else "f8"
            got, want = got.astype(wide), want.astype(wide)
            if not self._is_exact:
                allowed = self.tolerance * max(1, np.abs(want).max(initial=0))
        with np.errstate(invalid="ignore"):  # Infinity less infinity.
            off = got != want
            if allowed:
                off &= ~(np.abs(got - want) <= allowed)
            off &= ~(np.isnan(got) & np.isnan(want))  # NaN for a number is off.
        if not off.any():
            return None
        at = tuple(int(i) for i in np.argwhere(off)[0])
        return (
            f"{off.sum()} of {off.size} elements are off by more than {allowed:g}, the "
            f"first at {at}: {got[at]} instead of {want[at]}"
        )

    @property
    def _is_exact(self) -> bool:
        """Whether no rounding is due to how the case is computed.

        Each device of a region has its share of the gradient of what all of them hold:
        one of three has a rounded third of it.
        """
        shares = self.mesh.axes_size(self.region)
        return self.use.exact and not shares & (shares - 1)

    @property
    def tolerance(self) -> float:
        digits = self.use.digits
        return self.use.tolerance if digits == 24 else ULPS * 2.0 ** (1 - digits)


def _floats(tensors: Sequence) -> list:
    return [x for x in tensors if x.dtype in FLOATS]


def _weighted_sum(y: tf.Tensor) -> tf.Tensor:
    """Weights differ by element, so that a gradient out of place shows.

    All formats can hold them.
    """
    count = y.shape.num_elements()
    weights = np.round(np.cos(np.arange(count)) * 64) / 64
    if y.dtype.is_complex:
        weights = weights + 1j * np.roll(weights, 1)
    weights = tf.constant(weights.reshape(y.shape), y.dtype)
    return tf.cast(tf.math.real(tf.reduce_sum(y * weights)), tf.float32)


def _laid(x: tf.Tensor, sharding: Sharding | None) -> tf.Tensor:
    return x if sharding is None else annotate(x, sharding)


def wanted(cases: Sequence[Case]) -> list[dict]:
    """What one device computes, halves in float32: a program where eager TF cannot."""
    alone = [case.on_one_device() for case in cases]
    values = [list(map(_in_float32, case.use.values)) for case in cases]
    compiled = [i for i, case in enumerate(cases) if not case.use.eager]
    ran = {}
    if compiled:
        results = run(
            [alone[i] for i in compiled], values=[values[i] for i in compiled]
        )
        ran = dict(zip(compiled, results, strict=True))
    return [
        ran[i] if i in ran else case.compute(*map(tf.constant, values[i]))
        for i, case in enumerate(alone)
    ]


def _in_float32(value: np.ndarray) -> np.ndarray:
    is_half = tf.as_dtype(value.dtype).name in HALVES
    return value.astype(np.float32) if is_half else value


def run(
    cases: Sequence[Case],
    partitioner: Partitioner = Partitioner.SHARDY,
    values: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[dict]:
    """What each case computes, in one program for the mesh that they share."""
    values = values or [case.use.values for case in cases]
    program = compiled(cases, partitioner, values)
    return program.unshard(program(*values))


def compiled(
    cases: Sequence[Case],
    partitioner: Partitioner,
    values: Sequence[Sequence[np.ndarray]],
) -> Program:
    """One program of all cases."""

    def program(*inputs):
        return [case.compute(*x) for case, x in zip(cases, inputs, strict=True)]

    return compile_program(
        program,
        [[tf.TensorSpec(v.shape, v.dtype) for v in of] for of in values],
        cases[0].mesh,
        in_shardings=[list(case.arrives) for case in cases],
        out_shardings=[case.border() for case in cases],
        partitioner=partitioner,
        compiler_options=_FAST_COMPILE,
    )
