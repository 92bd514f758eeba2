"""The microbatch that each stage of a pipeline works on, by iteration (GSPMD 3.3)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from meshwright.framework.modeling.checks import Checked, bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Checked):
    """GPipe's schedule, or with repeats the circular schedule.

    A microbatch goes through all stages, one in each iteration, `num_repeats` times.
    The first stage takes microbatches in groups of as many as there are stages; while a
    group comes round again the next group waits. So a circular pipeline's bubbles are
    those of one round, and a group that is not full leaves more of them.

    Args:
      num_stages: L.
      num_microbatches: the number of microbatches in a batch.
      num_repeats: how often each microbatch passes each stage; 1 is GPipe.

    Raises:
      ValueError: a number is no integer, or below 1.
    """

    num_stages: int = bounded(at_least=1)
    num_microbatches: int = bounded(at_least=1)
    num_repeats: int = bounded(1, at_least=1)

    @property
    def slots(self) -> int:
        """Microbatches, including those that a circular pipeline's last group lacks."""
        if self.num_repeats == 1:
            return self.num_microbatches
        return -(-self.num_microbatches // self.num_stages) * self.num_stages

    @property
    def iterations(self) -> int:
        return self.slots * self.num_repeats + self.num_stages - 1

    @property
    def bubble_fraction(self) -> float:
        """The part of all stages' iterations that works on no microbatch."""
        return 1.0 - float(self.valid.mean())

    @functools.cached_property
    def microbatch(self) -> np.ndarray:
        """int32 [iterations, L]: number of the microbatch; meaningful where `valid`."""
        group, rest = self._position()
        if self.num_repeats == 1:
            return rest
        return group * self.num_stages + rest % self.num_stages

    @functools.cached_property
    def repeat(self) -> np.ndarray:
        """int32 [iterations, L]: the round that the microbatch is on."""
        _, rest = self._position()
        if self.num_repeats == 1:
            return np.zeros_like(rest)
        return rest // self.num_stages

    @property
    def rounds(self) -> list[np.ndarray]:
        """int32 [iterations] each: the rounds that stages are on, which may be equal.

        Stages up to the one that a group's first microbatch has come to are on one
        round, and all later stages on one.
        """
        ends = (0, -1) if self.num_repeats > 1 else (0,)
        return [self.repeat[:, stage] for stage in ends]

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """bool [iterations, L]: whether the stage works on a microbatch."""
        started = self._since_start() >= 0
        return started & (self.microbatch < self.num_microbatches)

    def in_a_row(self, layers: int) -> int:
        """K, of so many layers: how many a stage runs in an iteration."""
        return -(-layers // (self.num_stages * self.num_repeats))

    def first_layer(self, in_a_row: int) -> np.ndarray:
        """int32 [iterations, L]: number of the first of `in_a_row` layers."""
        stage = np.arange(self.num_stages, dtype=np.int32)
        return (self.repeat * self.num_stages + stage) * np.int32(in_a_row)

    def numbers(self, in_a_row: int) -> np.ndarray:
        """int [L, Q]: numbers of the layers of each stage, `in_a_row` of them each."""
        shape = (self.num_repeats, self.num_stages, in_a_row)
        numbers = np.arange(np.prod(shape)).reshape(shape)
        return numbers.swapaxes(0, 1).reshape(self.num_stages, -1)

    @property
    def takes_input(self) -> np.ndarray:
        """bool [iterations]: the first stage takes a microbatch from outside."""
        return self.repeat[:, 0] == 0

    @property
    def gives_output(self) -> np.ndarray:
        """bool [iterations]: the last stage is done with a microbatch."""
        return self.valid[:, -1] & (self.repeat[:, -1] == self.num_repeats - 1)

    @property
    def comes_round(self) -> np.ndarray:
        """bool [iterations]: the first stage next takes what the last stage gives."""
        return np.append(~self.takes_input[1:], False)

    def _since_start(self) -> np.ndarray:
        """int32 [iterations, L]: iterations since the stage's first microbatch."""
        iteration = np.arange(self.iterations, dtype=np.int32)
        return iteration[:, None] - np.arange(self.num_stages, dtype=np.int32)

    def _position(self) -> tuple[np.ndarray, np.ndarray]:
        """Group, and iteration within it; the first group's until the stage starts."""
        done = np.maximum(self._since_start(), 0)
        if self.num_repeats == 1:
            return np.zeros_like(done), done
        length = self.num_stages * self.num_repeats
        return done // length, done % length
