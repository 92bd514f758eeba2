"""The pass: a program's weight updates become sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import tensorflow as tf
from absl import logging
from tensorflow.python.util import nest

from meshwright.framework.compiler.boundary.borders import stored_spec
from meshwright.framework.compiler.lowering.errors import LoweringError
from meshwright.framework.compiler.lowering.lower import Signature
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.weight_update_sharding.carried_state import (
    carried_of,
)
from meshwright.framework.compiler.weight_update_sharding.clusters import find_clusters
from meshwright.framework.compiler.weight_update_sharding.decide import (
    Machine,
    WeightUpdateSharding,
    batch_bytes,
    decide,
)
from meshwright.framework.compiler.weight_update_sharding.decisions import (
    UpdateReport,
    update_report,
)
from meshwright.framework.compiler.weight_update_sharding.gathers import place_gathers
from meshwright.framework.compiler.weight_update_sharding.redundancy import analyze
from meshwright.framework.compiler.weight_update_sharding.rewrite import rewrite
from meshwright.framework.compiler.weight_update_sharding.update_layouts import Tiles
from meshwright.framework.devices.hardware import TpuKind, hardware_of
from meshwright.framework.devices.topology import topology_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSharding:
    """How a program's weight updates are to be sharded.

    Args:
      mode: which updates.
      data_axes: the mesh axes that split the batch.
      argument: number of the argument that is the state.
      result: name of the result that takes its place; of the same structure.
    """

    mode: WeightUpdateSharding
    data_axes: Sequence[str]
    argument: int = 0
    result: str = "state"


def shard_weight_updates(
    module: Module,
    requested: UpdateSharding,
    devices: Sequence[jax.Device] | None = None,
) -> UpdateReport:
    """Shards the weight updates of a training program (Xu et al. 2020).

    The state's leaves may then have other forms among the module's arguments and
    results.

    Args:
      module: the program; forms of the leaves of the state are not None.
      requested: which updates, over which axes.
      devices: those of a topology, or None.

    Returns:
      What was decided on each update. `WeightUpdateSharding.AUTO` leaves a program that
      the pass cannot handle as it is, with a warning: it is only to make it faster.

    Raises:
      LoweringError: as when the program is compiled, unless the mode is AUTO.
      ValueError: `requested` does not fit the program or the mesh.
    """
    _check(module, requested)
    try:
        return _shard(module, requested, devices)
    except Exception as error:  # Of Shardy, of MLIR, or a fault of the pass.
        if requested.mode is not WeightUpdateSharding.AUTO:
            raise
        reason = f"{type(error).__name__}: {error}"
        # A mistake of the program's, which later passes refuse, needs no report.
        is_ours = not isinstance(error, LoweringError)
        logging.log(
            logging.WARNING if is_ours else logging.INFO,
            "%s: weight updates are not sharded, as that failed%s: %s",
            module.signature.name,
            " (report this, please)" if is_ours else "",
            reason,
            exc_info=error if is_ours else None,
        )
        return UpdateReport(
            mode=requested.mode.value,
            data_axes=tuple(requested.data_axes),
            failed=reason,
        )


def _shard(
    module: Module,
    requested: UpdateSharding,
    devices: Sequence[jax.Device] | None,
) -> UpdateReport:
    state = _state(module.signature, requested)
    completed = module.completed()
    redundancy = analyze(completed, requested.data_axes)
    links = carried_of(completed, [tuple(numbers) for _, *numbers in state])
    clusters, dims = find_clusters(completed.main, redundancy, links)
    if requested.mode is not WeightUpdateSharding.OFF:
        for cluster in clusters:
            place_gathers(cluster, dims, redundancy)
    machine = machine_of(devices)
    decisions = decide(
        clusters,
        dims,
        completed,
        redundancy,
        machine=machine,
        mode=requested.mode,
    )
    names = {argument: name for name, argument, _ in state}
    batched = batch_bytes(decisions, machine, module.mesh)
    report = update_report(decisions, names, completed, requested, batched)
    if all(decision.layout is None for decision in decisions):
        return report
    with module.rolled_back_on_error():
        forms = rewrite(completed, redundancy, decisions, module.in_forms)
    for _, argument, result in state:
        if argument in forms:
            module.in_forms[argument] = module.out_forms[result] = forms[argument]
    module.signature = dataclasses.replace(
        module.signature,
        inputs=_stored(module.signature.inputs, module.in_forms),
        outputs=_stored(module.signature.outputs, module.out_forms),
    )
    return report


def _check(module: Module, requested: UpdateSharding) -> None:
    signature, mesh = module.signature, module.mesh
    name, count = signature.name, len(signature.inputs)
    if not isinstance(requested, UpdateSharding):
        raise ValueError(
            f"{name}: update_sharding is {requested!r}; it must be an UpdateSharding, "
            "such as UpdateSharding(mode=WeightUpdateSharding.AUTO, "
            "data_axes=('data',))"
        )
    if not isinstance(requested.mode, WeightUpdateSharding):
        raise ValueError(
            f"{name}: UpdateSharding.mode is {requested.mode!r}; it must be a "
            f"WeightUpdateSharding, such as WeightUpdateSharding('auto')"
        )
    if isinstance(requested.data_axes, str) or not requested.data_axes:
        raise ValueError(
            f"{name}: UpdateSharding.data_axes is {requested.data_axes!r}; it must be "
            "a sequence of the mesh axes that split the batch, such as ('data',)"
        )
    unknown = [axis for axis in requested.data_axes if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{name}: UpdateSharding.data_axes names {unknown[0]!r}, but the mesh has "
            f"{mesh.axis_names}"
        )
    if not isinstance(requested.argument, int) or not 0 <= requested.argument < count:
        raise ValueError(
            f"{name}: UpdateSharding.argument is {requested.argument!r}, but the "
            f"program has {count} arguments"
        )
    results = signature.outputs
    if not isinstance(results, Mapping) or requested.result not in results:
        raise ValueError(
            f"{name}: UpdateSharding.result is {requested.result!r}, but the program's "
            f"results are {sorted(results) if isinstance(results, Mapping) else 'one'}"
        )
    _check_state(
        name, requested, signature.inputs[requested.argument], results[requested.result]
    )
    first = len(tf.nest.flatten(signature.inputs[: requested.argument]))
    state_forms = module.in_forms[
        first : first + len(tf.nest.flatten(results[requested.result]))
    ]
    if any(form is None for form in state_forms):
        raise ValueError(
            f"{name}: the state, argument {requested.argument}, has leaves without a "
            "sharding: give its in_shardings, to have its weight updates sharded"
        )


def _check_state(name: str, requested: UpdateSharding, before, after) -> None:
    """Refuses a result that cannot be the state of the next step."""
    try:
        tf.nest.assert_same_structure(before, after)
    except (TypeError, ValueError) as e:
        given, returned = set(_paths(before)), set(_paths(after))
        raise ValueError(
            f"{name}: UpdateSharding.result is {requested.result!r}, which has another "
            f"structure than argument {requested.argument}, the state: missing "
            f"{sorted(given - returned)[:3]}, unknown {sorted(returned - given)[:3]}"
        ) from e
    pairs = zip(tf.nest.flatten(before), tf.nest.flatten(after), strict=True)
    for path, (old, new) in zip(_paths(before), pairs, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"{name}: {path} of the state is {old.dtype.name}{old.shape}, but in "
                f"result {requested.result!r} it is {new.dtype.name}{new.shape}: return"
                " it as it came, with out_shardings like its in_shardings"
            )


def _paths(structure) -> list[str]:
    """The path of each leaf, as reports name it; a key may be a path of Keras."""
    paths = nest.flatten_with_tuple_paths(structure)
    return [".".join(map(str, path)) for path, _ in paths]


def _state(
    signature: Signature, requested: UpdateSharding
) -> list[tuple[str, int, int]]:
    """The leaves of the state: name, number among arguments, number among results."""
    before = len(tf.nest.flatten(signature.inputs[: requested.argument]))
    paths = _paths(signature.inputs[requested.argument])
    numbers = list(range(len(tf.nest.flatten(signature.outputs))))
    results = tf.nest.pack_sequence_as(signature.outputs, numbers)[requested.result]
    pairs = zip(paths, tf.nest.flatten(results), strict=True)
    return [(path, before + i, result) for i, (path, result) in enumerate(pairs)]


def _stored(structure, forms):
    pairs = zip(tf.nest.flatten(structure), forms, strict=True)
    specs = [stored_spec(spec, form) for spec, form in pairs]
    return tf.nest.pack_sequence_as(structure, specs)


def machine_of(devices: Sequence[jax.Device] | None) -> Machine:
    """The cost model's figures for devices, by default for those of this process."""
    devices = devices or jax.devices()
    hardware = hardware_of(devices[0])
    is_tpu = isinstance(hardware, TpuKind)
    return Machine(
        hardware=hardware,
        torus=topology_of(devices),
        tiles=Tiles(rows=8, columns=128) if is_tpu else Tiles(),
    )
