"""A small language model, trained a few steps on random tokens, for parity tests."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment import Experiment
from meshwright.trainers.programs import Programs
from meshwright.trainers.state import TrainState
from meshwright.trainers.train import build_experiment

DATA = pathlib.Path(__file__).parents[1] / "data"


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses by step, and the state after the last, as host arrays by dotted path."""

    losses: np.ndarray
    state: dict[str, np.ndarray]


def small_experiment(
    *params: str, plan: str = "finalized", optimizer: str = "adam"
) -> Experiment:
    """The small language model under one of Table 1's plans, with `params` over it."""
    files = [
        str(DATA / "small_lm.gin"),
        f"plans/{plan}.gin",
        str(DATA / f"small_{optimizer}.gin"),
    ]
    return build_experiment(files, list(params))[0]


def random_batches(experiment: Experiment, calls: int) -> list[NestedMap]:
    """Batches for `calls` calls of the main program; the same for every mesh."""
    rng = np.random.RandomState(0)
    vocab = experiment.task.text.vocab_size
    spec = Programs(experiment).abstract_batches()
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


def initial_state(experiment: Experiment) -> NestedMap:
    """The state before step 0 as host arrays, made on one device."""
    plan = dataclasses.replace(experiment.plan, mesh_shape=(1, 1))
    programs = Programs(dataclasses.replace(experiment, plan=plan))
    return programs.init(programs.seed()).map(np.asarray)


def train(experiment: Experiment, start: NestedMap, calls: int = 5) -> Trained:
    """Trains from `start` (host arrays) for `calls` calls of the main program."""
    programs = Programs(experiment)
    state = TrainState.from_host(programs, start)
    losses = []
    for batches in random_batches(experiment, calls):
        out = programs.main(state.stored(), batches)
        state.update(out["state"])
        losses.extend(np.asarray(out["metrics"].loss))
    logical = state.logical()
    shapes = programs.state_specs.map(lambda s: s.shape)
    for path, shape in shapes.items_by_path():
        assert logical.get_path(path).shape == shape, path
    return Trained(
        np.array(losses), {p: np.asarray(x) for p, x in logical.items_by_path()}
    )
