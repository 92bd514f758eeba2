"""The result of compiling a candidate of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A result of JSON's types, passed between processes and kept in the cache.

    Args:
      seconds: estimated time of one step; None if it was refused.
      device_ids: the device order of the estimate, as in `ShardingPlan`; None for the
        trainer's order.
      peak: bytes that a device needs at most at one time; None if it was refused.
      utilization: the model's FLOPs over those that the devices could do; None if the
        task does not count them.
      compile_seconds: wall time of tracing and compiling.
      refusal: why there is no program; None if there is one.
      too_large: whether the refusal is for want of memory.
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
        """Whether compiling again would give the same result.

        Otherwise something failed: perhaps for good, perhaps for what else ran then.
        """
        return self.too_large or self.seconds is not None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Result:
        """The result of these fields, which `dataclasses.asdict` gave."""
        ids = fields["device_ids"]
        return cls(**{**fields, "device_ids": None if ids is None else tuple(ids)})
