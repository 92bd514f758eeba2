"""XLA's two partitioners."""

from __future__ import annotations

import enum

import gin


@gin.constants_from_enum
class Partitioner(enum.Enum):
    """Which of XLA's partitioners completes the shardings."""

    SHARDY = "shardy"
    GSPMD = "gspmd"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(
            f"there is no partitioner {value!r}: use Partitioner.SHARDY or "
            "Partitioner.GSPMD"
        )

    @property
    def title(self) -> str:
        """Its name in texts."""
        return {"shardy": "Shardy", "gspmd": "GSPMD"}[self.value]

    @property
    def other(self) -> Partitioner:
        """The other partitioner, as a second opinion."""
        return Partitioner.GSPMD if self is Partitioner.SHARDY else Partitioner.SHARDY
