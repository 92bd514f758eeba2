"""A SavedModel of an experiment: plain TensorFlow loads and runs it.

The model is traced once more, with a batch of any size and for one device. What is left
of the mesh in the graph, the annotations, is removed: on one device it means nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.framework import kernels

from meshwright.framework.compiler.lowering.lower import nodes_of
from meshwright.framework.modeling.layer import WeightSpec
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

SERVE, EVALUATE = "serving_default", "evaluate"
# Plain ops that do the same on one device. XLA wants a slice's size beforehand.
_PLAIN = {"XlaSharding": "Identity", "XlaDynamicSlice": "Slice"}
_RENAMED = {"Slice": {"Tindices": "Index"}}
# Changed functions get this prefix: TF knows those of the model by their names.
_PREFIX = "plain_"


class ExportError(RuntimeError):
    """What cannot be exported, and what to do about it."""


def export_saved_model(
    experiment: Experiment,
    weights: NestedMap,
    folder: str | os.PathLike,
    *,
    file_bytes: int = 2 * 10**9,
) -> None:
    """Writes a SavedModel with two signatures, for batches of any size B.

    `serving_default` answers as `Serving.serve` does, and `evaluate` gives the sums of
    `Task.loss`, which over batches make the trainer's metrics. Arguments and results
    are named by their paths. The weights are `tf.Variable`s of logical shapes, in
    nested dictionaries as the model has them, under `weights`.

    Args:
      experiment: the experiment, whose model is exported.
      weights: nested map of host arrays in logical shapes.
      folder: the folder to write; it must not exist.
      file_bytes: the largest file of variables; those that take more are split.

    Raises:
      ExportError: the task serves nothing, or an op has no kernel in plain TF.
      ValueError: a layer does not take a batch of unknown size.
    """
    task, programs = experiment.task, _on_one_device(experiment)
    serving = task.serving
    if serving is None:
        raise ExportError(
            f"{type(task).__name__} serves nothing, so that a SavedModel of it would "
            f"be of no use: {task.to_serve}"
        )
    module = tf.Module()
    variables = weights.map_with_path(_variable, programs.weights)
    module.weights = _plain_dict(variables)
    signatures = {
        SERVE: _signature(programs.serve_step, variables, serving.spec(None)),
        EVALUATE: _signature(programs.eval_step, variables, task.batch_spec(None)),
    }
    split = tf.train.experimental.MaxShardSizePolicy(max_shard_size=file_bytes)
    options = tf.saved_model.SaveOptions(experimental_sharding_callback=split)
    tf.saved_model.save(module, os.fspath(folder), signatures, options)


def _on_one_device(experiment: Experiment) -> StepPrograms:
    """The programs of the same model, on a mesh of one device."""
    axes = len(experiment.plan.mesh_shape)
    plan = dataclasses.replace(experiment.plan, mesh_shape=(1,) * axes, device_ids=None)
    return StepPrograms(dataclasses.replace(experiment, plan=plan))


def _variable(path: str, value: np.ndarray, spec: WeightSpec) -> tf.Variable:
    return tf.Variable(
        value, name=path.replace(".", "/"), trainable=not spec.is_statistic
    )


def _plain_dict(tree: NestedMap) -> dict:
    return {
        name: _plain_dict(value) if isinstance(value, NestedMap) else value
        for name, value in tree.items()
    }


def _signature(
    fn: Callable[[NestedMap, NestedMap], NestedMap],
    variables: NestedMap,
    batch: NestedMap,
):
    """A concrete function of the batch's tensors, without XLA's ops.

    They are named by their paths, with `_` in place of dots.
    """
    theta = variables.map(lambda v: tf.TensorSpec(v.shape, v.dtype))
    batch = NestedMap(batch)

    def flat(*leaves):
        count = len(theta.leaves())
        out = fn(theta.pack(leaves[:count]), batch.pack(leaves[count:]))
        return dict(NestedMap(out).items_by_path())

    traced = tf.function(flat, autograph=False).get_concrete_function(
        *theta.leaves(), *batch.leaves()
    )
    graph = plain_graph(traced.graph.as_graph_def())
    inputs = [tensor.name for tensor in traced.inputs]
    outputs = traced.structured_outputs

    def call(**tensors):
        leaves = [v.read_value() for v in variables.leaves()]
        # TF checks no shapes of what it has loaded.
        leaves += [
            tf.ensure_shape(
                tensors[name := _argument(path)],
                spec.shape,
                name=f"{name}_must_have_this_shape",
            )
            for path, spec in batch.items_by_path()
        ]
        results = tf.graph_util.import_graph_def(
            graph,
            input_map=dict(zip(inputs, leaves, strict=True)),
            return_elements=[outputs[path].name for path in outputs],
            name="",
        )
        return dict(zip(outputs, results, strict=True))

    arguments = {
        _argument(path): tf.TensorSpec(spec.shape, spec.dtype, name=_argument(path))
        for path, spec in batch.items_by_path()
    }
    return tf.function(call, autograph=False).get_concrete_function(**arguments)


def _argument(path: str) -> str:
    return path.replace(".", "_")


def plain_graph(graph: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """A graph that needs no mesh and no XLA program around it.

    Raises:
      ExportError: an op has no kernel of its own.
    """
    plain = graph_pb2.GraphDef.FromString(graph.SerializeToString())
    functions = {f.signature.name for f in plain.library.function}
    for function in plain.library.function:
        function.signature.name = _PREFIX + function.signature.name
        for attributes in function.arg_attr.values():
            # TF itself calls some functions with other shapes too.
            attributes.attr.pop("_output_shapes", None)
    for node in nodes_of(plain):
        _make_plain(node)
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                if called.name in functions:
                    called.name = _PREFIX + called.name
        if node.op in functions:
            node.op = _PREFIX + node.op
        elif not _has_kernel(node.op):
            raise ExportError(
                f"op {node.name!r} is a {node.op}, which only a program for a mesh "
                "runs: leave out of the model what makes it, or export --what=bundle"
            )
    return plain


def _make_plain(node: node_def_pb2.NodeDef) -> None:
    node.attr.pop("_gradient_op_type", None)  # Names a function of this process.
    if node.op not in _PLAIN:
        return
    node.op = _PLAIN[node.op]
    kept = {"T"}
    for before, after in _RENAMED.get(node.op, {}).items():
        node.attr[after].CopyFrom(node.attr[before])
        kept.add(after)
    for name in [n for n in node.attr if n not in kept and not n.startswith("_")]:
        del node.attr[name]


@functools.cache
def _has_kernel(op: str) -> bool:
    structural = {"Placeholder", "PartitionedCall", "StatefulPartitionedCall"}
    return op in structural or any(
        kernel.device_type in ("CPU", "DEFAULT")
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
    )
