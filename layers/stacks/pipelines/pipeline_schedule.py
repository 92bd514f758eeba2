"""The microbatch that each stage of a pipeline works on, by iteration (GSPMD 3.3)."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import gin
import numpy as np

from meshwright.framework.modeling.checks import Checked, bounded


@gin.constants_from_enum
class PipelineOrder(enum.Enum):
    """When the backward passes of a pipeline's microbatches run.

    FORWARD_FIRST runs them after all forward passes, the last microbatch first: stages
    keep the activations of all microbatches. ONE_F_ONE_B runs a microbatch's backward
    pass as soon as its loss is known, in the iterations of later microbatches' forward
    passes: stages keep those of less than twice as many microbatches as stages. Its
    loss must be computed within the pipeline (`Pipeline.loss`).
    """

    FORWARD_FIRST = "forward_first"
    ONE_F_ONE_B = "one_f_one_b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Checked):
    """GPipe's schedule, or with repeats the circular schedule.

    A microbatch goes through all stages, one in each iteration, `num_repeats` times.
    The first stage takes microbatches in groups of as many as there are stages; while a
    group comes round again the next group waits. So a circular pipeline's bubbles are
    those of one round, and a group that is not full leaves more of them.

    The tables are those of forward passes; `backward` has as many iterations. With
    `ONE_F_ONE_B` a microbatch's backward pass in the last stage is in the iteration of
    its forward pass there, and goes back a stage in each iteration.

    Args:
      num_stages: L.
      num_microbatches: the number of microbatches in a batch.
      num_repeats: how often each microbatch passes each stage; 1 is GPipe.
      order: when backward passes run.

    Raises:
      ValueError: a number is no integer, or below 1.
    """

    num_stages: int = bounded(at_least=1)
    num_microbatches: int = bounded(at_least=1)
    num_repeats: int = bounded(1, at_least=1)
    order: PipelineOrder = PipelineOrder.FORWARD_FIRST

    @property
    def is_one_f_one_b(self) -> bool:
        return self.order is PipelineOrder.ONE_F_ONE_B

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
    def backward_start(self) -> int:
        """The iteration with the first backward pass; those before have none."""
        if self.is_one_f_one_b:
            return self.num_stages * self.num_repeats - 1
        return self.iterations

    @property
    def backward(self) -> PipelineSchedule:
        """The tables of backward passes, from `backward_start` on."""
        return _Backward(**_fields(self))

    @property
    def bubble_fraction(self) -> float:
        """The part of all stages' iterations that works on no microbatch.

        It is the same of forward and of backward passes.
        """
        return 1.0 - float(self.valid.mean())

    @property
    def kept_passes(self) -> int:
        """Of how many forward passes a stage keeps activations, bubbles included."""
        if self.is_one_f_one_b:
            return int(self.kept_at[0].max()) + 1
        return self.iterations

    @functools.cached_property
    def kept_at(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [iterations, L]: where a pass's activations are kept, in its stage.

        The second table is by iteration of the backward pass, which reads them; it is
        meaningful where that is valid. A forward pass takes the first place that is
        free, so there are as many as a stage must keep at a time.
        """
        backward = self.backward
        written, read = (np.zeros(self.valid.shape, np.int32) for _ in range(2))
        for stage in range(self.num_stages):
            ends = {
                (backward.microbatch[t, stage], backward.repeat[t, stage]): t
                for t in np.flatnonzero(backward.valid[:, stage])
            }
            busy_until: list[int] = []
            for t in range(self.iterations):
                place = next(
                    (n for n, end in enumerate(busy_until) if end < t), len(busy_until)
                )
                if place == len(busy_until):
                    busy_until.append(t)
                busy_until[place] = t
                if self.valid[t, stage]:
                    end = ends[self.microbatch[t, stage], self.repeat[t, stage]]
                    busy_until[place] = self.backward_start + end
                    read[end, stage] = place
                written[t, stage] = place
        return written, read

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


class _Backward(PipelineSchedule):
    """The backward passes: a mirror image of the forward passes.

    In time, if these come first; else in stages and rounds.
    """

    @functools.cached_property
    def microbatch(self) -> np.ndarray:
        return self._mirrored(self._forward.microbatch)

    @functools.cached_property
    def repeat(self) -> np.ndarray:
        repeat = self._mirrored(self._forward.repeat)
        return self.num_repeats - 1 - repeat if self.is_one_f_one_b else repeat

    @functools.cached_property
    def valid(self) -> np.ndarray:
        return self._mirrored(self._forward.valid)

    @functools.cached_property
    def _forward(self) -> PipelineSchedule:
        return PipelineSchedule(**_fields(self))

    def _mirrored(self, table: np.ndarray) -> np.ndarray:
        return table[:, ::-1] if self.is_one_f_one_b else table[::-1]


def _fields(schedule: PipelineSchedule) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(schedule))
    return {name: getattr(schedule, name) for name in names}
