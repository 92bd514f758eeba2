"""The training state between programs, in whichever form was used last."""

from __future__ import annotations

from meshwright.framework.compiler.jax_bridge import abstract_array
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.programs import Programs


class TrainState:
    """Holds the state and converts between its forms only on mismatch.

    The main program keeps it in stored form; checkpoints and export want the logical
    form. Where the plan divides every dim both are the same arrays, and neither the
    shard nor the unshard program is ever compiled.
    """

    def __init__(self, programs: Programs, logical: NestedMap):
        self._programs = programs
        self._same = programs.logical_shardings() == programs.state_shardings()
        self._logical: NestedMap | None = logical
        self._stored: NestedMap | None = logical if self._same else None

    @classmethod
    def initial(cls, programs: Programs) -> TrainState:
        """The state before step 0."""
        return cls(programs, programs.init(programs.seed()))

    @classmethod
    def abstract(cls, programs: Programs) -> NestedMap:
        """What a checkpoint is restored into: logical form, on the plan's mesh."""
        return programs.state_specs.map(
            lambda spec, sharding: abstract_array(spec.shape, spec.dtype, sharding),
            programs.logical_shardings(),
        )

    def stored(self) -> NestedMap:
        """The state as the main and eval programs take it."""
        if self._stored is None:
            self._stored = self._programs.shard(self._logical)
            self._logical = None
        return self._stored

    def logical(self) -> NestedMap:
        """The state in logical shapes."""
        if self._logical is None:
            self._logical = self._programs.unshard(self._stored)
        return self._logical

    def update(self, stored: NestedMap) -> None:
        """Takes the main program's result; the state before it was donated."""
        self._stored = stored
        self._logical = stored if self._same else None

    @property
    def step(self) -> int:
        """Number of updates made; waits for the devices."""
        state = self._logical if self._stored is None else self._stored
        return int(state.step)
