"""Rows of a layout and reports have Keras's paths, and say what decided."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import PartitionSpec as P

import meshwright.framework as mw
from meshwright.framework.functions.keras_layouts import TensorParallel
from meshwright.framework.functions.layouts.layout import LayoutTable, layout_notes
from meshwright.framework.functions.layouts.split_weights import split_weights
from meshwright.framework.functions.mesh_variable import value_of
from meshwright.framework.sharding.stored_form import StoredForm
from tests.framework.hlo.why.why_programs import flat

LAYERS = keras.layers
MESH = mw.DeviceMesh(("data", "model"), (2, 4))
X = np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32)
Y = np.arange(16) % 4


class Block(LAYERS.Layer):
    """A layer of layers, without `build`."""

    def __init__(self, **how):
        super().__init__(**how)
        self.up = LAYERS.Dense(32, "relu", name="up")
        self.down = LAYERS.Dense(12, name="down")
        self.dropout = LAYERS.Dropout(0.1, seed=1)

    def call(self, x, training=False):
        return self.dropout(self.down(self.up(x)), training=training)


class Sub(keras.Model):
    """A subclass with layers and layers of layers, a weight and a metric of its own."""

    def __init__(self, **how):
        super().__init__(**how)
        self.first = Block(name="first")
        self.second = Block(name="second")
        self.head = LAYERS.Dense(4, name="head")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x, training=False):
        y = self.second(self.first(x, training=training), training=training)
        return self.head(y) * self.scale

    def train_step(self, data):
        logs = super().train_step(data)
        self.norm.update_state(logs["loss"])
        return logs


ROWS = {
    "^sub/first/up/kernel": [None, "model"],
    "^sub/second/down/kernel": ["model", None],
    "adam/sub_first_up_kernel_velocity": ["model", None],
}


def compiled(how="unbuilt", change=lambda model: model):
    """The model, trained for two steps; see `test_rows_have_the_paths_of_keras`."""
    keras.utils.set_random_seed(1)
    model = Sub(name="sub")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(name="adam")
    model.compile(adam, loss, metrics=["accuracy"], jit_compile=True)
    if how == "built":
        model.build((None, 12))
    if how == "called":
        model(X)
    return change(model)


def fitted(model):
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    return [*history.values(), *model.get_weights()]


def assert_alike(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def shard_shape(variable):
    return value_of(variable._value).array.addressable_data(0).shape


@pytest.mark.parametrize(
    ("how", "partitioner"),
    [
        ("unbuilt", mw.Partitioner.SHARDY),
        ("built", mw.Partitioner.SHARDY),
        ("called", mw.Partitioner.GSPMD),
    ],
)
def test_rows_have_the_paths_of_keras(how, partitioner):
    ours = compiled(
        how, lambda m: mw.keras.distribute(m, MESH, ROWS, partitioner=partitioner)
    )
    assert_alike(fitted(ours), fitted(compiled(how)))
    assert shard_shape(ours.first.up.kernel) == (12, 8)
    assert shard_shape(ours.second.down.kernel) == (8, 12)
    by_path = {variable.path: variable for variable in ours.optimizer.variables}
    assert shard_shape(by_path["adam/sub_first_up_kernel_velocity"]) == (3, 32)


def test_arguments_and_reasons_have_the_paths_of_keras():
    model = mw.keras.distribute(compiled("called"), MESH, ROWS)
    program = mw.keras.program(model, X, Y, batch_size=8)
    kept = model.variables + model.optimizer.variables + model.metrics_variables
    state, read, *_ = program.inputs
    assert {*state, *read} <= {variable.path for variable in kept}
    assert {v.path for v in model.weights} <= {*state, *read}
    assert "[_,model]" in str(program.why("first/up/kernel"))
    assert "0.sub/second/down/kernel" in str(mw.explain(program))


def test_a_layout_map_has_the_paths_of_keras():
    devices = [f"cpu:{i}" for i in range(8)]
    mesh = keras.distribution.DeviceMesh((2, 4), ("data", "model"), devices)
    rows = keras.distribution.LayoutMap(mesh)
    rows["first/up/kernel"] = (None, "model")
    model = mw.keras.distribute(compiled(), MESH, rows)
    assert_alike(fitted(model), fitted(compiled()))
    assert shard_shape(model.first.up.kernel) == (12, 8)
    assert shard_shape(model.second.up.kernel) != (12, 8)


def test_a_name_that_only_tf_gives_is_no_path():
    with pytest.raises(ValueError, match="'sub/kernel' .* sub/first/up/kernel"):
        mw.keras.distribute(compiled("called"), MESH, {"sub/kernel": [None, "model"]})


def test_a_backup_goes_on_where_layers_are_split_by_their_paths(tmp_path):
    def trained(layout, epochs):
        model = mw.keras.distribute(compiled("unbuilt"), MESH, layout)
        saved = [mw.keras.backup(tmp_path / "backup")]
        model.fit(X, Y, epochs=epochs, shuffle=False, verbose=0, callbacks=saved)
        return model.get_weights()

    trained("data", 1)
    whole = mw.keras.distribute(compiled("unbuilt"), MESH, ROWS)
    whole.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert_alike(trained(ROWS, 2), whole.get_weights())


def two(units, layout, **how):
    """Two layers, and the program of their train step."""
    layers = [LAYERS.Dense(units, "relu", name="a"), LAYERS.Dense(4, name="b")]
    model = keras.Sequential([keras.Input((12,)), *layers], name="tiny")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    mw.keras.distribute(model, how.pop("mesh", MESH), layout, **how)
    return model, mw.keras.program(model, X, Y)


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_an_axis_is_traced_to_the_row_that_gives_it(partitioner):
    rows = {"a/kernel": [None, "model"]}
    _, program = two(32, rows, partitioner=partitioner)
    row = "from argument 0.tiny/a/kernel [_,model], by row 'a/kernel' of the layout"
    given = str(program.why("argument 0.tiny/a/kernel"))
    assert "model on dim 1 is given by row 'a/kernel' of the layout\n" in given
    inferred = flat(program.why("argument 0.tiny/b/kernel"))
    assert f"model on dim 0 is {row} forth" in inferred and "Relu (" in inferred
    tensors = {t.op_name: t for t in mw.explain(program, reasons=True).tensors}
    assert tensors["0.tiny/a/kernel"].annotated
    assert not tensors["0.tiny/b/kernel"].annotated
    (one,) = tensors["0.tiny/b/kernel"].provenances
    assert f"from {one.origin}" == row


def test_what_an_axis_does_not_divide_is_told(caplog):
    model, program = two(30, "tensor")
    why = '"tensor" would split dim 1 by model, but 4 does not divide 30; change the'
    assert why in flat(program.why("argument 0.tiny/a/kernel"))
    assert why in flat(mw.explain(program))
    assert f"not split are 2, such as tiny/a/kernel: {why}" in caplog.text
    model.fit(X, Y, verbose=0)
    assert caplog.text.count("such as tiny/a/kernel") == 1
    caplog.set_level("INFO", logger="absl")
    two(30, {"a/kernel": [None, "model"]})
    assert caplog.records[-1].levelname == "INFO"  # Few bytes are padded.
    padded = "tiny/a/kernel (12, 30) to (12, 32)"
    assert f"padded, as the axes do not divide them: {padded}" in caplog.text


@pytest.mark.parametrize(
    ("layout", "name", "why"),
    [
        ("data", "a/kernel", 'is not split, by the layout "data", which splits no'),
        ("fsdp", "b/bias", '"fsdp", which splits no dim shorter than 8, the number'),
        ("tensor", "b/bias", '"tensor" splits only embeddings, Dense and'),
        ({"a/kernel": [None, "model"]}, "b/bias", "no row of the layout is for it"),
    ],
    ids=["data", "fsdp", "tensor", "table"],
)
def test_what_a_layout_leaves_has_a_reason(layout, name, why):
    _, program = two(32, layout, weight_update_sharding="off")
    assert why in flat(program.why(f"argument 0.tiny/{name}"))


@pytest.mark.parametrize(("units", "is_warned_of"), [(2, False), (512, True)])
def test_padding_of_many_bytes_is_a_warning(units, is_warned_of):
    weight = tf.Variable(tf.zeros([1030, units]), name="kernel")
    form = StoredForm((1030, units), tf.float32, mw.Sharding.parse(MESH, "[model,_]"))
    line, is_of_note = layout_notes(LayoutTable({}), MESH, [weight], [form])
    assert is_of_note == is_warned_of
    padded = f"padded, as the axes do not divide them: kernel (1030, {units}) to (1032,"
    assert padded in line


def test_where_variables_are():
    """By path, and drawn."""
    model = compiled("called")
    mw.keras.distribute(model, MESH, "fsdp")
    kernel = model.first.up.kernel
    with pytest.raises(ValueError, match="sub: no program has placed its variables"):
        mw.keras.shardings(model)
    with pytest.raises(TypeError, match="call fit, evaluate or predict first"):
        mw.visualize(kernel)
    fitted(model)
    placed = mw.keras.shardings(model)
    paths = [v.path for v in (*model.variables, *model.optimizer.variables)]
    assert [*placed][: len(paths)] == paths  # Then those of metrics.
    split = {path: str(sharding) for path, sharding in placed.items()}
    assert split[kernel.path] == "[_,data.model]"
    assert mw.visualize(kernel).across == "dim 1 in 8 (data, model)"
    assert str(mw.visualize(kernel.value)) == str(mw.visualize(kernel))


class Game(keras.Model):
    """Two networks, each with an optimizer that the model does not know as its own."""

    def __init__(self):
        super().__init__(name="game")
        self.first = LAYERS.Dense(8, name="first")
        self.second = LAYERS.Dense(4, name="second")
        self.unused = LAYERS.Dense(4, name="unused")
        self.unused.build((None, 4))
        self.of_first = keras.optimizers.Adam(name="of_first")
        self.of_second = keras.optimizers.SGD(momentum=0.9, name="of_second")

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(self(data[0]) ** 2)
        for layer, by in ((self.first, self.of_first), (self.second, self.of_second)):
            weights = layer.trainable_variables
            by.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("partitioner", list(mw.Partitioner))
def test_slots_of_several_optimizers_are_among_the_shardings(partitioner):
    model = Game()
    model.compile("adam")  # Which it does not use.
    mw.keras.distribute(
        model, MESH, {"first/kernel": [None, "model"]}, partitioner=partitioner
    )
    model.predict(X, verbose=0)
    of_weights = {
        "game/first/kernel": "[_,model]",
        "game/first/bias": "[model]",
        "game/second/kernel": "[model,_]",
        "game/second/bias": "[_]",
        "unused/kernel": "None",
        "unused/bias": "None",
    }
    assert shown(model) == of_weights
    model.fit(X, Y, verbose=0)
    slots = {k: v for k, v in shown(model).items() if k not in of_weights}
    ends = [f"{w}_{s}" for w in ("kernel", "bias") for s in ("momentum", "velocity")]
    assert {*slots} == {
        *(f"of_first/game_first_{end}" for end in ends),
        *(f"of_second/game_second_{w}_momentum" for w in ("kernel", "bias")),
        *(f"of_{n}/{v}" for n in ("first", "second") for v in VALUES),
    }
    assert slots["of_first/game_first_kernel_velocity"] == "[_,model]"
    assert slots["of_second/game_second_kernel_momentum"] == "[model,_]"
    assert slots["of_first/learning_rate"] == "[]"


def test_another_layout_drops_placements_of_the_former_and_keeps_values():
    x = np.ones([8, 4], np.float32)

    def game(*layouts):
        keras.utils.set_random_seed(1)
        model = Game()
        model.compile("adam")
        for layout in layouts:
            if layout is not None:
                mw.keras.distribute(model, MESH, layout)
            model.fit(x, x, verbose=0)
        return model

    former, later = (
        {"first/k": [None, ("data", "model")]},
        {"second/k": [None, "model"]},
    )
    ours = game(former, later)
    assert shown(ours) == shown(game(later)) != shown(game(former))
    assert_alike(ours.get_weights(), game(None, None).get_weights())


VALUES = ("iteration", "learning_rate")


def shown(model):
    return {path: str(lies) for path, lies in mw.keras.shardings(model).items()}


def test_variables_of_one_path_are_numbered():
    """Layers of a subclass may have the same name; it need not be compiled."""

    class Twice(keras.Model):
        def __init__(self):
            super().__init__(name="twice")
            self.first = keras.layers.Dense(16, name="same")
            self.second = keras.layers.Dense(4, use_bias=False, name="same")

        def call(self, x):
            return self.second(self.first(x))

    model = Twice()
    mw.keras.distribute(model, MESH, "fsdp")
    model.predict(np.ones((8, 12), np.float32), verbose=0)
    assert shown(model) == {
        "twice/same/kernel": "[_,data.model]",
        "twice/same/bias": "[data.model]",
        "twice/same/kernel:1": "[data.model,_]",
    }


UNITS = 'the layout "tensor", which splits feed-forward layers by units'
INPUTS = 'the layout "tensor", which splits by inputs a layer that follows one split'
LARGEST = 'the layout "fsdp", which splits the largest dim that its axes divide'
PADDED = 'the layout "fsdp", which pads the largest dim, as its axes divide none'
PLAN = mw.ShardingPlan(
    mesh_axes=MESH.axis_names,
    mesh_shape=MESH.shape,
    weights={"tensor": "model"},
    activations={"batch": "data"},
)


@pytest.mark.parametrize(
    ("units", "layout", "name", "why"),
    [
        (32, "tensor", "a/kernel", UNITS),
        (32, "tensor", "b/kernel", INPUTS),
        (32, "fsdp", "a/kernel", LARGEST),
        (13, "fsdp", "a/kernel", PADDED),
        (32, PLAN, "a/kernel", "the plan, for which its dims are [fsdp, tensor]"),
    ],
    ids=["units", "inputs", "fsdp", "padded", "plan"],
)
def test_what_a_layout_splits_has_its_rule_as_reason(units, layout, name, why):
    _, program = two(units, layout, weight_update_sharding="off")
    assert f"given by {why}" in flat(program.why(f"argument 0.tiny/{name}"))


def test_a_keras_layer_is_asked_for_by_its_path():
    model = mw.keras.distribute(compiled("called"), MESH, ROWS)
    program = mw.keras.program(model, X, Y, batch_size=8)
    for path in ("first/up", "sub/first/up"):
        asked = [reason.tensor.name for reason in program.why(path).tensors]
        assert asked == ["0.sub/first/up/bias", "0.sub/first/up/kernel"]
    assert len(program.why("first").tensors) == 4
    with pytest.raises(ValueError, match="layer 'frist/up'; near it are 'first/up'"):
        program.why("frist/up")


@pytest.mark.parametrize("partitioner", mw.Partitioner)
def test_the_head_of_a_classifier_is_left_to_completion(partitioner, caplog):
    caplog.set_level("INFO", "absl")
    how = {"partitioner": partitioner, "weight_update_sharding": "off"}
    model = mw.keras.distribute(compiled("called"), MESH, "tensor", **how)
    program = mw.keras.program(model, X, Y, batch_size=8)
    assert {c.kind for c in program.collectives()} == {"all-reduce"}
    left = "as its layer has fewer units than inputs, and follows none that is split"
    assert left in flat(program.why("head"))
    assert_alike(fitted(model), fitted(compiled("called")))
    assert shard_shape(model.first.up.kernel) == (12, 8)
    assert shard_shape(model.second.down.kernel) == (8, 12)
    assert shard_shape(model.head.kernel) == (12, 4)
    line = '"tensor" splits along model 2 by units, 2 by inputs, and leaves '
    assert caplog.text.count(line) == 1


@pytest.mark.parametrize(
    ("inputs", "units", "rules"),
    [
        (20, (64, 10), ["units", "inputs"]),
        (64, (32, 8), ["units", "inputs"]),
        (64, (32, 32, 8), ["units", "inputs", None]),
        (20, (64, 64, 10), ["units", "inputs", None]),
        (20, (64, 20, 10), ["units", "inputs", None]),
        (16, (64, "halves", 16), ["units", "inputs"]),
        (64, (10,), [None]),
        (64, (64, 64, 10), [None, None, None]),
        (20, (64, 64, 32, 10), ["units", "inputs", "units", "inputs"]),
        (64, (64, 64, 256), [None, None, "units"]),
        (5, (64, 256, 64, 10), ["units", "units", "inputs", None]),
        (5, (64, "doubled", 256, 128, 10), [None, "units", "inputs", None]),
    ],
)
def test_a_pair_of_layers_is_split_by_units_and_then_by_inputs(inputs, units, rules):
    x = made = keras.Input((inputs,))
    layers = []
    for count in units:
        if count == "halves":
            made = made[:, : made.shape[1] // 2]
            continue
        if count == "doubled":
            made = LAYERS.Concatenate()([made, 2 * made])
            continue
        layers.append(LAYERS.Dense(count))
        made = layers[-1](made)
    model = keras.Model(x, made)
    found = {one.weight.path: one.rule.value for one in split_weights(model)}
    assert [found.get(layer.kernel.path) for layer in layers] == rules
    left = [layer.kernel for layer in layers if layer.kernel.path not in found]
    for kernel in left:
        why = TensorParallel(model, "model").reason(kernel._value, MESH)
        assert why.startswith('"tensor" splits no dim of it, as its layer has ')


def test_a_row_that_decides_nothing_is_told(caplog):
    rows = {"kernel$": [None, "model"], "a/kernel$": ["model", None]}
    model, _ = two(32, rows)
    nothing = "tiny: layout row 'a/kernel$' decides nothing, as earlier rows, such as"
    assert f"{nothing} 'kernel$', match all its variables: put it before" in caplog.text
    model.fit(X[:8], Y[:8], verbose=0)
    assert caplog.text.count("decides nothing") == 1
    caplog.clear()
    two(32, dict(reversed(rows.items())))
    assert "decides nothing" not in caplog.text
    model.compile("adam", "mse")
    mw.keras.distribute(model, MESH, rows)  # Before any program is made.
    assert caplog.text.count("decides nothing") == 1


def test_a_partition_spec_of_jax_is_a_row():
    """Dims behind those that it names are not split."""
    weight = tf.Variable(tf.zeros([8, 4]), name="kernel")
    for spec in P("model"), P("model", None):
        split = LayoutTable({"kernel": spec}).sharding_of(weight, MESH)
        assert split == mw.Sharding.from_dims_mapping(MESH, ["model", None], 2)
    with pytest.raises(ValueError, match="has 3 entries, and matches 'kernel'"):
        LayoutTable({"kernel": P("model", None, None)}).sharding_of(weight, MESH)
    for spec in P(P.UNCONSTRAINED), P("data", unreduced={"model"}):
        with pytest.raises(ValueError, match="the axes of its dims alone"):
            LayoutTable({"kernel": spec})


def test_a_row_for_slots_alone_decides(caplog):
    model = compiled("called")
    rows = {"first/up/kernel$": [None, "model"], "up.kernel": [None, "model"]}
    mw.keras.distribute(model, MESH, {"second/up/kernel": [None, "model"], **rows})
    fitted(model)
    assert "decides nothing" not in caplog.text


def test_an_error_names_a_weight_before_its_slots():
    model = mw.keras.distribute(compiled(), MESH, {"up.kernel": ["model"]})
    with pytest.raises(ValueError, match="matches 'sub/first/up/kernel', which has 2"):
        fitted(model)


def test_idle_devices_are_told(caplog):
    two(32, "data", mesh=mw.DeviceMesh(("data",), (4,)))
    assert "the mesh (data=4) has 4 of 8 devices; the others are idle" in caplog.text


def test_a_step_is_planned_for_devices_that_are_not_here():
    pytest.importorskip("libtpu")
    plan = mw.keras.plan(compiled("called"), MESH, ROWS, topology="v5e:2x4", x=X, y=Y)
    assert 0 < plan.memory < 2**24 < plan.memory_limit
    assert 0 < plan.time.seconds < 1
    step = (
        r" step, estimated: [\d.e-]+ ms: .*\bmatrix [\d.e-]+.* the only published TPU"
    )
    assert re.search(step, flat(plan)) and max(map(len, str(plan).splitlines())) <= 80
    assert "all-reduce along" in str(plan) and len(repr(plan.time)) < 200
    model = compiled("called")
    mw.keras.plan(model, MESH, ROWS, topology="v5e:2x4", x=X, y=Y)
    for use in (fitted, lambda model: model.predict(X, verbose=0)):
        with pytest.raises(ValueError, match="sub was planned last, for 8 devices of"):
            use(model)
    fitted(mw.keras.distribute(model, MESH, ROWS))
    with pytest.raises(ValueError, match=r"'v5e:4x4' has 16 devices, but the mesh"):
        mw.keras.plan(compiled("called"), MESH, topology="v5e:4x4", x=X, y=Y)
