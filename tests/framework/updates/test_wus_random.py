"""Random training steps, their weight updates sharded: the numbers of one device.

Weights and examples are small whole numbers, of which every sum is exact in whatever
order. `UPDATES_CASES` says how many steps there are, `UPDATES_SEED` gives others.
"""

import os
import random

import hypothesis
import numpy as np
import tensorflow as tf

from meshwright import framework as mw
from tests.framework.partial.partial_programs import RandomSteps, check_random

CASES = int(os.environ.get("UPDATES_CASES", 8))
SEED = os.environ.get("UPDATES_SEED", "")
MESH = mw.DeviceMesh(("data", "model"), (2, 2))
BATCH, SIZES, CALLS = 4, [4, 6, 8], 3


def by_rows(w):
    return tf.concat([w[1:], w[:1]], 0)


USES = {
    "itself": lambda w: w,
    "negated": lambda w: -w,
    "turned": by_rows,
    "less its rows' sum": lambda w: w - tf.reduce_sum(w, 1, keepdims=True),
    "rectified": tf.nn.relu,
    "reshaped": lambda w: tf.reshape(tf.reshape(w, [-1]) + 1.0, w.shape),
    "picked": lambda w: tf.gather(w, [1, 0, 1, 3] + [2] * (w.shape[0] - 4)),
    "masked": lambda w: tf.where(np.indices(w.shape).sum(0) % 3 > 0, w, 0.0),
    "twice transposed": lambda w: tf.transpose(tf.nn.relu(tf.transpose(w))),
}
"""What a step makes of a weight before it multiplies by it."""
BETWEEN = {
    "nothing": lambda y: y,
    "relu": tf.nn.relu,
    "abs": tf.abs,
    "sign": lambda y: y * tf.sign(tf.stop_gradient(y)),
    "columns' sum": lambda y: y - tf.reduce_sum(y, 1, keepdims=True),
    "batch's sum": lambda y: y + tf.reduce_sum(y, 0),
}
UPDATES = {
    "plain": lambda g, m, w: (g, m),
    "momentum": lambda g, m, w: (g + 0.5 * m, g + 0.5 * m),
    "decayed": lambda g, m, w: (g + 0.5 * w, m),
    "its size": lambda g, m, w: (
        g * tf.where(tf.reduce_sum(g * g) > 64.0, 0.5, 1.0),
        m,
    ),
    "rows' largest": lambda g, m, w: (
        g - tf.reduce_max(tf.abs(g), -1, keepdims=True),
        m,
    ),
    "columns' sum": lambda g, m, w: (g - tf.reduce_sum(w, 0), m + w),
    "flat": lambda g, m, w: (tf.reshape(tf.reshape(g, [-1]) + 1.0, g.shape), m),
    "transposed": lambda g, m, w: (tf.transpose(tf.sign(tf.transpose(g))), m + g),
    "turned": lambda g, m, w: (by_rows(g), m),
    "running sum": lambda g, m, w: (tf.cumsum(g, 0), m),
    "sorted": lambda g, m, w: (g, tf.sort(m + g, 0)),
    "rounded": lambda g, m, w: (tf.cast(tf.cast(g, tf.bfloat16), g.dtype), m),
    "rarely": lambda g, m, w: tf.cond(
        tf.reduce_sum(m) > 0.0, lambda: (g, m - g), lambda: (g + w, m + 1.0)
    ),
}


