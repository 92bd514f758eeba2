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
    original = loop.CallBatches

    def use(change):
        class Changed(original):
            def __init__(self, experiment, start_step, *args):
                super().__init__(experiment, start_step, *args)
                self.step, self.steps = start_step + 1, experiment.steps_per_loop

            def __next__(self):
                batches = super().__next__()
                change(self.step, batches)
                self.step += self.steps
                return batches

        monkeypatch.setattr(loop, "CallBatches", Changed)

    return use
