"""meshwright-train, with a batch that is infinite: the first one that step 8 reads."""

import numpy as np

from meshwright.trainers import train
from meshwright.trainers.training import loop


class PoisonedBatches(loop.CallBatches):
    """Instead of `CallBatches`, for one step a loop."""

    def __init__(self, experiment, start_step, *args):
        super().__init__(experiment, start_step, *args)
        self.step = start_step

    def __next__(self):
        batches = super().__next__()
        self.step += 1
        if self.step == 8:
            batches.weights[0] = np.inf
        return batches


if __name__ == "__main__":
    loop.CallBatches = PoisonedBatches
    train.run()
