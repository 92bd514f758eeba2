"""Layers and lines of ops whose names are alike, and Keras left as it was."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.compiler.lowering.sources import Sources
from meshwright.framework.sharding.origins import keras_names

LAYERS = keras.layers


class Own(keras.Model):
    """A scope of its own before, and one after, layers of the same names."""

    def __init__(self):
        super().__init__(name="own")
        self.up, self.down = LAYERS.Dense(4, name="up"), LAYERS.Dense(4, name="down")
        self.times = LAYERS.Multiply(name="times")

    def call(self, x):
        with tf.name_scope("down"):
            x = tf.tanh(x)
        x = self.times([x, self.down(self.up(x))])
        with tf.name_scope("up"):
            x = tf.exp(x)
        return self.times([x, self.up(x)])  # Again.


def part(name):
    x = keras.Input((4,))
    return keras.Model(x, LAYERS.Dense(4, name="dense")(x), name=name)


def traced(model):
    """The graph of a model's gradient, and where its ops come from."""
    x = np.ones((2, 4), np.float32)
    model(x)

    @tf.function
    def step(x):
        with keras_names(), tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    concrete = step.get_concrete_function(x)
    return concrete.graph, Sources(concrete)


def test_a_scope_of_the_users_is_not_the_layer_of_its_name():
    graph, sources = traced(Own())
    layers = {
        op.type: {
            sources.find(o.name).layer
            for o in graph.get_operations()
            if o.type == op.type and "gradient" not in o.name
        }
        for op in graph.get_operations()
    }
    assert layers["Tanh"] == layers["Exp"] == {"own"}
    assert layers["MatMul"] == {"own.up", "own.down"}
    assert layers["Mul"] == {"own.times"}


def test_a_gradient_has_no_line_of_another_call_of_its_layer():
    graph, sources = traced(Own())
    calls = {sources.find(f"own/times/Mul{n}").line for n in ("", "_1")}
    assert len(calls) == 2
    gradients = [
        sources.find(op.name).line
        for op in graph.get_operations()
        if op.name.startswith("gradient_tape/own/times/Mul")
    ]
    assert gradients and not calls & set(gradients)


def test_layers_of_one_path_have_all_names_around_them():
    x = keras.Input((4,))
    graph, sources = traced(keras.Model(x, part("b")(part("a")(x)), name="whole"))
    layers = {
        sources.find(op.name).layer
        for op in graph.get_operations()
        if op.type == "MatMul"
    }
    assert layers == {"whole.a.dense", "whole.b.dense"}


def test_a_variable_of_one_of_two_models_is_not_found_by_the_name_of_its_model():
    first, second = part("first"), part("second")
    both = mw.function(lambda x: first(x) + second(x), mesh=mw.DeviceMesh(("X",), (8,)))
    program = both.program(np.ones((8, 4), np.float32))
    assert str(program.why("dense/kernel:1")).startswith("argument 1.dense/kernel:1 ")
    with pytest.raises(ValueError, match="near it are .*'1.dense/kernel:1'"):
        program.why("second/dense/kernel")


def test_keras_is_as_before_after_an_error():
    before = keras.src.backend.name_scope.__enter__

    def fail(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        mw.function(fail, mesh=mw.DeviceMesh(("X",), (8,)))(tf.zeros([8]))
    assert keras.src.backend.name_scope.__enter__ is before


def test_threads_that_trace_at_once_leave_keras_and_each_other_alone():
    before = keras.src.backend.name_scope.__enter__
    inside, over = threading.Event(), threading.Event()

    def trace():
        with keras_names():
            inside.set()
            over.wait()

    thread = threading.Thread(target=trace)
    with keras_names():
        thread.start()
        inside.wait()
    layer, x = LAYERS.Dense(4, name="up"), keras.ops.ones((2, 4))
    layer(x)
    graph = tf.function(lambda x: layer(layer(x))).get_concrete_function(x).graph
    names = [op.name for op in graph.get_operations() if op.type == "MatMul"]
    assert len(names) == 2 and "up/MatMul_1" not in names  # As Keras has it.
    over.set()
    thread.join()
    assert keras.src.backend.name_scope.__enter__ is before
