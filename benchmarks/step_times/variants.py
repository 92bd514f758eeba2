"""The programs that `step_time.py` and others compare; a process runs one of them.

    python variants.py VARIANT CHECKED_STEPS GIN_FILE GIN_BINDING...

All programs build the experiment of the file, such as `lm/stdlib_tiny.gin`, with the
bindings, start from the weights that its init program makes and train on the same
random tokens.

Dims: B batch, S sequence.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import interleave
import jax
import numpy as np
import reference_jax
import tensorflow as tf

from meshwright.framework.compiler.xla import platforms
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms

Call = Callable[[NestedMap], np.ndarray]
"""Trains on the batches of one call; returns the loss of each step."""

_BATCHES = 4  # Number of calls before tokens repeat.


def meshwright(programs: StepPrograms) -> Call:
    """The trainer's main program."""
    state = TrainState.initial(programs)

    def call(batches):
        out = programs.main(state.stored(), batches)
        state.update(out["state"])
        return np.asarray(out["metrics"].loss)

    return call


def tf_jit(programs: StepPrograms) -> Call:
    """The same TF function under TF's compiler, on one device.

    The state is in variables, which XLA updates in place: that is TF's way to donate
    it.
    """
    state = _initial_state(programs).map(tf.Variable)

    @tf.function(jit_compile=True, autograph=False)
    def train_loop(batches):
        out = programs.train_loop(state.map(tf.convert_to_tensor), batches)
        state.map(lambda variable, value: variable.assign(value), out.state)
        return out.metrics.loss

    return lambda batches: train_loop(batches).numpy()


def jax_scan(programs: StepPrograms) -> Call:
    """Hand-written JAX, with the layers in a `lax.scan`."""
    return _jax(programs, reference_jax.Layers.SCAN)


def jax_unrolled(programs: StepPrograms) -> Call:
    """Hand-written JAX, with the layers one after another."""
    return _jax(programs, reference_jax.Layers.UNROLLED)


def _jax(programs: StepPrograms, layers: reference_jax.Layers) -> Call:
    experiment = programs.experiment
    optimizer, plan = experiment.optimizer, experiment.plan
    rate = optimizer.learning_rate
    reference = reference_jax.Reference(
        mesh=jax.make_mesh(
            plan.mesh_shape,
            plan.mesh_axes,
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
        ),
        layers=layers,
        warmup_steps=rate.steps,
        peak_rate=rate.schedule.start_value,
        end_step=rate.schedule.end_step,
        end_rate=rate.schedule.end_value,
        clip=optimizer.clip_global_norm,
    )
    program = reference.compile(
        _plain(_initial_state(programs)), _plain(random_batches(programs, 0))
    )
    state_shardings, batch_shardings = program.input_shardings[0]
    state = jax.device_put(_plain(_initial_state(programs)), state_shardings)

    def call(batches):
        nonlocal state
        state, metrics = program(
            state, jax.device_put(_plain(batches), batch_shardings)
        )
        return np.asarray(metrics["loss"])

    return call


VARIANTS = {fn.__name__: fn for fn in (meshwright, tf_jit, jax_scan, jax_unrolled)}


def random_batches(programs: StepPrograms, seed: int) -> NestedMap:
    """Batches [steps, B, S] for one call: two random documents in each row."""
    random = np.random.default_rng(seed)
    steps, rows, size = programs.abstract_batches().ids.shape
    vocab_size = programs.experiment.task.text.vocab_size
    tokens = random.integers(vocab_size, size=[steps, rows, size + 1], dtype=np.int32)
    start = random.integers(1, size, size=[steps, rows, 1], dtype=np.int32)
    index = np.arange(size, dtype=np.int32)
    second = (index >= start).astype(np.int32)
    return NestedMap(
        ids=tokens[..., :-1],
        labels=tokens[..., 1:],
        segment_ids=1 + second,
        segment_positions=index - start * second,
        weights=(index != start - 1).astype(np.float32),
    )


def _initial_state(programs: StepPrograms) -> NestedMap:
    """The state before step 0, as host arrays."""
    return programs.init.unshard(programs.init(programs.seed()))


def _plain(nest):
    """Nested maps as dicts."""
    if not isinstance(nest, dict):
        return nest
    return {key: _plain(value) for key, value in nest.items()}


def main() -> None:
    name, checked_steps, gin_file, *bindings = sys.argv[1:]

    def make() -> interleave.Served:
        experiment, _ = build_experiment([gin_file], bindings)
        platforms.set_platform("cpu", experiment.plan.mesh.size)
        programs = StepPrograms(experiment)
        train = VARIANTS[name](programs)
        batches = [random_batches(programs, seed) for seed in range(_BATCHES)]
        endless = itertools.cycle(batches)
        losses: list[float] = []
        while len(losses) < int(checked_steps):
            losses.extend(train(next(endless)).tolist())
        facts = {
            "losses": losses[: int(checked_steps)],
            "versions": {"tensorflow": tf.__version__, "jax": jax.__version__},
        }
        return interleave.Served(
            facts=facts,
            call=lambda: train(next(endless)),
            steps=experiment.steps_per_loop,
        )

    interleave.serve(make)


if __name__ == "__main__":
    main()
