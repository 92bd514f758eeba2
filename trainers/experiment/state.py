"""The training state between programs, in whichever layout was used last."""

from __future__ import annotations

from meshwright.framework.compiler.xla.jax_mesh import abstract_array
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment.step_programs import StepPrograms


class TrainState:
    """Holds the state and converts it to the requested layout.

    The main program keeps it in the step layout; checkpoints and export want logical
    shapes, evaluation the weights in the plan's layout. Where two layouts are the same
    arrays, no program between them is ever compiled.

    Args:
      programs: the experiment's programs.
      logical: the state in the initial layout.
    """

    def __init__(self, programs: StepPrograms, logical: NestedMap):
        self._programs = programs
        self.replace(logical)

    @classmethod
    def initial(cls, programs: StepPrograms) -> TrainState:
        """The state before step 0."""
        return cls(programs, programs.init(programs.seed()))

    @classmethod
    def abstract(cls, programs: StepPrograms) -> NestedMap:
        """The abstract arrays for restoring a checkpoint: the initial layout."""
        return programs.initial_layout.forms.map(
            lambda form: abstract_array(form.stored_shape, form.dtype, form.border)
        )

    @classmethod
    def abstract_weights(cls, programs: StepPrograms) -> NestedMap:
        """Those of a state of which only `weights` and `step` are read."""
        abstract = cls.abstract(programs)
        read = ("step", _read_weights(programs))
        return NestedMap({name: abstract[name] for name in read})

    def stored(self) -> NestedMap:
        """The state as the main program takes it."""
        if self._is_initial:
            programs = self._programs
            before, after = programs.initial_layout, programs.step_layout
            self.update(programs.convert(self._state, before, after))
        return self._state

    def logical(self) -> NestedMap:
        """The state in logical shapes."""
        if self._logical is None:
            programs = self._programs
            before, after = programs.step_layout, programs.saved_layout
            self._logical = programs.convert(self._state, before, after)
        return self._logical

    def weights(self) -> NestedMap:
        """The weights to evaluate, or their moving average, in the plan's layout."""
        programs = self._programs
        part = _read_weights(programs)
        held = programs.initial_layout if self._is_initial else programs.step_layout
        return programs.convert(
            self._state[part], held.part(part), programs.plan_layout.part(part)
        )

    def update(self, stored: NestedMap) -> None:
        """Takes the main program's result; the state before it was donated."""
        self._state, self._logical, self._is_initial = stored, None, False

    def replace(self, logical: NestedMap) -> None:
        """Takes a restored state in place of the held state."""
        self._state, self._logical, self._is_initial = logical, logical, True

    def drop(self) -> None:
        """Lets go of the arrays, to make room for those of `replace`."""
        self._state = self._logical = None

    @property
    def step(self) -> int:
        """Number of updates made; waits for the devices."""
        return int(self._state.step)


def _read_weights(programs: StepPrograms) -> str:
    """The part of the state whose weights are evaluated."""
    return "ema" if "ema" in programs.state_specs else "theta"
