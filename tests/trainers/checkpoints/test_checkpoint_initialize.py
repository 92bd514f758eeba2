"""Weights of other models, ours or TensorFlow's, begin a training where rules say."""

import dataclasses
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.checkpoints.checkpoint_initialize import (
    weights_from,
    with_weights,
)
from meshwright.trainers.checkpoints.checkpoint_rules import (
    InitializeFrom,
    Missing,
    parse_rule,
)
from meshwright.trainers.checkpoints.checkpoints import CheckpointError, Checkpoints
from tests.trainers.checkpoints.checkpoint_states import (
    abstract_of,
    files_of,
    flip_a_bit,
    mesh_sharding,
)

LAYERS, M, H = 3, 8, 16


def rows():
    return NamedSharding(mesh_sharding(2, 4).mesh, PartitionSpec("Y"))


def a_state(theta, *, ema=False):
    """Initial: zeros, with slots of ones."""
    state = NestedMap(step=jnp.zeros((), jnp.int32), theta=NestedMap(theta))
    state.slots = state.theta.map(jnp.ones_like)
    if ema:
        state.ema = state.theta.map(jnp.copy)
    return state


def model():
    """A decoder of stacked layers, its weights zero."""
    zeros = {
        "emb": {"w": jnp.zeros((H, M), device=mesh_sharding(2, 4))},
        "decoder": {
            "w": jnp.zeros((LAYERS, M, H), device=NamedSharding(
                mesh_sharding(2, 4).mesh, PartitionSpec(None, "X", "Y"))),
            "b": jnp.zeros((H,), device=rows()),
        },
    }  # fmt: skip
    return a_state(zeros, ema=True)


def random_array(name, *shape):
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


EMB, STACK, BIAS = (
    random_array("emb", H, M),
    random_array("stack", LAYERS, M, H),
    random_array("bias", H),
)


def assert_is(array, expected, like):
    np.testing.assert_array_equal(np.asarray(array), expected)
    assert array.sharding.is_equivalent_to(like.sharding, array.ndim)


def assert_initialized(state):
    """All weights come from the constants, each laid out as before."""
    before = model()
    for part in ("theta", "ema"):
        now, was = state[part], before[part]
        assert_is(now.emb.w, EMB, was.emb.w)
        assert_is(now.decoder.w, STACK, was.decoder.w)
        assert_is(now.decoder.b, BIAS, was.decoder.b)
    assert int(state.step) == 0
    np.testing.assert_array_equal(state.slots.emb.w, np.ones((H, M)))
    pointers = [
        leaf.unsafe_buffer_pointer() for leaf in map(first_shard, state.leaves())
    ]
    assert len(set(pointers)) == len(pointers)  # All can be donated.


def first_shard(array):
    return array.addressable_shards[0].data


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """The model_dir of an encoder with the constants as weights, and an average."""
    folder = tmp_path_factory.mktemp("other")
    state = a_state(
        {
            "emb": {"w": jax.device_put(EMB)},
            "encoder": {"w": jax.device_put(STACK, rows_of_stack()), "b": BIAS + 1},
            "head": {"w": jnp.ones((M, 5))},
        },
        ema=True,
    )
    state.theta.encoder.b = jnp.asarray(BIAS)
    state.ema.emb.w = jnp.asarray(EMB * 2)
    with Checkpoints(folder / "checkpoints") as saver:
        saver.save(7, state)
        state.theta.emb.w = jnp.asarray(EMB * 3)
        saver.save(9, state)
    return folder


def rows_of_stack():
    return NamedSharding(mesh_sharding(2, 4).mesh, PartitionSpec(None, "Y"))


def initialize_from(source, state):
    return with_weights(state, weights_from(source, abstract_of(state).theta))


