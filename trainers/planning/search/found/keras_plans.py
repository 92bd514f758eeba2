"""How a Keras model is best split, as a layout for `meshwright.keras.distribute`.

model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = tf.TensorSpec([1024, 128]), tf.TensorSpec([1024], tf.int32)
found = search_keras(model, (x, y), "v3:4x4")
print(found.text())
mw.keras.distribute(model, found.mesh, found.layout, **found.options)
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import tqdm
from absl import logging

from meshwright.framework.compiler.hlo.out_of_memory import OutOfMemoryError
from meshwright.framework.compiler.hlo.step_errors import (
    MEASURED_KIND,
    error_text,
    too_near_text,
)
from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.program import Program
from meshwright.framework.compiler.weight_update_sharding.decide import (
    WeightUpdateSharding,
)
from meshwright.framework.devices.topology import Topology, topology_devices
from meshwright.framework.functions import keras as mesh_keras
from meshwright.framework.functions.keras_files import variables_of
from meshwright.framework.functions.keras_layouts import batch_axes, layout_of
from meshwright.framework.functions.keras_plan import FitPlan
from meshwright.framework.functions.layouts.split_weights import split_weights
from meshwright.framework.sharding.mesh import DeviceMesh, did_you_mean
from meshwright.framework.sizes import bytes_text
from meshwright.trainers.planning.search.found.alike import all_plainest, distinct
from meshwright.trainers.planning.search.found.finding import (
    Finder,
    Found,
    Point,
    Progress,
)
from meshwright.trainers.planning.search.found.function_plans import (
    check_counts,
    function_plan,
    in_best_order,
    run_finder,
    searchable,
)
from meshwright.trainers.planning.search.found.keras_step import (
    KerasStep,
    checked_batch,
    layout_lines,
)
from meshwright.trainers.planning.search.found.named_function import NamedFunction
from meshwright.trainers.planning.search.found.propagated import AXES, Priced
from meshwright.trainers.startup.messages import told_bar

BASELINES = ("data", "fsdp", "tensor")
_TOO_LARGE = "does not fit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasLayout:
    """A layout of a Keras model on a mesh, and what a step of `fit` takes with it.

    Args:
      name: "data", "fsdp" or "tensor" for those of `distribute`, else "found".
      mesh: the device mesh.
      layout: as of `distribute`: the name, or a table.
      data_axes: the axes that split a batch.
      priced: what it costs by propagation, without weight-update sharding; None if
        that cannot be said.
      updates: how its weight updates are sharded: off if AUTO shards none.
      seconds: of a step by the estimate of the compiled program; None if it was not
        compiled, or does not fit.
      memory: bytes of a device at the peak, as compiled; None as `seconds`.
      failed: why it has no compiled program, else "".
    """

    name: str
    mesh: DeviceMesh
    layout: str | Mapping[str, list]
    data_axes: tuple[str, ...]
    priced: Priced | None = None
    updates: WeightUpdateSharding = WeightUpdateSharding.AUTO
    seconds: float | None = None
    memory: int | None = None
    failed: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Options of `distribute`: the batch's axes, and weight-update sharding."""
        return {
            "data_axes": self.data_axes,
            "weight_update_sharding": self.updates.value,
        }

    @property
    def cost(self) -> float:
        """What layouts are compared by: compiled seconds, else those propagated."""
        if self.seconds is not None:
            return self.seconds
        return self.priced.seconds if self.priced and not self.failed else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class KerasPlan:
    """The layout with which a step of `fit` is fastest, and those it was compared with.

    Args:
      layouts: what was compared, the fastest first.
      torus: the TPU topology.
      progress: how many plans were looked at.
    """

    layouts: tuple[KerasLayout, ...]
    torus: Topology
    progress: Progress

    @property
    def best(self) -> KerasLayout:
        """The fastest layout."""
        return self.layouts[0]

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self.best.mesh

    @property
    def layout(self) -> str | Mapping[str, list]:
        """What `distribute` takes: "data", "fsdp", "tensor", or a table.

        A table has a row for each variable of two dims or more: its path, the axes of
        each dim.
        """
        return self.best.layout

    @property
    def options(self) -> dict[str, Any]:
        """Options of `distribute`: the batch's axes, and weight-update sharding."""
        return self.best.options

    def __repr__(self) -> str:
        return f"<KerasPlan {self.text().splitlines()[0]}>"

    def text(self, number: int = 0) -> str:
        """A layout, and a table of all that were compared.

        Args:
          number: of the layout in `layouts`; by default the fastest.
        """
        layout = self.layouts[number]
        how = "by propagation" if layout.seconds is None else "compiled"
        time, axes = _ms(layout.cost), ".".join(layout.data_axes) or "-"
        return "\n".join(
            [
                f"mesh {layout.mesh}: {time} ms on {self.torus.name}, {how}",
                f"  batch: {axes}; weight-update sharding: {layout.updates.value}",
                *layout_lines(layout.layout),
                *self._table(),
                *textwrap.wrap(self._too_near(), width=80),
                *textwrap.wrap(self._errors(), width=80),
            ]
        )

    def _too_near(self) -> str:
        """Which layout of `distribute` may be as fast as the one found; or ""."""
        best, kind = self.best, self.torus.kind
        if best.name != "found" or best.seconds is None:
            return ""
        plain = (one for one in self.layouts if one.name != "found" and one.seconds)
        nearest = next(plain, None)
        slower = math.inf if nearest is None else nearest.seconds / best.seconds - 1
        text = too_near_text(kind, slower)
        return text and f"'found' takes less than {nearest.name!r}. {text}"

    def _errors(self) -> str:
        """How far the times may be off."""
        kind, texts = self.torus.kind, []
        if any(one.seconds is not None for one in self.layouts):
            texts.append(f"compiled: {error_text(kind)}.")
        texts.append("Propagated: rougher, and without weight-update sharding.")
        if kind.name != MEASURED_KIND:
            texts.append(
                f"Its rates are TPU {MEASURED_KIND}'s: on {kind.name} it may have "
                "layouts in another order."
            )
        return " ".join(texts)

    def _table(self) -> Iterator[str]:
        meshes = [_shape(one.mesh) for one in self.layouts]
        width = max(4, *map(len, meshes))
        yield "compared, in ms a step:"
        yield f"  {'layout':<8}{'mesh':<{width}}  updates  propagated  compiled  memory"
        for one, mesh in zip(self.layouts, meshes, strict=True):
            rough = "-" if one.priced is None else _ms(one.priced.seconds)
            time = "-" if one.seconds is None else _ms(one.seconds)
            memory = one.failed or (
                "-" if one.memory is None else bytes_text(one.memory)
            )
            yield (
                f"  {one.name:<8}{mesh:<{width}}  {one.updates.value:<7}  {rough:>10}  "
                f"{time:>8}  {memory}"
            )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _shape(mesh: DeviceMesh) -> str:
    return str(dataclasses.replace(mesh, device_ids=None))


