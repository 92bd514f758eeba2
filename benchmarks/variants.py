"""The programs that `step_time.py` compares: one process runs one of them.

    python variants.py VARIANT '["gin binding", ...]' CHECK_STEPS

All build the experiment of `lm/stdlib_tiny.gin` with the bindings, start from the
weights of its init program and train on the same random tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import json
import math
import platform
import sys
from collections.abc import Callable, Iterator

import gin
import interleave
import jax
import numpy as np
import reference_jax
import tensorflow as tf

from meshwright.framework.compiler import jax_bridge
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.programs import Programs

import meshwright.layers.transformer, meshwright.tasks.language_model

DIR = os.path.dirname(list(meshwright.layers.__path__)[0])
BATCHES = 4


def build_experiment(bindings):
    gin.add_config_file_search_path(DIR + "/params")
    gin.parse_config_files_and_bindings(["lm/stdlib_tiny.gin"], bindings)
    return gin.get_configurable("Experiment")()


def random_batches(programs: Programs, seed: int) -> NestedMap:
    """Batches for one call: two random documents in a row, as packing would lay them.

    Every array is [steps, B, S].
    """
    random = np.random.default_rng(seed)
    specs = programs.abstract_batches()
    steps, rows, size = specs.ids.shape
    vocab_size = programs.experiment.task.text.vocab_size
    tokens = random.integers(0, vocab_size, [steps, rows, size + 1], np.int32)
    start = random.integers(1, size, [steps, rows, 1], np.int32)
    index = np.arange(size, dtype=np.int32)
    second = index >= start
    return NestedMap(
        ids=tokens[..., :-1],
        labels=tokens[..., 1:],
        segment_ids=1 + second.astype(np.int32),
        segment_positions=index - start * second,
        weights=(index != start - 1).astype(np.float32),
    )


Call = Callable[[NestedMap], np.ndarray]
"""Trains on the batches of one call; the losses [steps]."""


def meshwright(programs: Programs) -> Call:
    """The trainer's own main program."""
    state = programs.shard(programs.init())

    def call(batches):
        nonlocal state
        out = programs.main(state, batches)
        state = out["state"]
        return np.asarray(out["metrics"].loss)

    return call


def tf_jit(programs: Programs) -> Call:
    """The same TF function under TF's own compiler, its state in variables.

    XLA updates variables in place, which is what donation is in JAX.
    """
    state = programs.init.unshard(programs.init()).map(tf.Variable)

    @tf.function(jit_compile=True, autograph=False)
    def train_loop(batches):
        out = programs.train_loop(state.map(tf.convert_to_tensor), batches)
        state.map(lambda variable, value: variable.assign(value), out.state)
        return out.metrics

    return lambda batches: train_loop(batches).loss.numpy()


def tf_pure(programs: Programs) -> Call:
    state = programs.init.unshard(programs.init()).map(tf.constant)
    train_loop = tf.function(programs.train_loop, jit_compile=True, autograph=False)

    def call(batches):
        nonlocal state
        out = train_loop(state, batches)
        state = out.state
        return out.metrics.loss.numpy()

    return call


def jax_scan(programs: Programs) -> Call:
    return _jax(programs, scan_layers=True)


def jax_unrolled(programs: Programs) -> Call:
    return _jax(programs, scan_layers=False)


def _jax(programs, *, scan_layers) -> Call:
    """`reference_jax`, with the experiment's sizes."""
    experiment = programs.experiment
    warmup = experiment.optimizer.learning_rate
    cosine = warmup.schedule
    reference = reference_jax.Reference(
        mesh=jax.make_mesh(
            experiment.plan.mesh_shape,
            experiment.plan.mesh_axes,
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
        ),
        steps=experiment.steps_per_loop,
        scan_layers=scan_layers,
        warmup_steps=warmup.steps,
        peak_rate=cosine.start_value,
        end_step=cosine.end_step,
        end_rate=cosine.end_value,
        clip=experiment.optimizer.clip_global_norm,
    )
    state = programs.init.unshard(programs.init())
    state = json_like(state)
    program, state_shardings, batch_shardings = reference.compile(
        state, dict(random_batches(programs, 0))
    )
    jax_bridge.LAST = program
    state = jax.device_put(state, state_shardings)

    def call(batches):
        nonlocal state
        state, metrics = program(state, jax.device_put(dict(batches), batch_shardings))
        return np.asarray(metrics["loss"])

    call.program = program
    return call


def json_like(nest):
    return (
        {k: json_like(v) for k, v in nest.items()} if isinstance(nest, dict) else nest
    )


VARIANTS = dict(
    meshwright=meshwright,
    tf_jit=tf_jit,
    tf_pure=tf_pure,
    jax_scan=jax_scan,
    jax_unrolled=jax_unrolled,
)


def main():
    variant, bindings, check_steps = (
        sys.argv[1],
        json.loads(sys.argv[2]),
        int(sys.argv[3]),
    )

    def make():
        # device count: from MESH_SHAPE
        experiment = build_experiment(bindings)
        jax_bridge.set_platform("cpu", math.prod(experiment.plan.mesh_shape))
        programs = Programs(experiment)
        call = VARIANTS[variant](programs)
        batches = [random_batches(programs, seed) for seed in range(BATCHES)]
        n = -(-check_steps // experiment.steps_per_loop)
        losses = np.concatenate([call(batches[i % BATCHES]) for i in range(n)])
        it = iter(range(n, 10**9))
        d = os.environ.get("DUMP")
        if d:
            txt = (
                programs.main.hlo_text()
                if variant == "meshwright"
                else call.program.as_text()
                if hasattr(call, "program")
                else ""
            )
            open(d, "w").write(txt)
        return dict(
            losses=losses.tolist(), steps=experiment.steps_per_loop
        ), lambda: call(batches[next(it) % BATCHES])

    interleave.serve(make)


if __name__ == "__main__":
    main()
