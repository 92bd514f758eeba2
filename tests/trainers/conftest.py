"""Runs that several tests look at."""

import functools

import pytest

from meshwright.trainers.training import loop
from tests.trainers import small_run


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """Maps steps_per_loop to (result, folder) of 20 steps without a break."""

    @functools.cache
    def run(steps_per_loop=1):
        folder = tmp_path_factory.mktemp("straight")
        programs = small_run.small_programs()
        if steps_per_loop == 5:
            programs = small_run.five_steps_a_loop()
        else:
            programs = small_run.at(programs)
        config = "Experiment.num_steps = 20"
        result = loop.train_and_evaluate(
            programs, loop.Run(model_dir=str(folder), config=config)
        )
        return result, folder

    return run


@pytest.fixture
def change_batches(monkeypatch):
    """Calls a function with (first step, batches) before each call of main."""
    original = loop.call_batches

    def use(change):
        def changed(experiment, start_step, rows):
            steps = experiment.steps_per_loop
            for i, batches in enumerate(original(experiment, start_step, rows)):
                change(start_step + i * steps + 1, batches)
                yield batches

        monkeypatch.setattr(loop, "call_batches", changed)

    return use
