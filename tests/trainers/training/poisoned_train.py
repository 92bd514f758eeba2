"""meshwright-train, with a batch that is infinite: the first one that step 8 reads."""

import numpy as np

from meshwright.trainers import train
from meshwright.trainers.training import loop

_original = loop.call_batches


def poisoned_batches(experiment, start_step, rows):
    """Instead of `loop.call_batches`, for one step a loop."""
    batches_of_steps = _original(experiment, start_step, rows)
    for step, batches in enumerate(batches_of_steps, start_step + 1):
        if step == 8:
            batches.weights[0] = np.inf
        yield batches


if __name__ == "__main__":
    loop.call_batches = poisoned_batches
    train.run()
