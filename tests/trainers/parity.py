"""A small language model, trained a few steps on random tokens, for parity tests."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms

DATA = pathlib.Path(__file__).parents[1] / "data"


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses by step and the gradients' norms, and the state after the last.

    The state is host arrays by dotted path.
    """

    losses: np.ndarray
    norms: np.ndarray
    state: dict[str, np.ndarray]


def small_experiment(
    *params: str, plan: str = "finalized", optimizer: str = "adam", experts: int = 0
) -> Experiment:
    """The small language model under a shipped plan, with `params` over it.

    With `experts`, so many are in every other layer.
    """
    if experts:
        params = (f"NUM_EXPERTS = {experts}", *params)
    files = [
        str(DATA / "small_lm.gin"),
        *(["lm/moe.gin"] if experts else []),
        f"plans/{plan}.gin",
        str(DATA / f"small_{optimizer}.gin"),
    ]
    return build_experiment(files, list(params))[0]


def random_batches(experiment: Experiment, calls: int) -> list[NestedMap]:
    """Batches for `calls` calls of the main program; the same for every mesh."""
    rng = np.random.RandomState(0)
    vocab = experiment.task.text.vocab_size
    spec = StepPrograms(experiment).abstract_batches()
    B, S = experiment.global_batch, experiment.task.text.sequence_length
    shape = (calls * experiment.steps_per_loop, B, S)
    # The same tokens at each step, so that a few steps learn them.
    tokens = np.tile(
        rng.randint(0, vocab, (B, S + 1)).astype(np.int32), (shape[0], 1, 1)
    )
    segments = 1 + (np.arange(S) >= S // 2).astype(np.int32)
    columns = NestedMap(
        ids=tokens[..., :-1],
        labels=tokens[..., 1:],
        segment_ids=np.broadcast_to(segments, shape),
        segment_positions=np.broadcast_to(np.arange(S, dtype=np.int32), shape),
        weights=(rng.rand(*shape) < 0.9).astype(np.float32),
    )
    return [
        spec.map(lambda s, x, i=i: x[i * s.shape[0] : (i + 1) * s.shape[0]], columns)
        for i in range(calls)
    ]


def initial_state(experiment: Experiment, draw: int = 0) -> NestedMap:
    """The state before step 0 as host arrays, made eagerly; another for each draw."""
    programs = StepPrograms(experiment)
    seed = tf.constant(programs.seed()) + draw
    return programs.initial_state(seed).map(lambda leaf: leaf.numpy())


def train(
    experiment: Experiment,
    start: NestedMap,
    calls: int = 5,
    batches_of: Callable[[Experiment, int], list[NestedMap]] = random_batches,
    programs: StepPrograms | None = None,
) -> Trained:
    """Trains from `start` (host arrays) for `calls` calls of the main program.

    `programs` are the experiment's, for trainings that share the compiled ones.
    """
    programs = programs or StepPrograms(experiment)
    state = TrainState(programs, start)
    losses, norms = [], []
    for batches in batches_of(experiment, calls):
        out = programs.main(state.stored(), batches)
        state.update(out["state"])
        losses.extend(np.asarray(out["metrics"].loss))
        norms.extend(np.asarray(out["metrics"].grad_norm))
    logical = state.logical()
    shapes = programs.state_specs.map(lambda s: s.shape)
    for path, shape in shapes.items_by_path():
        assert logical.get_path(path).shape == shape, path
    return Trained(
        np.array(losses),
        np.array(norms),
        {p: np.asarray(x) for p, x in logical.items_by_path()},
    )


def train_by_tf(experiment: Experiment, start: NestedMap, calls: int = 5) -> Trained:
    """The same by TF's own kernels on one device: no XLA."""
    step = tf.function(StepPrograms(experiment).train_step, autograph=False)
    state, losses, norms = start.map(tf.constant), [], []
    for batches in random_batches(experiment, calls):
        for i in range(experiment.steps_per_loop):
            out = step(state, batches.map(lambda x, i=i: tf.constant(x[i])))
            state = out.state
            losses.append(out.metrics.loss.numpy())
            norms.append(out.metrics.grad_norm.numpy())
    return Trained(
        np.array(losses),
        np.array(norms),
        {p: x.numpy() for p, x in state.items_by_path()},
    )
