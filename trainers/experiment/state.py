"""The training state between programs, in whichever form was used last."""

from __future__ import annotations

from meshwright.framework.compiler.xla.jax_bridge import abstract_array
from meshwright.framework.nested_map import NestedMap
from meshwright.trainers.experiment.step_programs import Form, StepPrograms


class TrainState:
    """Holds the state and converts between its forms only on mismatch.

    The main program keeps it in stored form; checkpoints and export want logical
    shapes, evaluation the weights as the plan has them. Where two forms are the same
    arrays, no program between them is ever compiled.
    """

    def __init__(self, programs: StepPrograms, logical: NestedMap):
        self._programs = programs
        self._logical: NestedMap | None = logical
        self._stored: NestedMap | None = None

    @classmethod
    def initial(cls, programs: StepPrograms) -> TrainState:
        """The state before step 0."""
        return cls(programs, programs.init(programs.seed()))

    @classmethod
    def abstract(cls, programs: StepPrograms) -> NestedMap:
        """What a checkpoint is restored into: logical form, on the plan's mesh."""
        return programs.state_specs.map(
            lambda spec, sharding: abstract_array(spec.shape, spec.dtype, sharding),
            programs.initial_shardings(),
        )

    def stored(self) -> NestedMap:
        """The state as the main program takes it."""
        if self._stored is None:
            programs = self._programs
            borders = programs.stored_forms().map(lambda form: form.border)
            same = borders == programs.initial_shardings()
            self._stored = self._logical if same else programs.shard(self._logical)
            self._logical = None
        return self._stored

    def logical(self) -> NestedMap:
        """The state in logical shapes."""
        if self._logical is None:
            forms = self._programs.stored_forms().leaves()
            same = all(form.is_logical for form in forms)
            self._logical = (
                self._stored if same else self._programs.unshard(self._stored)
            )
        return self._logical

    def weights(self) -> NestedMap:
        """To evaluate: the moving average if there is one, in the plan's form."""
        programs, part = self._programs, "theta"
        if "ema" in programs.state_specs:
            part = "ema"
        plan = programs.plan_forms()[part]
        if self._stored is None:
            form, weights = Form.LOGICAL, self._logical[part]
            have = programs.initial_shardings()[part]
            same = have == plan.map(lambda form: form.border)
        else:
            form, weights = Form.STORED, self._stored[part]
            same = programs.stored_forms()[part] == plan
        return weights if same else programs.gather(part, form)(weights)

    def update(self, stored: NestedMap) -> None:
        """Takes the main program's result; the state before it was donated."""
        self._stored, self._logical = stored, None

    def replace(self, logical: NestedMap) -> None:
        """Takes a restored state in place of what is held."""
        self._stored, self._logical = None, logical

    def drop(self) -> None:
        """Lets go of the arrays, to make room for those of `replace`."""
        self._stored = self._logical = None

    @property
    def step(self) -> int:
        """Number of updates made; waits for the devices."""
        state = self._logical if self._stored is None else self._stored
        return int(state.step)