class Step(RandomSteps):
    """A random training step on weights, their slots, and examples."""

    def __init__(self, random: random.Random):
        super().__init__(random)
        self.sizes = [self.choose(*SIZES)]
        self.layers = [self.layer() for _ in range(self.choose(1, 2, 3))]
        self.updates = [self.update() for _ in self.layers]
        self.tied = self.choose(False, True)
        self.clipped = self.choose(False, True)
        self.microbatches = self.choose(1, 1, 2)
        self.text.append(
            f"tied {self.tied}, clipped {self.clipped}, "
            f"microbatches {self.microbatches}, sizes {self.sizes}"
        )

    def layer(self) -> tuple[str, str, bool]:
        self.sizes.append(self.choose(*SIZES))
        layer = (self.choose(*USES), self.choose(*BETWEEN), self.choose(False, True))
        self.text.append(f"weight {layer[0]}, then {layer[1]}, annotated {layer[2]}")
        return layer

    def update(self) -> list[str]:
        names = [self.choose(*UPDATES) for _ in range(self.choose(1, 2, 3))]
        self.text.append(f"updated {', '.join(names)}")
        return names

    def shapes(self) -> dict[str, list[int]]:
        sizes = zip(self.sizes, self.sizes[1:], strict=False)
        return {f"w{number}": list(shape) for number, shape in enumerate(sizes)}

    def loss(self, weights, x):
        y = x
        for w, (use, between, annotated) in zip(weights, self.layers, strict=True):
            y = BETWEEN[between](y @ USES[use](w))
            if annotated:
                y = mw.mesh_split(y, MESH, ["data", -1])
        if self.tied:
            y = y @ tf.transpose(weights[-1])
        return tf.reduce_sum(y)

    def gradients(self, weights, x):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = self.loss(weights, x)
        none = tf.UnconnectedGradients.ZERO
        made = tape.gradient(loss, weights, unconnected_gradients=none)
        return [tf.convert_to_tensor(g) for g in made]

    def summed(self, weights, x):
        """Gradients of all microbatches, one after the other."""
        if self.microbatches == 1:
            return self.gradients(weights, x)
        parts = tf.reshape(x, [self.microbatches, -1, x.shape[1]])
        parts = mw.mesh_split(parts, MESH, [-1, "data", -1])

        def body(i, *sums):
            new = self.gradients(weights, parts[i])
            return (i + 1, *(s + g for s, g in zip(sums, new, strict=True)))

        return tf.while_loop(
            lambda i, *_: i < self.microbatches,
            body,
            (0, *map(tf.zeros_like, weights)),
            maximum_iterations=self.microbatches,
        )[1:]

    def __call__(self, state, x):
        weights = [state["w"][name] for name in self.shapes()]
        sums = self.summed(weights, x)
        if self.clipped:
            size = tf.add_n([tf.reduce_sum(g * g) for g in sums])
            sums = [g * tf.where(size > 256.0, 0.5, 1.0) for g in sums]
        made = {"w": {}, "m": {}}
        for name, g, updates in zip(self.shapes(), sums, self.updates, strict=True):
            w, m = state["w"][name], state["m"][name]
            for update in updates:
                g, m = UPDATES[update](g, m, w)
            # Or a few steps make numbers that float32 rounds.
            made["w"][name] = tf.clip_by_value(w - g, -2.0, 2.0)
            made["m"][name] = tf.clip_by_value(m, -4.0, 4.0)
        return {"state": made}


def check(random, partitioner):
    step = Step(random)
    axes = random.choice([("data",), ("model", "data"), ("data", "model")])
    mode = random.choice([mw.WeightUpdateSharding.ALL] * 3 + ["auto"])
    split = random.choice([[None, None]] * 3 + [[None, "model"], ["model", None]])
    hypothesis.note(f"{partitioner} {mode} {axes} {split} {step}")
    mode = mw.WeightUpdateSharding(mode)
    one = {name: mw.Sharding.from_dims_mapping(MESH, split) for name in step.shapes()}
    shardings = {"w": one, "m": one}
    specs = {name: tf.TensorSpec(shape) for name, shape in step.shapes().items()}
    program = mw.compile_program(
        step,
        [{"w": specs, "m": specs}, tf.TensorSpec([BATCH, step.sizes[0]])],
        MESH,
        in_shardings=[shardings, mw.Sharding(MESH, (axes, ()))],
        out_shardings={"state": shardings},
        partitioner=partitioner,
        update_sharding=mw.UpdateSharding(mode=mode, data_axes=axes),
    )
    rng = np.random.default_rng(0)

    def whole(shape):
        return rng.integers(-1, 2, shape).astype(np.float32)

    start = {
        kind: {name: whole(shape) for name, shape in step.shapes().items()}
        for kind in ("w", "m")
    }
    got, want = program.shard(start), tf.nest.map_structure(tf.constant, start)
    for _ in range(CALLS):
        x = whole([BATCH, step.sizes[0]])
        got, want = program(got, x)["state"], step(want, tf.constant(x))["state"]
    got = program.unshard({"state": got})["state"]
    for mine, expected in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        np.testing.assert_array_equal(mine, expected)
    SHARDED.append(len(program.updates.sharded))


SHARDED: list[int] = []
"""The sharded updates of each step so far."""


def test_random_steps_have_the_numbers_of_one_device():
    check_random(check, CASES, SEED)
    assert sum(SHARDED) > CASES / 2, "few updates were sharded"
