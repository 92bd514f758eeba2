"""Policies for numbers that are not finite."""

from __future__ import annotations

import enum

import gin


@gin.constants_from_enum
class NotFinite(enum.Enum):
    """The policy when a loss or the norm of the gradients is infinite or NaN."""

    STOP = "stop"
    """End; the newest checkpoint is from before."""
    SKIP = "skip"
    """Leave weights and slots as they were before the step, and go on."""
    ROLL_BACK = "roll_back"
    """Go back to the newest checkpoint, and on with the batches after that step's."""


class NotFiniteError(ArithmeticError):
    """A loss, gradient or weight became infinite or NaN; the message names the step.

    Args:
      step: the step in which, or after which, it is.
      text: the message.
    """

    def __init__(self, step: int, text: str):
        super().__init__(text)
        self.step = step
