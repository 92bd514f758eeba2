"""What tests of sharding types share: arguments written in the types' notation."""

import re

import tensorflow as tf

from meshwright import framework as mw

MESH = mw.DeviceMesh(("dp", "tp"), (2, 2))
_DTYPES = {"f32": tf.float32, "bf16": tf.bfloat16, "s32": tf.int32, "pred": tf.bool}
_TEXT = re.compile(r"(?P<element>\w+)\[(?P<dims>[^\]]*)\](?P<marks>.*)")


def argument(text):
    """The spec and the sharding that `f32[4, 8@dp]{U:tp}` writes."""
    match = _TEXT.fullmatch(text)
    dims = [dim.partition("@") for dim in match["dims"].split(", ") if dim]
    spec = tf.TensorSpec([int(size) for size, _, _ in dims], _DTYPES[match["element"]])
    written = ",".join(axes or "_" for _, _, axes in dims)
    return spec, mw.Sharding.parse(MESH, f"[{written}]{match['marks']}")


def explained(fn, *types, **how):
    """`fn` of tensors of these types, explained."""
    given = [argument(text) for text in types]
    return mw.explain_types(
        fn,
        [spec for spec, _ in given],
        MESH,
        in_shardings=[sharding for _, sharding in given],
        **how,
    )


def inferred(fn, *types):
    """The type of the result of `fn`, which may be undecided."""
    program = explained(fn, *types)
    inside = [e for e in map(str, program.errors) if "result of the program" not in e]
    assert not inside, inside
    return str(program.tensors[-1].type)


def refused(fn, *types):
    """The one error in `fn`."""
    (error,) = explained(fn, *types).errors
    return str(error)


def split(x, *dims, **how):
    return mw.mesh_split(x, MESH, dims, **how)


def gradients(loss, *args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        value = loss(*args)
    return [tf.convert_to_tensor(g) for g in tape.gradient(value, args)]
