"""What compiling one candidate of a search gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Of JSON's types, as it goes between processes and into the cache.

    Args:
      seconds: estimated time of one step; None if it was refused.
      device_ids: the device order that this is for, as in `ShardingPlan`; None for the
        trainer's own.
      peak: bytes that a device needs at most at one time; None if it was refused.
      utilization: the model's FLOPs over those that the devices could do.
      compile_seconds: wall time of tracing and compiling.
      refusal: why there is no program; None if there is one.
      too_large: whether that is for want of memory.
    """

    seconds: float | None = None
    device_ids: tuple[int, ...] | None = None
    peak: int | None = None
    utilization: float | None = None
    compile_seconds: float | None = None
    refusal: str | None = None
    too_large: bool = False

    @property
    def is_final(self) -> bool:
        """Whether it would come out the same again.

        Otherwise something failed: perhaps for good, perhaps for what else ran then.
        """
        return self.too_large or self.seconds is not None

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Result:
        """Reads what `dataclasses.asdict` gave."""
        ids = kept["device_ids"]
        return cls(**{**kept, "device_ids": None if ids is None else tuple(ids)})
