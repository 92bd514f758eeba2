"""Hypotheses that share a cache against those that have a cache each."""

import dataclasses
import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Layer
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import SequenceAttention, ShardingPlan
from meshwright.layers.stacks.beams import BeamCaches
from meshwright.layers.stacks.pipelines.pipeline import Pipeline
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.stacks.sequential import Sequential
from meshwright.layers.transformer import TransformerLayer, transformer_layer
from meshwright.tasks.text.decoding import BeamSearch
from tests.tasks.text.test_continuation import (
    END,
    MODELS,
    SIZES,
    continuation,
    model,
    weights_of,
    with_layers_behind,
)

N = 5
# Of different lengths; with prefixes of two tokens.
PROMPTS = [[1, 70, 80, 90, 100, 110, 120, 130], [1, 33], [1, 200, 7], [50, 60]]
SHARDY, GSPMD = Partitioner


def search(caches, beams=3):
    return BeamSearch(beams=beams, caches=caches)


def model_of(name):
    if name == "layers behind":
        return with_layers_behind(model())
    return model(name)


def found(task, theta, caches):
    """`ids` and `scores` of continuations, by TF's kernels."""
    run, batch = continuation(task, search(caches), PROMPTS, length=N)
    return [t.numpy() for t in tf.function(run, autograph=False)(theta, batch)]


@functools.cache
def alone(name):
    """Weights, and what hypotheses with a cache each find on one device."""
    task = model_of(name)
    theta = weights_of(task)
    return theta, found(task, theta, BeamCaches.REORDERED)


def assert_same(got, want):
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


@pytest.mark.parametrize("name", [*MODELS, "layers behind"])
def test_hypotheses_are_those_of_a_cache_each(name):
    theta, want = alone(name)
    assert_same(found(model_of(name), theta, BeamCaches.FLAT), want)
    assert len(np.unique(want[0])) > 6


def plan(*mesh):
    return ShardingPlan(
        mesh_axes=("stage", "data", "model"),
        mesh_shape=mesh,
        weights={"stages": "stage", "heads": "model", "experts": "model"},
        activations={
            "batch": ("data", "stage"),
            "microbatch": "data",
            "heads": "model",
            "experts": "model",
        },
    )


def on_mesh(task, theta, split, partitioner, caches=BeamCaches.FLAT):
    """The program, and what it finds."""
    specs = task.weights()
    run, batch = continuation(task, search(caches), PROMPTS, split, length=N)
    program = compile_program(
        run,
        tf.nest.map_structure(tf.TensorSpec.from_tensor, [theta, batch]),
        split.mesh,
        in_shardings=[specs.map(lambda spec: spec.sharding(split)), None],
        partitioner=partitioner,
        name="continuation",
    )
    args = tf.nest.map_structure(lambda t: t.numpy(), (theta, batch))
    return program, program.unshard(program(*args))


@pytest.mark.parametrize(
    ("name", "stages", "mesh", "partitioner"),
    [
        ("rotary", None, (1, 4, 2), SHARDY),
        ("relative", None, (1, 4, 2), GSPMD),
        ("vectors", 2, (2, 2, 2), SHARDY),
        ("top-2 experts", 2, (2, 2, 2), GSPMD),
    ],
)
def test_eight_devices_find_what_one_finds(name, stages, mesh, partitioner):
    theta, want = alone(name)
    task = model_of(name)
    if stages is not None:
        stack = Pipeline(stack=task.stack, num_stages=stages, num_microbatches=1)
        task = dataclasses.replace(task, stack=stack)
        theta = NestedMap(theta, stack=theta.stack.map(stack.by_stage))
    program, got = on_mesh(task, theta, plan(*mesh), partitioner)
    assert_same(got, want)
    # A device has one of the four rows at a time, and half of the heads.
    places = 7 + 3 * N
    caches = re.findall(rf"f32\[[\d,]*?(\d+),{places},(\d),4\]", program.hlo_text())
    assert {rows for rows, _ in caches} == {"1"}
    assert max(heads for _, heads in caches) <= "2"


ROWS = {"batch": ("data", "stage"), "heads": "model"}
TOKENS = {"batch": "data", "sequence": "model"}


@pytest.mark.parametrize(
    ("activations", "mesh", "more", "partitioner"),
    [
        (ROWS, (1, 8, 1), {}, GSPMD),
        (ROWS, (1, 1, 8), {"weights": {"heads": "model"}}, SHARDY),
        (TOKENS, (1, 2, 4), {}, GSPMD),
        (TOKENS, (1, 2, 4), {"sequence_attention": SequenceAttention.RING}, SHARDY),
    ],
    ids=["fewer rows than devices", "fewer heads", "tokens", "ring"],
)
def test_any_split_finds_the_same(activations, mesh, more, partitioner):
    """Of four rows, four heads and two of keys, and of a cache's 22 places."""
    theta, want = alone("rotary")
    split = ShardingPlan(
        mesh_axes=("stage", "data", "model"),
        mesh_shape=mesh,
        activations=activations,
        **more,
    )
    _, got = on_mesh(model_of("rotary"), theta, split, partitioner)
    assert_same(got, want)


def test_no_cache_is_reordered():
    """What changes places after a step is the mask alone."""
    theta, want = alone("rotary")
    for caches, count in ((BeamCaches.REORDERED, True), (BeamCaches.FLAT, False)):
        program, got = on_mesh(
            model_of("rotary"), theta, plan(1, 1, 1), GSPMD, caches=caches
        )
        assert_same(got, want)
        # Rows of a cache [layers, B, K, T, heads, D] that are chosen from.
        chosen = re.findall(r"select\S* = f32\[2,4,3,3,\d+,\d,4\]", program.hlo_text())
        assert bool(chosen) == count


class Running(Layer):
    """Keeps a sum of all tokens in place of their keys."""

    def weights(self):
        return NestedMap()

    def fprop(self, ctx, theta, x, **inputs):
        return x

    def init_cache(self, ctx, batch, length):
        return NestedMap(sum=tf.zeros([batch, 16]))

    def step(self, ctx, theta, x, cache, position, **inputs):
        return x, cache


class Adding(TransformerLayer):
    """Keeps more than its attention does."""

    def init_cache(self, ctx, batch, length):
        cache = super().init_cache(ctx, batch, length)
        return NestedMap(cache, sum=tf.zeros([batch, 16]))


def test_running_states_are_refused():
    layer = transformer_layer(**SIZES, hidden_dims=8)
    inside = dataclasses.replace(layer, attention=Running())
    fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
    for body, path in (
        (Sequential(layers=(layer, Adding(**fields))), "layers[1] is Adding"),
        (Sequential(layers=(layer, Running())), "layers[1] is Running"),
        (Sequential(layers=(layer, inside)), "layers[1].attention is Running"),
    ):
        stack = Repeat(body=body, num_layers=2)
        task = dataclasses.replace(model(), stack=stack)
        message = f"LanguageModel.stack.body.{path}, which may keep a running state"
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            found(task, weights_of(task), BeamCaches.FLAT)
        assert "set BeamSearch.caches = %BeamCaches.REORDERED" in str(error.value)


def test_hypotheses_end(monkeypatch):
    """At tokens that are in the middle of what was found, some of a row and not all."""
    theta, (ids, _) = alone("rotary")
    end = int(ids[0, 0, 3])
    assert end != END
    task = model_of("rotary")
    monkeypatch.setattr(type(task.text), "end_id", end)
    want, got = (found(task, theta, caches) for caches in BeamCaches)
    assert_same(got, want)
    assert (got[0] == end).any()
