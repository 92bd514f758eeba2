"""Sharding types through programs: the post's gated MLP, loops, branches, layers.

Nothing is compiled.
"""

import functools
import pathlib

import pytest
import tensorflow as tf

from meshwright import framework as mw
from meshwright.framework.modeling.layer import annotate_weights
from meshwright.layers.basic.feed_forward import Activation
from meshwright.layers.basic.normalization import LayerNorm
from meshwright.layers.transformer import transformer_layer
from tests.framework.types.typed import MESH, argument, explained, gradients, split

HERE = pathlib.Path(__file__)
S, B, H, INNER = "seq", "batch", "hidden", "intermediate"


def line(marker: str) -> int:
    lines = HERE.read_text().splitlines()
    (number,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return number


def named(name, x, *dims, **how):
    with tf.name_scope(name):
        return split(x, *dims, **how)


def mlp(x, w1, w3, w2):
    """The gated MLP of "Replicate forwards, partial backwards"."""
    rx = named("rx", x, None, "dp", None, reduced=["tp"])
    rw1 = named("rw1", w1, None, "tp", reduced=["dp"])
    rw3 = named("rw3", w3, None, "tp", reduced=["dp"])
    rw2 = named("rw2", w2, "tp", None, reduced=["dp"])
    h1 = tf.einsum("sbh,hi->sbi", rx, rw1, name="h1")  # h1
    h3 = tf.einsum("sbh,hi->sbi", rx, rw3, name="h3")
    h = tf.einsum("sbi,sbi->sbi", tf.nn.silu(h1), h3, name="h")
    product = tf.einsum("sbi,ih->sbh", h, rw2, name="product")
    return named("out", product, None, "dp", None, unreduced=["tp"])


def trained(x, w1, w3, w2, g):
    with tf.GradientTape() as tape:
        tape.watch([x, w1, w3, w2])
        out = mlp(x, w1, w3, w2)
    g = named("g_out", g, None, "dp", None, reduced=["tp"])
    g_x, g_w1, g_w3, g_w2 = tape.gradient(out, [x, w1, w3, w2], output_gradients=g)
    return {
        "g_rx": g_x,
        "g_rw1": g_w1,
        "g_rw3": g_w3,
        "g_rw2": g_w2,
        "g_w1": mw.reshard(g_w1, MESH, [None, "tp"]),
        "g_w3": mw.reshard(g_w3, MESH, [None, "tp"]),
        "g_w2": mw.reshard(g_w2, MESH, ["tp", None]),
        "g_x": mw.reshard(g_x, MESH, [None, "dp", None]),
        "out": out,
    }


@functools.cache
def typed_mlp():
    in_types = [
        "f32[4, 8@dp, 16]",
        "f32[16, 32@tp]",
        "f32[16, 32@tp]",
        "f32[32@tp, 16]",
        "f32[4, 8@dp, 16]",
    ]
    unreduced = {
        "g_rx": "f32[4, 8@dp, 16]{U:tp}",
        "g_rw1": "f32[16, 32@tp]{U:dp}",
        "g_rw3": "f32[16, 32@tp]{U:dp}",
        "g_rw2": "f32[32@tp, 16]{U:dp}",
        "out": "f32[4, 8@dp, 16]{U:tp}",
    }
    out = dict.fromkeys(["g_w1", "g_w2", "g_w3", "g_x"])
    out |= {name: argument(text)[1] for name, text in unreduced.items()}
    return explained(
        trained,
        *in_types,
        out_shardings=out,
        dim_names=[(S, B, H), (H, INNER), (H, INNER), (INNER, H), (S, B, H)],
    )


MLP_TYPES = {
    "x": "f32[seq, batch@dp, hidden]",
    "w1": "f32[hidden, intermediate@tp]",
    "w2": "f32[intermediate@tp, hidden]",
    "rx/typed": "f32[seq, batch@dp, hidden]{R:tp}",
    "rw1/typed": "f32[hidden, intermediate@tp]{R:dp}",
    "rw3/typed": "f32[hidden, intermediate@tp]{R:dp}",
    "rw2/typed": "f32[intermediate@tp, hidden]{R:dp}",
    "h1/Einsum": "f32[seq, batch@dp, intermediate@tp]",
    "h3/Einsum": "f32[seq, batch@dp, intermediate@tp]",
    "h/Einsum": "f32[seq, batch@dp, intermediate@tp]",
    "out/typed": "f32[seq, batch@dp, hidden]{U:tp}",
    "g_out/typed": "f32[seq, batch@dp, hidden]{R:tp}",
    # The gradients of an einsum, by its first operand and by its second.
    "gradient_tape/product/Einsum": "f32[seq, batch@dp, intermediate@tp]",
    "gradient_tape/product/Einsum_1": "f32[intermediate@tp, hidden]{sum?:dp}",
    "gradient_tape/h/Einsum": "f32[seq, batch@dp, intermediate@tp]",
    "gradient_tape/h/Einsum_1": "f32[seq, batch@dp, intermediate@tp]",
    "gradient_tape/h3/Einsum": "f32[seq, batch@dp, hidden]{sum?:tp}",
    "gradient_tape/h1/Einsum": "f32[seq, batch@dp, hidden]{sum?:tp}",
    "gradient_tape/h1/Einsum_1": "f32[hidden, intermediate@tp]{sum?:dp}",
    "AddN": "f32[seq, batch@dp, hidden]{sum?:tp}",
    "g_rx": "f32[seq, batch@dp, hidden]{U:tp}",
    "g_rw1": "f32[hidden, intermediate@tp]{U:dp}",
    "g_rw3": "f32[hidden, intermediate@tp]{U:dp}",
    "g_rw2": "f32[intermediate@tp, hidden]{U:dp}",
    "g_x": "f32[seq, batch@dp, hidden]",
    "g_w1": "f32[hidden, intermediate@tp]",
    "g_w3": "f32[hidden, intermediate@tp]",
    "g_w2": "f32[intermediate@tp, hidden]",
}


def test_the_gated_mlp_has_the_types_of_the_post_forward_and_backward():
    program = typed_mlp()
    assert not program.errors
    assert {name: program.type_of(name) for name in MLP_TYPES} == MLP_TYPES


def test_the_text_has_each_tensor_with_its_line_in_80_columns():
    text = str(typed_mlp())
    assert max(map(len, text.splitlines())) <= 80
    forward, backward = text.split("\nforward\n")[1].split("\nbackward")
    at = f"types/test_types_programs.py:{line('h1')}"
    assert (
        f"  h1/Einsum                  f32[seq, batch@dp, intermediate@tp]\n      {at}"
    ) in forward
    assert f"gradient of {at}" in backward
    assert "  g_rw1                      f32[hidden, intermediate@tp]{U:dp}" in backward
    assert text.startswith("trained over dp=2, tp=2: ")
    assert "no errors" in text.splitlines()[0]
    assert "Sigmoid" not in text  # It changes nothing that types say.


def test_without_reduced_weights_the_gradients_are_the_programs_to_decide():
    def step(x, w):
        return gradients(lambda w: tf.reduce_sum(tf.square(x @ w)), w)[0]

    types = ["f32[8@dp, 4]", "f32[4, 6]"]
    with pytest.raises(mw.ShardingTypeError) as error:
        checked(step, *types)
    assert (
        "gives f32[4, 6]{sum?:dp} as a result of the program: the sharding of the sum "
    )
    assert "is ambiguous; mesh_split it to [_,_], or give" in str(error.value)
    replicated = argument("f32[4, 6]")[1]
    assert not explained(step, *types, out_shardings=replicated).errors
    part = argument("f32[4, 6]{U:dp}")[1]
    assert not explained(step, *types, out_shardings=part).errors


def checked(fn, *types, **how):
    given = [argument(text) for text in types]
    shardings = [sharding for _, sharding in given]
    specs = [spec for spec, _ in given]
    return mw.check_types(fn, specs, MESH, in_shardings=shardings, **how)


def test_a_gradient_that_was_not_annotated_as_unreduced_is_refused():
    """A reduced tensor meets one split along the axis of its unreduced gradient.

    By the types the gradient is to be unreduced, and it is split.
    """

    def loss(x, y):
        return tf.reduce_sum(split(x, None, reduced=["tp"]) * y)

    def gradient(x, y):
        return gradients(lambda x: loss(x, y), x)[0]

    (error,) = explained(gradient, "f32[8]", "f32[8@tp]").errors
    assert "takes f32[8@tp]: no sum is unreduced along tp" in str(error)


def accumulated(w, batches, initial, *, decide=True):
    """Gradients of three microbatches, added up by devices on their own."""
    w = split(w, None, "tp", reduced=["dp"])

    def body(i, total):
        x = split(batches[i], "dp", None)
        y = split(x @ w, "dp", "tp")
        g = tf.einsum("bm,bh->mh", x, tf.tanh(y))
        if decide:
            g = split(g, None, "tp", unreduced=["dp"])
        return i + 1, total + g  # accumulate

    _, total = tf.while_loop(lambda i, _: i < 3, body, (0, initial))
    total = split(total, None, "tp", unreduced=["dp"])
    return mw.reshard(total, MESH, [None, "tp"])


LOOP_TYPES = ["f32[4, 6@tp]", "f32[3, 8@dp, 4]"]


@pytest.mark.parametrize("decide", [True, False], ids=["said", "said after the loop"])
def test_a_loop_that_starts_from_zeros_carries_a_partial_sum(decide):
    def step(w, batches):
        return accumulated(w, batches, tf.zeros([4, 6]), decide=decide)

    program = explained(step, *LOOP_TYPES)
    assert not program.errors
    assert program.type_of("reshard") == "f32[4, 6@tp]"


def test_a_loop_that_starts_from_a_replicated_tensor_adds_no_pending_sum():
    program = explained(accumulated, *LOOP_TYPES, "f32[4, 6@tp]")
    (error,) = program.errors
    assert str(error).startswith(
        "accumulated: op 'while/add_2' (types/test_types_programs.py:"
        f"{line('accumulate')}) adds f32[4, 6@tp] and f32[4, 6@tp]{{U:dp}}: a partial "
    )


def test_a_loop_keeps_the_types_of_what_it_carries():
    def loop(x):
        return tf.while_loop(
            lambda x: tf.constant(True), lambda x: [split(x, None, "dp")], [x]
        )[0]

    (error,) = explained(loop, "f32[4@dp, 8]").errors
    assert (
        "makes f32[4, 8@dp] of f32[4@dp, 8], by op 'while/XlaSharding' (types/typed"
    ) in str(error)
    assert str(error).endswith(
        "a loop's tensor keeps its type; mesh_split or reshard the initial value to "
        "[_,dp], or what the loop makes of it to [dp,_]"
    )


def test_the_gradient_of_a_loop_is_checked_as_any_op():
    def loss(w, x):
        w = split(w, None, None, reduced=["dp"])

        def body(i, x):
            return i + 1, split(tf.tanh(x @ w), "dp", None)

        _, y = tf.while_loop(lambda *_: True, body, (0, x), maximum_iterations=3)
        return tf.reduce_sum(y)

    def step(w, x):
        (g,) = gradients(lambda w: loss(w, x), w)
        return mw.reshard(g, MESH, [None, None])

    program = explained(step, "f32[4, 4]", "f32[8@dp, 4]")
    assert not program.errors
    assert program.type_of("result") == "f32[4, 4]"


def branches(on_true, on_false):
    return lambda x, y, p: tf.cond(p > 0, lambda: on_true(x, y), lambda: on_false(x, y))


BRANCH_TYPES = ["f32[4@dp, 8]{U:tp}", "f32[4, 8@dp]", "f32[]"]


def test_branches_agree():
    same = branches(lambda x, y: 2 * x, lambda x, y: tf.zeros([4, 8]))
    program = explained(same, *BRANCH_TYPES)
    assert program.type_of("result") == "f32[4@dp, 8]{U:tp}"
    differ = branches(lambda x, y: x, lambda x, y: y)
    (error,) = explained(differ, *BRANCH_TYPES).errors
    assert (
        "gives f32[4@dp, 8]{U:tp} or f32[4, 8@dp], its result 0: branches of a "
        "conditional give one type; mesh_split or reshard in one of them to [dp,_]{U:"
    ) in str(error)


def test_what_decides_is_not_pending():
    program = explained(
        branches(lambda x, y: y, lambda x, y: 2 * y), *BRANCH_TYPES[:2], "f32[]{U:dp}"
    )
    (error,) = program.errors
    assert "computes compare of f32[]{U:dp}" in str(error)


def test_what_is_inside_of_a_manual_region_has_no_type():
    def summed(x):
        return mw.collectives.all_reduce(tf.reduce_sum(x, 0), MESH, ["dp"])

    region = mw.manual_partition(
        summed, mesh=MESH, in_dims=[["dp", None]], out_dims=[None]
    )
    program = explained(lambda x: region(x) + 1, "f32[4@dp, 8]")
    assert not program.errors
    assert program.type_of("result") == "f32[8]"
    assert not any("Sum" in tensor.name for tensor in program.tensors)
    (error,) = explained(region, "f32[4, 8]{U:tp}").errors
    assert "takes f32[4, 8]{U:tp}: it would drop the sum unreduced along tp" in str(
        error
    )


def test_after_an_error_all_that_does_not_depend_on_it_is_checked():
    def step(x, y):
        lost = tf.tanh(tf.sin(x) + 1)  # lost
        return split(lost, "dp", None), tf.exp(y)  # other

    with pytest.raises(mw.ShardingTypeError, match=f":{line('lost')}.* sine of"):
        checked(step, "f32[4, 8]{U:tp}", "f32[4]{U:tp}")
    program = explained(step, "f32[4, 8]{U:tp}", "f32[4]{U:tp}")
    assert [
        f":{line(name)})" in str(error)
        for name, error in zip(["lost", "other"], program.errors, strict=True)
    ] == [True, True]
    assert program.type_of("0") == "f32[4@dp, 8]"
    text = str(program)
    assert ", 2 errors." in text.splitlines()[0]
    assert "\n1. step: op 'Sin' (types/test_types_programs.py:" in text


PLAN = mw.ShardingPlan(
    mesh_axes=MESH.axis_names,
    mesh_shape=MESH.shape,
    weights={"hidden": "tp", "heads": "tp"},
    activations={"batch": "dp", "hidden": "tp", "heads": "tp"},
    unreduced_gradient_axes=("dp",),
)


def test_a_transformer_layer_of_a_plan_is_well_typed_with_its_gradients():
    """Weights are reduced along the data axis; activations lie as the plan says."""
    layer = transformer_layer(
        model_dims=8,
        hidden_dims=32,
        num_heads=4,
        head_dim=2,
        activation=Activation.GATED_SILU,
        norm=LayerNorm,
    )
    weights = layer.weights()

    def step(theta, x):
        def loss(theta):
            read = annotate_weights(PLAN, weights, theta)
            y = layer.fprop(mw.Context(plan=PLAN), read, x)
            return split(tf.reduce_sum(tf.square(y)))

        with tf.GradientTape() as tape:
            tape.watch(theta)
            value = loss(theta)
        return tape.gradient(value, theta)

    program = mw.check_types(
        step,
        [
            weights.map(lambda spec: tf.TensorSpec(spec.shape)),
            tf.TensorSpec([4, 16, 8]),
        ],
        MESH,
        in_shardings=[
            weights.map_with_path(lambda path, spec: spec.sharding(PLAN, path)),
            argument("f32[4@dp, 16, 8]")[1],
        ],
        out_shardings=weights.map_with_path(
            lambda path, spec: PLAN.read_sharding(spec.dims, path).dual()
        ),
    )
    assert program.type_of("feed_forward.w_in") == "f32[8, 32@tp]{U:dp}"
    assert program.type_of("attention.w_q") == "f32[8, 4@tp, 2]{U:dp}"


@pytest.mark.parametrize(
    "how,message",
    [
        ({"in_shardings": [argument("f32[4, 8]")[1]]}, "argument 'x' has 1 dims"),
        ({"dim_names": [("a", "b")]}, r"and the dim names \('a', 'b'\)"),
        (
            {
                "in_shardings": [
                    mw.Sharding(mw.DeviceMesh(("dp",), (4,)), (("dp",),)),
                ]
            },
            r"over \(dp=4\)",
        ),
        ({"out_shardings": argument("f32[4, 8]")[1]}, "result 0 has 1 dims"),
        ({"in_shardings": [None, None]}, "shardings for a sequence of 1 have 2"),
    ],
    ids=["rank", "names", "mesh", "result", "structure"],
)
def test_what_does_not_fit_the_arguments_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        mw.check_types(lambda x: x + 1, [tf.TensorSpec([4])], MESH, **how)


def test_one_tensor_is_a_result_twice_each_in_its_type():
    def step(x):
        y = tf.reduce_sum(x, 0)
        return x, y, y

    shardings = (None, argument("f32[4]")[1], argument("f32[4]{U:tp}")[1])
    program = explained(step, "f32[8@tp, 4]", out_shardings=shardings)
    assert not program.errors
    assert [str(tensor.type) for tensor in program.tensors[-3:]] == [
        "f32[8@tp, 4]",
        "f32[4]",
        "f32[4]{U:tp}",
    ]


def test_an_argument_that_is_pending_is_no_result():
    (error,) = explained(tf.identity, "f32[4]{U:tp}").errors
    assert "gives f32[4]{U:tp} as a result of the program: its sum is" in str(error)


def test_an_axis_of_one_device_is_of_no_effect():
    mesh = mw.DeviceMesh(("dp", "tp"), (2, 1))

    def step(x, w):
        return mw.mesh_split(x, mesh, ["dp", "tp"]) @ w

    types = mw.check_types(
        step,
        [tf.TensorSpec([4, 8]), tf.TensorSpec([8, 6])],
        mesh,
        in_shardings=[None, mw.Sharding.parse(mesh, "[tp,_]")],
    )
    assert types.type_of("result") == "f32[4@dp, 6]"


def test_annotations_are_over_the_programs_mesh():
    other = mw.DeviceMesh(("dp", "tp"), (4, 2))
    (error,) = explained(
        lambda x: mw.mesh_split(x, other, [None], reduced=["dp"]), "f32[8]"
    ).errors
    assert "it is over the mesh (dp=4, tp=2), and types are over (dp=2" in str(error)


def test_a_function_that_returns_nothing_is_refused():
    with pytest.raises(mw.LoweringError, match="the function returns None"):
        explained(lambda x: {"y": x, "z": None}, "f32[8]")


def test_a_name_is_of_one_tensor():
    program = typed_mlp()
    with pytest.raises(ValueError, match="tensors are named 'Einsum'"):
        program.type_of("Einsum")
    with pytest.raises(ValueError, match="trained: 0 tensors are named 'nothing'"):
        program.type_of("nothing")
