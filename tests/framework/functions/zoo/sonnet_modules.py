"""Sonnet's modules, nets and optimizers in a training step each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import sonnet as snt
import tensorflow as tf

from tests.framework.functions.zoo.zoo_cases import CLASSES, ROWS, Case, Made, trained

SEQUENCE, IMAGE, VOLUME = (6, 8), (6, 6, 8), (4, 4, 4, 8)
MODEL_COLUMNS = {"w$": [None, "model"]}


def _module(make: Callable[[], Any], *shapes: Sequence[int], **options: Any) -> Case:
    """A module of one or more inputs, trained by gradient descent."""
    called = options.pop("called", {})

    def made(*inputs) -> Made:
        module = snt.allow_empty_variables(make())
        return trained(
            lambda *x: module(*x, **called),
            inputs,
            trainable=lambda: module.trainable_variables,
            variables=lambda: module.variables,
        )

    return Case(make=made, shapes=shapes, **options)


def _norm(name: str, *args: Any, **options: Any) -> Case:
    called = {"is_training": True} if "Batch" in name else {}
    return _module(lambda: getattr(snt, name)(*args), IMAGE, called=called, **options)


def _unrolled(core: Callable[[], Any], shape: Sequence[int], **options: Any) -> Case:
    """A recurrent core over three steps of time."""

    def made(*inputs) -> Made:
        module = core()

        def call(x):
            state = module.initial_state(ROWS)
            return snt.dynamic_unroll(module, tf.stack([x, x * 2, x + 1]), state)

        return trained(
            call,
            inputs,
            trainable=lambda: module.trainable_variables,
            variables=lambda: module.variables,
        )

    return Case(make=made, shapes=[shape], **options)


def _whole_sequence(make: Callable[[], Any]) -> Case:
    """A core that takes [time, batch, features] at once."""

    def made(*inputs) -> Made:
        module = make()

        def call(x):
            return module(tf.transpose(x, [1, 0, 2]), module.initial_state(ROWS))

        return trained(call, inputs, trainable=lambda: module.trainable_variables)

    return Case(make=made, shapes=[SEQUENCE])


def _trainable_state(*inputs) -> Made:
    core, state = snt.GRU(8), snt.TrainableState(tf.zeros([8]))

    return trained(
        lambda x: core(x, state(ROWS)),
        inputs,
        trainable=lambda: [*core.trainable_variables, *state.trainable_variables],
    )


def _optimized(make: Callable[[], Any]) -> Case:
    def made(*inputs) -> Made:
        module, optimizer = snt.nets.MLP([16, CLASSES]), make()
        snt.allow_empty_variables(optimizer)
        return trained(
            module,
            inputs,
            trainable=lambda: module.trainable_variables,
            variables=lambda: [*module.variables, *optimizer.variables],
            apply=optimizer.apply,
        )

    return Case(make=made, layout={r"linear_\d/w": [None, "model"]})


def _averaged(make: Callable[[], Any]) -> Case:
    """A metric or a moving average, updated by each batch."""

    def made(x) -> Made:
        metric = make()
        metric(x)
        return lambda x: [metric(x), metric(x * 2)], lambda: metric.variables

    return Case(make=made)


def _quantized(name: str, **how: Any) -> Case:
    def made(*inputs) -> Made:
        quantizer = getattr(snt.nets, name)(
            embedding_dim=8, num_embeddings=16, commitment_cost=0.25, **how
        )
        snt.allow_empty_variables(quantizer)

        def call(x):
            out = quantizer(x, is_training=True)
            return [out[key] for key in sorted(out)]

        return trained(
            call,
            inputs,
            trainable=lambda: quantizer.trainable_variables,
            variables=lambda: quantizer.variables,
        )

    return Case(make=made, shapes=[SEQUENCE])


def _conv_lstm(name: str, rank: int) -> Case:
    shape = (*(4,) * rank, 2)
    core = getattr(snt, name)
    return _unrolled(lambda: core(shape, output_channels=4, kernel_shape=3), shape)


def _bottleneck(name: str) -> Case:
    block = getattr(snt.nets.resnet, name)
    return _module(
        lambda: block(
            channels=8,
            stride=2,
            use_projection=True,
            bn_config={"create_scale": True, "create_offset": True, "decay_rate": 0.9},
        ),
        IMAGE,
        called={"is_training": True},
    )


MODULES: dict[str, Case] = {
    "Linear": _module(lambda: snt.Linear(16), (8,), layout=MODEL_COLUMNS),
    "Bias": _module(snt.Bias, (8,)),
    "Embed": _module(
        lambda: snt.Embed(16, 8), (6,), below=16, layout={"embeddings": ["model", None]}
    ),
    "Flatten": _module(snt.Flatten, IMAGE),
    "Reshape": _module(lambda: snt.Reshape([2, 4]), (8,)),
    "BatchApply": _module(lambda: snt.BatchApply(snt.Linear(8)), SEQUENCE),
    "Deferred": _module(lambda: snt.Deferred(lambda: snt.Linear(8)), (8,)),
    "Sequential": _module(
        lambda: snt.Sequential([snt.Linear(16), tf.nn.gelu, snt.Linear(CLASSES)]),
        (8,),
        layout=MODEL_COLUMNS,
    ),
    "BatchNorm": _norm("BatchNorm", True, True),
    "BaseBatchNorm": _module(
        lambda: snt.BaseBatchNorm(
            True,
            True,
            snt.ExponentialMovingAverage(0.9),
            snt.ExponentialMovingAverage(0.9),
        ),
        IMAGE,
        called={"is_training": True},
    ),
    "GroupNorm": _norm("GroupNorm", 4),
    "InstanceNorm": _norm("InstanceNorm", True, True),
    "LayerNorm": _norm("LayerNorm", -1, True, True),
    "Conv1D": _module(
        lambda: snt.Conv1D(8, 3), SEQUENCE, layout={"w$": [None, None, "model"]}
    ),
    "Conv2D": _module(lambda: snt.Conv2D(8, 3), IMAGE),
    "Conv3D": _module(lambda: snt.Conv3D(8, 3), VOLUME),
    "Conv1DTranspose": _module(lambda: snt.Conv1DTranspose(8, 3, stride=2), SEQUENCE),
    "Conv2DTranspose": _module(lambda: snt.Conv2DTranspose(8, 3, stride=2), IMAGE),
    "Conv3DTranspose": _module(lambda: snt.Conv3DTranspose(8, 3, stride=2), VOLUME),
    "DepthwiseConv2D": _module(lambda: snt.DepthwiseConv2D(3), IMAGE),
    "VanillaRNN": _unrolled(lambda: snt.VanillaRNN(8), (8,)),
    "LSTM": _unrolled(lambda: snt.LSTM(8), (8,), layout={"w_[ih]": [None, "model"]}),
    "GRU": _unrolled(lambda: snt.GRU(8), (8,)),
    "DeepRNN": _unrolled(lambda: snt.DeepRNN([snt.LSTM(8), tf.tanh, snt.GRU(8)]), (8,)),
    "Conv1DLSTM": _conv_lstm("Conv1DLSTM", 1),
    "Conv2DLSTM": _conv_lstm("Conv2DLSTM", 2),
    "Conv3DLSTM": _conv_lstm("Conv3DLSTM", 3),
    "UnrolledLSTM": _whole_sequence(lambda: snt.UnrolledLSTM(8)),
    "TrainableState": Case(make=_trainable_state),
    "Mean": _averaged(snt.Mean),
    "Sum": _averaged(snt.Sum),
    "ExponentialMovingAverage": _averaged(lambda: snt.ExponentialMovingAverage(0.9)),
    "Adam": _optimized(lambda: snt.optimizers.Adam(0.1)),
    "Momentum": _optimized(
        lambda: snt.optimizers.Momentum(0.1, 0.9, use_nesterov=True)
    ),
    "RMSProp": _optimized(
        lambda: snt.optimizers.RMSProp(0.1, momentum=0.9, centered=True)
    ),
    "SGD": _optimized(lambda: snt.optimizers.SGD(0.1)),
    "MLP": _module(lambda: snt.nets.MLP([16, CLASSES]), (8,), layout=MODEL_COLUMNS),
    "Cifar10ConvNet": _module(
        lambda: snt.nets.Cifar10ConvNet(output_channels=(8, 16), strides=(1, 2)),
        (8, 8, 3),
        called={"is_training": True},
    ),
    "BottleNeckBlockV1": _bottleneck("BottleNeckBlockV1"),
    "BottleNeckBlockV2": _bottleneck("BottleNeckBlockV2"),
    "ResNet": _module(
        lambda: snt.nets.ResNet(
            [1, 1, 1, 1], CLASSES, channels_per_group_list=[8, 16, 16, 32]
        ),
        (16, 16, 3),
        called={"is_training": True},
    ),
    "VectorQuantizer": _quantized("VectorQuantizer"),
    "VectorQuantizerEMA": _quantized("VectorQuantizerEMA", decay=0.9),
}
ABSTRACT = {"LSTMState", "Metric", "Module", "Optimizer", "RNNCore", "UnrolledRNN"}
"""Classes that compute nothing by themselves."""
UNTESTED = {
    "BlockGroup": "a part of ResNet",
    "CrossReplicaBatchNorm": "it is for the replicas of a tf.distribute.Strategy",
    "Dropout": "TF's jit draws other numbers in each program: it has a test of its own",
    "Replicator": "a tf.distribute.Strategy",
    "ResNet50": "ResNet of other sizes",
    "TpuReplicator": "a tf.distribute.Strategy",
}
"""Classes without a case, and why."""


def exported() -> set[str]:
    """The names of Sonnet's classes."""
    modules = snt, snt.nets, snt.nets.resnet, snt.optimizers, snt.distribute
    classes = [inspect.getmembers(module, inspect.isclass) for module in modules]
    return {name for members in classes for name, _ in members}
