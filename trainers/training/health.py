"""How a training fares: values that are not finite, time not spent training."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from meshwright.trainers.experiment.not_finite import NotFinite

_KEY = "history"


@dataclasses.dataclass(kw_only=True)
class History:
    """The history of a training over all its runs; checkpoints keep it.

    Args:
      began: when the first run began, seconds since the epoch.
      productive: seconds spent in steps whose results the training goes on from.
      skipped_steps: steps that changed no weight, see `NotFinite.SKIP`.
      roll_backs: see `NotFinite.ROLL_BACK`.
      batches_passed: number of batches that the input is ahead of the steps, by roll
        backs.
    """

    began: float = dataclasses.field(default_factory=time.time)
    productive: float = 0.0
    skipped_steps: int = 0
    roll_backs: int = 0
    batches_passed: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> History:
        """The history in a checkpoint's metadata; what it lacks has the default.

        Raises:
          ValueError: the metadata hold something else there.
        """
        saved = metadata.get(_KEY, {})
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if not isinstance(saved, Mapping) or not all(map(_is_count, saved.values())):
            raise ValueError(
                f"the checkpoint's {_KEY} is {str(saved)[:200]}, must have numbers for "
                + ", ".join(kinds)
            )
        known = {name: value for name, value in saved.items() if name in kinds}
        counts = {n: int(v) for n, v in known.items() if kinds[n] == "int"}
        return cls(**{**known, **counts})

    def metadata(self) -> dict[str, Any]:
        """The entry for a checkpoint's metadata."""
        return {_KEY: dataclasses.asdict(self)}

    def goodput(self) -> float:
        """Share of the wall time since the training began that went into its steps.

        The rest went into compiling, saving, evaluating, steps that were lost or rolled
        back, and the time between runs.
        """
        # A clock that was set back must not make the share more than 1.
        elapsed = max(time.time() - self.began, self.productive, 1e-9)
        return self.productive / elapsed

    def scalars(self, policy: NotFinite) -> dict[str, float]:
        """Scalars for TensorBoard, by tag."""
        scalars = {"run/goodput": self.goodput()}
        if policy is NotFinite.SKIP:
            scalars["run/skipped_steps"] = self.skipped_steps
        if policy is NotFinite.ROLL_BACK:
            scalars["run/roll_backs"] = self.roll_backs
        return scalars


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0
