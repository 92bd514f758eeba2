"""Three layers with attention over a mesh, one line of which is wrong; see why.md.

The weights are split by heads and by hidden units, as in tensor parallelism, and the
batch by rows. One annotation leaves out an axis.
"""

import tensorflow as tf

from meshwright import framework as mw

MODEL, HEADS, HEAD_SIZE, HIDDEN = 256, 8, 32, 2048
MESH = mw.DeviceMesh(("data", "model"), (2, 4))
ROWS = ["data", None, None]


def attention(weights, x):
    """Attention over heads; `x` is [batch, sequence, model]."""
    query, key, value = (
        mw.mesh_split(
            tf.einsum("bsm,mnd->bsnd", x, weights[name]),
            MESH,
            ["data", None, "model", None],
        )
        for name in ("query", "key", "value")
    )
    scores = tf.nn.softmax(tf.einsum("bsnd,btnd->bnst", query, key))
    mixed = tf.einsum("bnst,btnd->bsnd", scores, value)
    return x + tf.einsum("bsnd,mnd->bsm", mixed, weights["output"])


def feed_forward(weights, x, *, is_last):
    """Two products, with a hidden dim between them."""
    hidden = tf.nn.relu(tf.einsum("bsm,mh->bsh", x, weights["in"]))
    if is_last:
        hidden = mw.mesh_split(hidden, MESH, ["data", None, None])
    else:
        hidden = mw.mesh_split(hidden, MESH, ["data", None, "model"])
    return x + tf.einsum("bsh,hm->bsm", hidden, weights["out"])


def model(layers, x):
    """The mean square of what the layers make of `x`."""
    x = mw.mesh_split(x, MESH, ROWS)
    for number, weights in enumerate(layers):
        with tf.name_scope(f"layer_{number}"):
            with tf.name_scope("attention"):
                x = attention(weights["attention"], x)
            with tf.name_scope("feed_forward"):
                is_last = number == len(layers) - 1
                x = feed_forward(weights["feed_forward"], x, is_last=is_last)
            x = mw.mesh_split(x, MESH, ROWS)
    return tf.reduce_mean(x**2)


def arguments():
    """The specs of three layers and a batch, and the shardings of their weights."""
    of_heads = tf.TensorSpec([MODEL, HEADS, HEAD_SIZE])
    names = ("query", "key", "value", "output")
    specs = {
        "attention": dict.fromkeys(names, of_heads),
        "feed_forward": {
            "in": tf.TensorSpec([MODEL, HIDDEN]),
            "out": tf.TensorSpec([HIDDEN, MODEL]),
        },
    }
    by_heads, by_columns, by_rows = (
        mw.Sharding.parse(MESH, text)
        for text in ("[_,model,_]", "[_,model]", "[model,_]")
    )
    shardings = {
        "attention": dict.fromkeys(names, by_heads),
        "feed_forward": {"in": by_columns, "out": by_rows},
    }
    return [[specs] * 3, tf.TensorSpec([32, 512, MODEL])], [[shardings] * 3, None]


if __name__ == "__main__":
    mw.set_platform("cpu", device_count=8)
    specs, shardings = arguments()
    program = mw.compile_program(model, specs, MESH, in_shardings=shardings)
    mw.explain_page(program, "page.html")
    print("Open page.html in a browser.")
