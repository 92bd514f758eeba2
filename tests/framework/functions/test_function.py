"""`mw.function`: programs with variables, against TF's jit on one device."""

import numpy as np
import pytest
import tensorflow as tf

import meshwright.framework as mw
from meshwright.framework.functions import function as function_module
from meshwright.framework.functions import mesh_variable
from meshwright.framework.functions.mesh_variable import value_of
from tests.framework.functions.moves import watched

MESH = mw.DeviceMesh(("data", "model"), (2, 4))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 6)).astype(np.float32)
Y = RNG.standard_normal((8, 5)).astype(np.float32)
W, V = (RNG.standard_normal(s).astype(np.float32) for s in ((6, 10), (10, 5)))
over_partitioners = pytest.mark.parametrize("partitioner", mw.Partitioner)


class Model(tf.Module):
    """Two products, momentum and a step counter, all in variables."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(W, name="w")
        self.v = tf.Variable(V, name="v")
        self.momenta = [
            tf.Variable(tf.zeros_like(x), trainable=False, name=f"{x.name[0]}_momentum")
            for x in (self.w, self.v)
        ]
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")

    def loss(self, x, y):
        return tf.reduce_mean((tf.nn.relu(x @ self.w) @ self.v - y) ** 2)

    def train(self, x, y, rate=0.1):
        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        gradients = tape.gradient(loss, [self.w, self.v])
        for x, m, g in zip((self.w, self.v), self.momenta, gradients, strict=True):
            x.assign_sub(rate * m.assign(0.9 * m + g))
        if self.step % 2 == 0:  # AutoGraph
            x.assign(0.99 * x)
        self.step.assign_add(1)
        return {"loss": loss, "nothing": None}

    def values(self):
        return [x.numpy() for x in (self.w, self.v, *self.momenta, self.step)]


def assert_alike(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@over_partitioners
@pytest.mark.parametrize(
    "layout",
    [{}, {"^w$": [None, "model"]}, {"w": ["model", "data"], "v": [None, "model"]}],
    ids=["completed", "one weight", "uneven"],
)
def test_steps_are_those_of_one_device(layout, partitioner):
    ours, theirs = Model(), Model()
    step = mw.function(ours.train, MESH, layout=layout, partitioner=partitioner)
    jitted = tf.function(theirs.train, jit_compile=True)
    for _ in range(4):
        out, expected = step(X, Y), jitted(X, Y)
        np.testing.assert_allclose(out["loss"], expected["loss"], rtol=1e-5)
        assert out["nothing"] is None
    assert_alike(ours.values(), theirs.values())


def shard_shape(variable):
    return value_of(variable).array.addressable_data(0).shape


@over_partitioners
def test_completion_splits_what_nobody_annotated(partitioner):
    model = Model()
    layout = {"^w$": ["data", None]}
    step = mw.function(model.train, MESH, layout=layout, partitioner=partitioner)
    step(X, Y)
    # Six rows over two devices; the momentum has no row of its own.
    assert shard_shape(model.w) == shard_shape(model.momenta[0]) == (3, 10)
    assert shard_shape(model.step) == ()


def test_uneven_dims_are_stored_padded():
    model = Model()
    mw.function(model.train, MESH, layout={"^w$": [None, "model"]})(X, Y)
    assert shard_shape(model.w) == (6, 3)  # 10 columns, padded to 12


def test_no_value_moves_between_calls(monkeypatch):
    model = Model()
    step = mw.function(model.train, MESH, layout={"w": ["data", None]})
    evaluate = mw.function(model.loss, MESH)
    step(X, Y)
    evaluate(X, Y)

    def refuse(*_):
        raise AssertionError("a value moves")

    monkeypatch.setattr(mesh_variable, "to_host", refuse)
    placed, fetched = watched(monkeypatch, function_module)
    for _ in range(3):
        step(X, Y)
        evaluate(X, Y)
    assert placed == [X.shape, Y.shape] * 6
    assert fetched == [()] * 6  # The losses.
    with pytest.raises(AssertionError, match="a value moves"):
        model.w.numpy()


def trained(steps=2):
    """A model whose values are on the mesh, the same on one device, and the step."""
    ours, theirs = Model(), Model()
    step = mw.function(ours.train, MESH, layout={"^w$": ["data", "model"]})
    for _ in range(steps):
        step(X, Y)
        theirs.train(X, Y)
    return ours, theirs, step


def test_writes_from_outside_are_seen(tmp_path):
    ours, theirs, step = trained()
    saved = tf.train.Checkpoint(model=ours).write(str(tmp_path / "saved"))
    for model in ours, theirs:
        model.w.assign(W)
        model.v.assign_add(tf.ones_like(V))
        tf.raw_ops.AssignSubVariableOp(
            resource=model.momenta[1].handle, value=tf.ones_like(V)
        )
    step(X, Y)
    theirs.train(X, Y)
    assert_alike(ours.values(), theirs.values())
    tf.train.Checkpoint(model=ours).read(saved)
    _, theirs, _ = trained()
    step(X, Y)
    theirs.train(X, Y)
    assert_alike(ours.values(), theirs.values())


def test_reads_from_outside_are_of_the_mesh():
    ours, theirs, _ = trained()
    for model in ours, theirs:
        with tf.GradientTape() as tape:
            loss = model.loss(X, Y)
        model.seen = [model.w * 2, tf.gather(model.v, [1, 2]), model.step.value(), loss]
        model.seen += [tf.multiply(model.w, 2), tf.add(model.step, 1), tf.abs(model.v)]
        model.seen += tape.gradient(loss, [model.w, model.v])
    assert_alike(ours.seen, theirs.seen)


@pytest.mark.parametrize("is_traced_before", [True, False])
def test_other_functions_read_and_write_what_is_on_the_mesh(is_traced_before, caplog):
    ours, theirs, step = trained(steps=0)

    @tf.function
    def outside(model):
        model.v.assign(model.v * 0.5)
        return model.loss(X, Y)

    if is_traced_before:
        outside(ours), outside(theirs)
    for _ in range(3):
        step(X, Y), theirs.train(X, Y)
        np.testing.assert_allclose(outside(ours), outside(theirs), rtol=1e-5)
    assert_alike(ours.values(), theirs.values())
    assert "the function 'outside' reads variable" in caplog.text
    assert "Make it an mw.function too" in caplog.text


def test_a_reader_that_is_made_anew_is_told_once(caplog):
    ours, _, _ = trained(steps=1)
    made = []
    for _ in range(3):

        @tf.function
        def made_anew(model):
            return model.loss(X, Y)

        made.append(made_anew)
        made_anew(ours)
        mesh_variable.note_readers([ours.w])
    assert caplog.text.count("the function 'made_anew' reads variable") == 1


def test_a_function_called_on_the_mesh_and_off_it_has_a_trace_for_each():
    ours, theirs, step = trained(steps=0)

    @tf.function
    def loss(model, x, y):
        return model.loss(x, y)

    evaluate = mw.function(lambda x, y: 2 * loss(ours, x, y), MESH)
    x, y = tf.constant(X), tf.constant(Y)
    for _ in range(2):
        step(X, Y), theirs.train(X, Y)
        expected = theirs.loss(X, Y)
        np.testing.assert_allclose(evaluate(x, y), 2 * expected, rtol=1e-5)
        np.testing.assert_allclose(loss(ours, x, y), expected, rtol=1e-5)


def test_a_tape_around_a_call_is_refused():
    ours, theirs, step = trained()
    with tf.GradientTape() as tape:
        with pytest.raises(mw.LoweringError, match="train is called within a tf.Grad"):
            step(X, Y)
        with tape.stop_recording():
            step(X, Y)
    theirs.train(X, Y)
    assert_alike(ours.values(), theirs.values())


def test_a_function_may_create_variables_when_it_is_first_called():
    made = []

    @mw.function(mesh=MESH, layout={"made": ["data", None]})
    def fn(x):
        if not made:
            made.append(tf.Variable(tf.ones([6, 2]), name="made"))
        made[0].assign_add(tf.ones([6, 2]))
        return x @ made[0]

    np.testing.assert_allclose(fn(X), X @ np.full((6, 2), 2), rtol=1e-5)
    np.testing.assert_allclose(fn(X), X @ np.full((6, 2), 3), rtol=1e-5)
    assert shard_shape(made[0]) == (3, 2)


def test_large_tensors_outside_are_inputs_and_small_ones_constants():
    large = tf.constant(RNG.standard_normal((6, 1 << 16)), tf.float32)
    small = tf.constant(3)
    fn = mw.function(lambda x: tf.reduce_sum(x @ large, 1) * tf.ones(small)[0], MESH)
    expected = tf.reduce_sum(X @ large, 1)
    np.testing.assert_allclose(fn(X), expected, rtol=1e-4)
    np.testing.assert_allclose(fn(X), expected, rtol=1e-4)


def test_python_arguments_methods_and_nests():
    class Scaler:
        calls = 0

        @mw.function(mesh=MESH)
        def scale(self, batch, *, by, square=False):
            Scaler.calls += 1
            x = batch["x"][0] * by
            return (x * x if square else x), {"none": None}

    scaler, batch = Scaler(), {"x": (tf.constant(X),)}
    for by in (2, 3, 2):
        out, rest = scaler.scale(batch, by=by)
        np.testing.assert_array_equal(out, X * by)
        assert isinstance(out, tf.Tensor)
        assert rest == {"none": None}
    np.testing.assert_array_equal(scaler.scale(batch, by=2, square=True)[0], 4 * X * X)
    assert Scaler.calls == 3


def test_random_numbers_of_a_generator_are_those_of_one_device():
    ours, theirs = (tf.random.Generator.from_seed(3, alg="threefry") for _ in range(2))
    draw = mw.function(lambda: ours.uniform([8]), MESH)
    jitted = tf.function(lambda: theirs.uniform([8]), jit_compile=True)
    for _ in range(2):
        np.testing.assert_array_equal(draw(), jitted())
    np.testing.assert_array_equal(ours.state, theirs.state)


@over_partitioners
def test_weight_updates_are_sharded(partitioner):
    ours, theirs = Model(), Model()

    def train(x, y):
        return ours.train(mw.mesh_split(x, MESH, ["data", None]), y)

    step = mw.function(
        train,
        MESH,
        update_sharding=mw.UpdateSharding(
            mode=mw.WeightUpdateSharding.ALL, data_axes=("data",)
        ),
        partitioner=partitioner,
    )
    evaluate = mw.function(ours.loss, MESH, partitioner=partitioner)
    for _ in range(3):
        step(X, Y), theirs.train(X, Y)
        np.testing.assert_allclose(evaluate(X, Y), theirs.loss(X, Y), rtol=1e-5)
    assert_alike(ours.values(), theirs.values())
    assert 2 * np.prod(shard_shape(ours.momenta[0])) == 60


class Rounded(Model):
    """Rounds its weights before it uses them, so that these too stay in shards."""

    def loss(self, x, y):
        w, v = (tf.cast(tf.cast(t, tf.bfloat16), t.dtype) for t in (self.w, self.v))
        return tf.reduce_mean((tf.nn.relu(x @ w) @ v - y) ** 2)


@over_partitioners
def test_weights_in_shards_are_evaluated_on_the_mesh(partitioner, monkeypatch):
    ours, theirs = Rounded(), Rounded()

    def train(x, y):
        return ours.train(mw.mesh_split(x, MESH, [MESH.axis_names, None]), y)

    updates = mw.UpdateSharding(
        mode=mw.WeightUpdateSharding.ALL, data_axes=MESH.axis_names
    )
    how = {"layout": {"w|v": [None, None]}, "partitioner": partitioner}
    step = mw.function(train, MESH, update_sharding=updates, **how)
    evaluate = mw.function(ours.loss, MESH, **how)
    for number, rows in enumerate((8, 4, 8, 4)):
        x, y = X[:rows], Y[:rows]
        if number:  # Before, the values were put onto the mesh.
            monkeypatch.setattr(mesh_variable.MeshValue, "host_value", None)
        step(x, y), theirs.train(x, y)
        assert len(value_of(ours.w).form.stored_shape) == 1  # Its dims are combined.
        np.testing.assert_allclose(evaluate(x, y), theirs.loss(x, y), rtol=1e-5)
        assert shard_shape(ours.w) == W.shape
    monkeypatch.undo()
    assert_alike(ours.values(), theirs.values())


def test_the_program_has_the_names_of_variables():
    model = Model()
    step = mw.function(model.train, MESH, layout={"^w$": ["data", None]})
    spec = tf.TensorSpec
    program = step.program(spec(X.shape, tf.float32), spec(Y.shape, tf.float32))
    report = mw.explain(program)
    assert "0.w_momentum" in str(report)  # Its new value lies as it does.
    assert "state.w_momentum" in [tensor.op_name for tensor in report.tensors]
    np.testing.assert_array_equal(model.w, W)


UNKNOWN = tf.Variable([1.0], shape=tf.TensorShape(None), name="unknown")


class Table:
    def __init__(self):
        init = tf.lookup.KeyValueTensorInitializer(np.array([1, 2]), np.array([3, 4]))
        self.table = tf.lookup.StaticHashTable(init, 0)


@pytest.mark.parametrize(
    ("fn", "how", "error", "message"),
    [
        (lambda x: x, {"mesh": None}, TypeError, "the mesh is None; pass a DeviceMesh"),
        (
            Model().loss,
            {"layout": {"u": [None]}},
            ValueError,
            "row 'u' matches none of its 2 variables: v, w",
        ),
        (
            Model().loss,
            {"layout": {"w": [None]}},
            ValueError,
            "row 'w' has 1 entries, and matches 'w', which has 2",
        ),
        (
            Table().table.lookup,
            {},
            mw.LoweringError,
            "a StaticHashTable from outside, at op",
        ),
        (
            lambda x: tf.RaggedTensor.from_row_lengths(x, [2, 6]),
            {},
            mw.LoweringError,
            "returns a RaggedTensor as result 0",
        ),
        (
            lambda x: tf.TensorArray(tf.float32, 2).unstack(x),
            {},
            mw.LoweringError,
            "returns a TensorArray as result 0",
        ),
        (
            lambda x: tf.reduce_sum(x) + tf.reduce_sum(UNKNOWN),
            {},
            mw.LoweringError,
            "variable 'unknown:0' has the shape <unknown>: make it without",
        ),
        (3, {}, TypeError, "function: 3 is no function: pass the function"),
        (Model().loss, {"donate": [0]}, TypeError, "has no option 'donate'; it has pa"),
        (Model().loss, {"layout": "data"}, TypeError, "the layout is 'data'; pass a"),
        (Model().loss, {"layout": {"w": None}}, ValueError, "row 'w': None .* no list"),
        (Model().loss, {"layout": {"(": []}}, ValueError, "row '.': .* missing ."),
        (Model().loss, {"layout": {3: []}}, ValueError, "row 3: .* pass a str"),
    ],
)
def test_refusals(fn, how, error, message):
    x = X if error is not mw.LoweringError or "Hash" not in message else X.astype(int)
    with pytest.raises(error, match=message):
        mw.function(fn, **{"mesh": MESH, **how})(x, *([Y] if "loss" in str(fn) else []))


def test_a_function_in_another_is_part_of_it():
    model = Model()
    inner = mw.function(model.loss, MESH)
    outer = mw.function(lambda x, y: 2 * inner(x, y), MESH)
    np.testing.assert_allclose(outer(X, Y), 2 * Model().loss(X, Y), rtol=1e-5)
    with pytest.raises(mw.LoweringError, match="loss runs on a mesh, and is called by"):
        tf.function(inner)(X, Y)


def test_variables_of_all_kinds_of_elements():
    kinds = [tf.bool, tf.int8, tf.uint32, tf.bfloat16, tf.complex64, tf.float64]
    variables = [tf.Variable(tf.cast([0, 1], kind), name=kind.name) for kind in kinds]

    def flip():
        for v in variables:
            v.assign(tf.reverse(v, [0]))

    step = mw.function(flip, MESH, layout={"float64|bool": ["data"]})
    for value in ([1, 0], [0, 1]):
        step()
        for v in variables:
            np.testing.assert_array_equal(v, tf.cast(value, v.dtype))


def test_an_argument_that_is_no_key_is_refused():
    with pytest.raises(mw.LoweringError, match="of type set is neither a tensor nor"):
        mw.function(lambda x: 1, MESH)({1, 2})


def test_arguments_that_look_alike_are_different_programs():
    class Key:
        def __repr__(self):
            return "key"

        def __init__(self, value):
            self.value = value

    first = mw.function(lambda arguments: next(iter(arguments)).value, MESH)
    assert [first({Key(value): X}) for value in (2, 3)] == [2, 3]


def test_variables_of_the_same_name():
    variables = [tf.Variable(float(i), name=n) for i, n in enumerate(["w", "w:1", "w"])]
    add = mw.function(lambda: [v.assign_add(1.0) for v in variables], MESH)
    add()
    assert [v.numpy() for v in variables] == [1, 2, 3]


def test_variables_that_ops_take_by_their_handles():
    """As the optimizers of Keras 2 give their slots."""

    def trained(compiled):
        w, slot = tf.Variable(W), tf.Variable(tf.zeros_like(W))

        def step(x):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=w.handle, accum=slot.handle, lr=0.1, grad=x, momentum=0.9
            )
            return tf.raw_ops.ReadVariableOp(resource=slot.handle, dtype=tf.float32)

        step = compiled(step)
        return [step(W), step(W), w.numpy(), slot.numpy()]

    got = trained(lambda step: mw.function(step, MESH))
    want = trained(lambda step: tf.function(step, jit_compile=True))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_bound_of_a_size_in_a_function_is_seen():
    x = np.arange(8) % 7
    counts = mw.function(lambda x: tf.math.bincount(x, minlength=7, maxlength=7), MESH)
    np.testing.assert_array_equal(counts(x), np.bincount(x))