ENCODER = (r"encoder\.(.*) -> decoder.\1",)


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_weights_of_another_run_are_renamed(other_run, folder, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    source = InitializeFrom(checkpoint=str(other_run / folder), step=7, rules=ENCODER)
    assert_initialized(initialize_from(source, model()))
    assert caplog.messages == [
        f"took 3 weights from {source.checkpoint}",
        "not used, 1 of its arrays:\n  head.w",
    ]


def test_newest_step_and_moving_average(other_run):
    source = InitializeFrom(checkpoint=str(other_run), rules=ENCODER)
    state = initialize_from(source, model())
    np.testing.assert_array_equal(state.theta.emb.w, EMB * 3)
    average = dataclasses.replace(source, part="ema", step=7)
    state = initialize_from(average, model())
    np.testing.assert_array_equal(state.theta.emb.w, EMB * 2)


def test_damaged_newest_step_of_another_run(other_run, tmp_path, caplog):
    folder = shutil.copytree(other_run, tmp_path / "copy")
    flip_a_bit(folder / "checkpoints" / "9" / "manifest" / "metadata")
    source = InitializeFrom(checkpoint=str(folder), rules=ENCODER)
    before = files_of(folder)
    assert_initialized(initialize_from(source, model()))
    assert "9 is damaged: manifest/metadata" in caplog.text
    assert files_of(folder) == before


def test_part_of_the_weights(other_run, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    source = InitializeFrom(checkpoint=str(other_run), step=7, only=["emb.*"])
    state = initialize_from(source, model())
    assert_is(state.theta.emb.w, EMB, model().theta.emb.w)
    np.testing.assert_array_equal(state.theta.decoder.w, 0 * STACK)
    assert "initialized 2 others:\n  decoder.b\n  decoder.w" in caplog.messages
    source = InitializeFrom(
        checkpoint=str(other_run), step=7, missing="initialize", unused="ignore"
    )
    assert source.missing is Missing.INITIALIZE
    again = initialize_from(source, model())
    np.testing.assert_array_equal(again.theta.decoder.b, 0 * BIAS)
    np.testing.assert_array_equal(again.theta.emb.w, EMB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"decoder.b float32\[16\] gets nothing .*decoder.w float32\[3, 8, 16\]"),
        ({"rules": (r"encodr\.(.*) -> decoder.\1", *ENCODER)},
         r"the rule 'encodr\\.\(.*' matches nothing \(nearest: encoder"),
        ({"rules": (*ENCODER, r"encoder\.w -> decoder.w")},
         r"the rule 'encoder\\.w -> decoder.w' matches nothing"),
        ({"rules": (r"encoder\.(.*) -> decodr.\1",)},
         r"encoder.b is to become decodr.b, which .* not have \(nearest: decoder.b"),
        ({"rules": (*ENCODER, "head.w -> emb.w")},
         "emb.w is to be both emb.w and head.w"),
        ({"rules": (r"encoder\.b -> decoder.b", r"encoder\.w -> decoder.w",
                    "emb.w -> unknown", r"head\.w -> emb.w")},
         r"head.w is float32\[8, 5\] in the checkpoint, emb.w is float32\[16, 8\] in"),
        ({"rules": ENCODER, "unused": "error"}, r"head.w float32\[8, 5\] goes nowhere"),
        ({"only": ("embb.*",)},
         r"only has 'embb\.\*', which matches no weight .*emb.w"),
        ({"rules": (r"encoder\.(.*) -> decoder.w[\1]",)},
         r"makes 'b' an index for encoder.b: it must be a number"),
        ({"only": ("decoder.b",), "rules": (r"encoder\.b -> decoder.b[99]",)},
         r"encoder.b is to be decoder.b\[99\], of decoder.b float32\[16\]"),
        ({"only": ("decoder.w",), "rules": (r"head\.w -> decoder.w[1]",)},
         r"head.w is float32\[8, 5\] .*decoder.w\[1\] is float32\[8, 16\]"),
        ({"only": ("head.*",), "missing": "initialize"}, "only has 'head"),
        ({"part": "ema", "only": ("decoder.*",), "missing": "initialize"},
         "there is nothing in it for this model"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_listed(other_run, changes, message):
    source = InitializeFrom(checkpoint=str(other_run), step=7, **changes)
    text = (
        rf"(?s)the weights of .*other.* do not fit this model:\n.*{message}.*see Init"
    )
    with pytest.raises(CheckpointError, match=text):
        initialize_from(source, model())


def test_layers_of_another_run_are_stacked(tmp_path):
    layers = {f"layer_{i}": {"w": jnp.asarray(w.T)} for i, w in enumerate(STACK)}
    theta = {"table": jnp.asarray(EMB.ravel()), "b": jnp.asarray(BIAS)}
    with Checkpoints(tmp_path) as saver:
        saver.save(1, a_state({**theta, "body": layers}))
    rules = (
        r"body\.layer_(\d+)\.w -> decoder.w[\1] transpose",
        "table -> emb.w reshape",
        "b -> decoder.b",
    )
    source = InitializeFrom(checkpoint=str(tmp_path), rules=rules)
    assert_initialized(initialize_from(source, model()))


def test_weights_of_64_bits_keep_them(tmp_path):
    table = np.arange(M * H).reshape(M, H) + 1 / 3

    def state(table):
        with jax.enable_x64(True):
            return a_state(
                {"w": jnp.asarray(table), "v": jnp.asarray(table.T)}, ema=True
            )

    with Checkpoints(tmp_path) as saver:
        saver.save(1, state(table))
    straight, turned = ("w -> w", "v -> v"), ("v -> w transpose", "w -> v transpose")
    for rules in (straight, turned):
        source = InitializeFrom(checkpoint=str(tmp_path), rules=rules)
        got = initialize_from(source, state(0 * table))
        for theta in (got.theta, got.ema):
            assert theta.w.dtype == theta.v.dtype == np.float64
            np.testing.assert_array_equal(theta.w, table)
            np.testing.assert_array_equal(theta.v, table.T)


def test_an_index_may_have_several_dims(tmp_path):
    grid = random_array("grid", 2, 3, 4)
    cells = {f"w_{i}_{j}": jnp.asarray(grid[i, j]) for i in range(2) for j in range(3)}
    with Checkpoints(tmp_path) as saver:
        saver.save(1, a_state(cells))
    rule = r"w_(\d+)_(\d+) -> stages.w[\1,\2]"
    source = InitializeFrom(checkpoint=str(tmp_path), rules=[rule])
    state = initialize_from(source, a_state({"stages": {"w": jnp.zeros([2, 3, 4])}}))
    np.testing.assert_array_equal(state.theta.stages.w, grid)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rules": ("a b",)}, "the rule 'a b' must read `name -> path`"),
        ({"rules": ("a -> b reshape transpose",)}, "must read `name -> path`"),
        ({"rules": ("(a -> b",)}, "begins with no regular expression: missing"),
        ({"rules": (r"(a) -> b\2",)}, r"has no group \\2: put parentheses"),
        ({"rules": "a -> b"}, "InitializeFrom.rules must be a list of lines"),
        ({"only": ("(",)}, r"InitializeFrom.only has '\(', no regular expression"),
        ({"missing": "eror"}, "missing is 'eror'; it must be 'error' or 'initialize'"),
        ({"unused": ""}, "unused is ''; it must be 'ignore' or 'error'"),
        ({"part": "slots"}, "part is 'slots'; it must be 'theta' or 'ema'"),
        ({"any_tokenizer": "yes"}, "any_tokenizer is 'yes'; it must be True or False"),
    ],
)
def test_rules_and_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        InitializeFrom(checkpoint="x", **fields)


def test_rules_of_a_file(tmp_path):
    file = tmp_path / "rules.txt"
    file.write_text("# ours\n\na -> b  # ours too\nc#d -> e\n")
    source = InitializeFrom(checkpoint="x", rules=["f -> g"], rules_file=str(file))
    assert source.read_rules() == [
        parse_rule(line) for line in ("f -> g", "a -> b", "c#d -> e")
    ]
    with pytest.raises(OSError, match="nowhere"):
        InitializeFrom(checkpoint="x", rules_file=str(tmp_path / "nowhere"))
    file.write_bytes(b"f\xff -> g")
    with pytest.raises(ValueError, match=f"rules_file {file} is not in UTF-8: .*0xff"):
        InitializeFrom(checkpoint="x", rules_file=str(file))


def test_no_such_checkpoint(tmp_path):
    source = InitializeFrom(checkpoint=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="there is no checkpoint in .*none"):
        initialize_from(source, model())
    assert not (tmp_path / "none").exists()


def tf1_checkpoint(folder, version):
    """As a TF 1 trainer leaves it: variables by name, layers apart, slots."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        arrays = {"lm/emb/table": EMB.T, "lm/softmax/bias": BIAS.reshape(4, 4)}
        for i, layer in enumerate(STACK):
            arrays[f"lm/layer_{i}/ffn/w"] = layer
            arrays[f"lm/layer_{i}/ffn/w/Adam"] = layer + 1
        arrays["global_step"] = np.int64(12)
        for name, array in arrays.items():
            tf.compat.v1.get_variable(name, initializer=array)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(write_version=version)
        saver.save(session, str(folder / "model.ckpt"), global_step=12)


def tf2_objects():
    """Objects of objects: names are paths of attributes."""
    return tf.train.Checkpoint(
        lm=tf.train.Checkpoint(
            emb=tf.train.Checkpoint(table=tf.Variable(EMB.T)),
            softmax=tf.train.Checkpoint(bias=tf.Variable(BIAS.reshape(4, 4))),
            **{
                f"layer_{i}": tf.train.Checkpoint(
                    ffn=tf.train.Checkpoint(w=tf.Variable(layer))
                )
                for i, layer in enumerate(STACK)
            },
        )
    )


def tf2_checkpoint(folder):
    manager = tf.train.CheckpointManager(tf2_objects(), str(folder), max_to_keep=1)
    manager.save(12)


TF_WRITERS = {
    "objects": tf2_checkpoint,
    "names": lambda folder: tf1_checkpoint(folder, tf.compat.v1.train.SaverDef.V2),
    "SavedModel": lambda folder: tf.saved_model.save(tf2_objects(), str(folder)),
    "format V1": lambda folder: tf1_checkpoint(folder, tf.compat.v1.train.SaverDef.V1),
}
TF_RULES = (
    "lm/emb/table -> emb.w transpose",
    r"lm/layer_(\d+)/ffn/w -> decoder.w[\1]",
    "lm/softmax/bias -> decoder.b reshape",
)


@pytest.mark.parametrize("writer", TF_WRITERS)
def test_tensorflow_checkpoints(tmp_path, caplog, writer):
    caplog.set_level(logging.INFO, logger="absl")
    TF_WRITERS[writer](tmp_path)
    rules = tmp_path / "rules.txt"
    rules.write_text("\n".join(TF_RULES))
    prefix = tf.train.latest_checkpoint(str(tmp_path))
    for path in (str(tmp_path), prefix) if prefix else (str(tmp_path),):
        source = InitializeFrom(checkpoint=path, rules_file=str(rules))
        assert_initialized(initialize_from(source, model()))
    if writer in ("names", "format V1"):
        assert "lm/layer_0/ffn/w/Adam" in caplog.text
    for field in ({"step": 12}, {"part": "ema"}):
        with pytest.raises(CheckpointError, match="step and part are for .*prefix"):
            initialize_from(dataclasses.replace(source, **field), model())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (TF_RULES[1:], r"emb.w float32\[16, 8\] gets nothing"),
        (("lm/emb/tabel -> emb.w", *TF_RULES),
         r"'lm/emb/tabel -> emb.w' matches nothing \(nearest: lm/emb/table"),
        (("lm/emb/table -> emb.w", *TF_RULES[1:]),
         r"lm/emb/table is float32\[8, 16\] in the .*, emb.w is float32\[16, 8\]"),
        ((r"lm/layer_[01]()/ffn/w -> decoder.w[0\1]", *TF_RULES),
         r"decoder.w\[0\] is to be both lm/layer_0/ffn/w and lm/layer_1/ffn/w"),
        ((r"lm/layer_1/ffn/w -> unknown", *TF_RULES),
         "become unknown, which this model does not have"),
        ((r"lm/layer_([01])/ffn/w -> decoder.w[\1]", TF_RULES[0], TF_RULES[2]),
         r"decoder.w float32\[3, 8, 16\] gets 2 of its 3 layers"),
        ((r"lm/layer_2/ffn/w -> decoder.w[3]", *TF_RULES),
         r"lm/layer_2/ffn/w is to be decoder.w\[3\], of decoder.w"),
        ((r"lm/layer_2/ffn/w -> decoder.w", *TF_RULES),
         r"lm/layer_2/ffn/w is to be decoder.w, of decoder.w float32\[3, 8, 16\]"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_a_tensorflow_checkpoint(tmp_path, rules, message):
    tf2_checkpoint(tmp_path)
    source = InitializeFrom(checkpoint=str(tmp_path), rules=rules)
    with pytest.raises(CheckpointError, match=message):
        initialize_from(source, model())


@pytest.mark.parametrize("writer", TF_WRITERS)
@pytest.mark.parametrize("damage", [flip_a_bit, lambda file: os.truncate(file, 100)])
def test_a_damaged_tensorflow_checkpoint_is_refused(tmp_path, writer, damage):
    TF_WRITERS[writer](tmp_path)
    source = InitializeFrom(checkpoint=str(tmp_path), rules=TF_RULES)
    for file in tmp_path.glob("*ckpt*"):
        if file.suffix == ".meta":
            continue  # The graph, of which nothing is read.
        kept = file.read_bytes()
        damage(file)
        with pytest.raises(
            CheckpointError, match=r"checkpoint .*ckpt.* cannot be read"
        ):
            initialize_from(source, model())
        file.write_bytes(kept)
    assert_initialized(initialize_from(source, model()))