_OPTIONS = {
    "most": "plans propagated at most",
    "most_axes": "mesh axes at most",
    "compiled": "how many of the fastest are compiled",
    "baselines": "layouts of distribute to compare with",
}


def search_keras(
    model: Any,
    batch: Sequence[Any],
    topology: str,
    *,
    most: int = 300,
    most_axes: int = 2,
    compiled: int = 2,
    baselines: Sequence[str] = BASELINES,
    **unknown: Any,
) -> KerasPlan:
    """Looks for the layout of a Keras model with which a step of `fit` is fastest.

    A step has the loss, its gradients and the optimizer's updates. Weights of layers
    that differ in their number alone are split alike, optimizer slots as their weights;
    what has a single dim is left to propagation. The layouts "data", "fsdp" and
    "tensor" are compared with what is found. A bar, or lines on stderr, tells how far.

    What is compiled is the program that `fit` would run, with weight-update sharding if
    that is estimated to pay, and without. If programs are compiled, the model is on the
    topology's devices afterwards, as after `meshwright.keras.plan`: call `distribute`
    to train it here. Of a model with its own `train_step` propagation prices the call
    and `compute_loss`.

    Args:
      model: a Keras 3 model of the TensorFlow backend, built and compiled.
      batch: the model's input and labels, and weights of samples if `fit` has some,
        nests of `tf.TensorSpec` whose first dim is the batch.
      topology: name of a TPU topology, as in `--topology`.
      most: plans propagated at most, with those of "data", "fsdp" and "tensor".
      most_axes: mesh axes at most.
      compiled: how many of the fastest found are compiled, beside "data" and "fsdp" on
        one axis and "tensor" on the mesh of two axes that propagation prefers, or on
        one of them if it can price none. The fastest of all is taken. 0: propagation
        decides, and libtpu is not needed.
      baselines: those of "data", "fsdp" and "tensor" to compare with; () for none.
      **unknown: refused.

    Raises:
      TypeError: an unknown option, or a batch that is not of specs.
      ValueError: the model is not built, or has no optimizer; a batch without labels,
        or of unknown or different sizes; see `search` and `distribute` for others.
      LoweringError, ImportError: see `search`.
    """
    for option in unknown:
        listed = ", ".join(f"{name} ({what})" for name, what in _OPTIONS.items())
        raise TypeError(
            f"{model.name}: search_keras has no option {option!r}"
            f"{did_you_mean(option, (*_OPTIONS,))}; it has {listed}"
        )
    if not model.built or getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{model.name}: its weights and optimizer are part of what is searched: "
            "build and compile it first"
        )
    name, torus = model.name, searchable(model.name, topology)
    check_counts(name, most=(most, 1), most_axes=(most_axes, 1), compiled=(compiled, 0))
    batch = checked_batch(name, batch)
    if isinstance(baselines, str) or not {*baselines} <= {*BASELINES}:
        raise ValueError(
            f"{name}: baselines are {baselines!r}: pass a list, of some of {BASELINES}"
        )
    devices = topology_devices(topology) if compiled else None
    if compiled:  # What would end the search ends it now.
        mesh_keras.distribute(model, _one_axis(torus), "data", devices=devices)
    with told_bar(1, "tracing") as bar:
        search = _Search(model, batch, torus, most_axes, devices, baselines)
        bar.update()
    run_finder(search.finder, most, search.starts)
    layouts = search.layouts(max(compiled, 1))
    if compiled:
        names = ", ".join(layout.name for layout in layouts)
        tqdm.tqdm.write(
            f"{name}: compiling {len(layouts)} layouts ({names}); those with sharded "
            "weight updates also without",
            file=sys.stderr,
        )
        layouts = search.all_compiled(layouts)
    layouts = sorted(layouts, key=lambda one: one.cost)
    if layouts[0].cost == math.inf:
        raise ValueError(_none_is_left(name, layouts, topology))
    progress = search.finder.progress
    return KerasPlan(layouts=tuple(layouts), torus=torus, progress=progress)


def _none_is_left(name: str, layouts: Sequence[KerasLayout], topology: str) -> str:
    """The message if no layout can be taken."""
    reasons = {f"{one.name}: {one.failed or 'no price'}": None for one in layouts}
    return (
        f"{name}: of the layouts compared none can be taken on {topology}: choose a "
        f"larger topology or a smaller batch. {'; '.join(reasons)}"
    )


def _one_axis(torus: Topology) -> DeviceMesh:
    return DeviceMesh(AXES[:1], (torus.size,))


class _Search:
    """The plans of a model's step, and the layouts that are compared.

    Args:
      model: the Keras model.
      batch: its specs.
      torus: the topology.
      most_axes: mesh axes at most.
      devices: the topology's; None if nothing is to be compiled.
      baselines: names of layouts of `distribute` to compare with.

    Attributes:
      finder: of the plans.
    """

    def __init__(
        self,
        model: Any,
        batch: tuple,
        torus: Topology,
        most_axes: int,
        devices: Sequence[jax.Device] | None,
        baselines: Sequence[str],
    ):
        self._model, self._batch, self._baselines = model, batch, baselines
        self._torus, self._devices = torus, devices
        variables_of(model)  # Notes the paths by which layouts know them.
        self._step = KerasStep(model, batch)
        self._named = NamedFunction(
            self._step.step, self._step.args, self._step.count, self._step.names
        )
        step = self._named.step
        self.finder = Finder([step], [1.0], torus, most_axes=most_axes)
        self._plain = [*self._plain_layouts()]

    @property
    def starts(self) -> list[Point]:
        """The plans of "data", "fsdp" and "tensor" that propagation can price."""
        return [point for _, point in self._plain if point]

    def _plain_layouts(self) -> Iterator[tuple[KerasLayout, Point | None]]:
        """Those of `distribute`, "tensor" on each mesh of two axes; and plans."""
        for name in BASELINES[:2]:
            if name in self._baselines:
                yield self._with_plan(name, _one_axis(self._torus))
        splits = "tensor" in self._baselines and split_weights(self._model)
        made = []
        for shape in self.finder.shapes if splits else ():
            if len(shape) == 2:
                pairs = [(AXES[:2], shape), (AXES[1::-1], shape[::-1])]
                for axes, sizes in pairs[: len({*shape})]:
                    made.append(self._with_plan("tensor", DeviceMesh(axes, sizes)))
        # No plan has it if it splits weights differently that a plan splits alike.
        priced = [(one, point) for one, point in made if point is not None]
        yield from priced or made[:1]

    def _with_plan(
        self, name: str, mesh: DeviceMesh
    ) -> tuple[KerasLayout, Point | None]:
        """A layout of `distribute`; None for its plan if no search has it."""
        data_axes = tuple(batch_axes(name, mesh))
        one = KerasLayout(name=name, mesh=mesh, layout=name, data_axes=data_axes)
        shape = tuple(sorted(mesh.shape, reverse=True))
        layout = layout_of(self._model, mesh, name, data_axes)
        leaves = self._step.shardings(layout, mesh, data_axes)
        masks = self._named.masks(AXES[: len(shape)], leaves)
        if masks is None or shape not in self.finder.shapes:
            return one, None
        allowed = self.finder.rough(0, shape).allowed
        is_even = all(m in known for m, known in zip(masks, allowed, strict=True))
        return one, Point(0, shape, masks) if is_even else None

    def layouts(self, count: int) -> list[KerasLayout]:
        """Those of `distribute`, "tensor" once, and the fastest `count` found."""
        plain: dict[str, KerasLayout] = {}
        for one, point in self._plain:
            found = point and self.finder.look_up(point)
            if found:
                one = self._priced(one, found)
            known = plain.get(one.name)
            if known is None or one.cost < known.cost:
                plain[one.name] = one
        starts = {*self.starts}
        ranked = distinct(self.finder, count + len(starts))
        plainer = all_plainest(self.finder, ranked)
        others = [found for found in plainer if found.point not in starts]
        return [*plain.values(), *map(self._found, others[:count])]

    def _priced(self, one: KerasLayout, found: Found) -> KerasLayout:
        failed = "" if self.finder.fits(found) else _TOO_LARGE
        return dataclasses.replace(one, priced=found.priced, failed=failed)

    def _found(self, found: Found) -> KerasLayout:
        plan = function_plan(self._named, self.finder, found)
        leaves = dict(zip(plan.paths, plan.leaves, strict=True))
        table = {
            f"^{re.escape(variable)}$": [
                (axes[0] if len(axes) == 1 else axes) or None for axes in leaf.dims
            ]
            for path, variable in self._step.paths.items()
            if (leaf := leaves[path]) is not None
        }
        one = KerasLayout(
            name="found",
            mesh=plan.mesh,
            layout=table,
            data_axes=plan.leaves[-1].dims[0],
        )
        return self._priced(one, found)

    def all_compiled(self, layouts: Sequence[KerasLayout]) -> list[KerasLayout]:
        """`compiled` of each, with a bar."""
        made = []
        with told_bar(len(layouts), "compiling") as bar:
            for one in layouts:
                bar.set_postfix_str(one.name, refresh=False)
                made += self.compiled(one)
                bar.update()
        return made

    def compiled(self, one: KerasLayout) -> Iterator[KerasLayout]:
        """A layout with what its program takes.

        If AUTO shards weight updates, that program, for the trainer's device order by
        which it was decided. The one that shards none is taken in its best order.
        """
        for updates in (WeightUpdateSharding.AUTO, WeightUpdateSharding.OFF):
            one = dataclasses.replace(one, updates=updates)
            program = self._program(one)
            if isinstance(program, str):
                yield dataclasses.replace(one, failed=program)
                return
            plan = FitPlan(topology=self._torus.name, program=program)
            if program.updates is not None and program.updates.sharded:
                seconds = plan.time.seconds
            else:
                mesh, seconds = in_best_order(program, self._torus)
                off = WeightUpdateSharding.OFF
                one = dataclasses.replace(one, mesh=mesh, updates=off)
            yield dataclasses.replace(
                one, seconds=seconds, memory=plan.memory, failed=""
            )
            if one.updates is WeightUpdateSharding.OFF:
                return

    def _program(self, one: KerasLayout) -> Program | str:
        """The program that `fit` would run; or why there is none."""
        x, y, *rest = self._batch
        weights = rest[0] if rest else None
        verbosity = logging.get_verbosity()
        # What `fit` says of a layout, it is to say of the one that is taken.
        logging.set_verbosity(logging.ERROR)
        try:
            mesh_keras.distribute(
                self._model,
                one.mesh,
                one.layout,
                data_axes=one.data_axes,
                weight_update_sharding=one.updates,
                devices=self._devices,
            )
            return mesh_keras.program(self._model, x, y, sample_weight=weights)
        except OutOfMemoryError:
            return _TOO_LARGE
        except LoweringError as error:
            return str(error).splitlines()[0]
        finally:
            logging.set_verbosity(verbosity)
