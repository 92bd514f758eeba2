"""How the training state is held between two programs."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.stored_form import StoredForm


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """How the state, or a part of it, is held.

    Args:
      name: for messages and profiles; an experiment has one layout of each name.
      forms: nested map like the state, with the `StoredForm` of each leaf.
    """

    name: str
    forms: NestedMap

    @classmethod
    def of_plan(cls, specs: NestedMap, plan: ShardingPlan) -> StateLayout:
        """As the plan splits each leaf, padded where axes do not divide a dim.

        Args:
          specs: nested map of `WeightSpec`.
          plan: the plan.
        """
        return cls(
            "plan",
            specs.map_with_path(
                lambda path, spec: StoredForm(
                    spec.shape, spec.dtype, spec.sharding(plan, path)
                )
            ),
        )

    def even(self) -> StateLayout:
        """Of logical shapes: split by the axes that divide their dim, and no others."""
        return StateLayout("initial", self.forms.map(_even))

    def saved(self) -> StateLayout:
        """Of logical shapes: what has them stays as it is, all else is as `even`."""
        forms = self.forms.map(lambda f: _plain(f) if f.is_logical else _even(f))
        return StateLayout("saved", forms)

    def part(self, name: str) -> StateLayout:
        """That of a part of the state, such as "theta"."""
        return StateLayout(f"{self.name}_{name}", self.forms[name])

    @property
    def shardings(self) -> NestedMap:
        """The sharding of each array."""
        return self.forms.map(lambda form: form.border)

    @property
    def logical_specs(self) -> NestedMap:
        """Nested map of `tf.TensorSpec`: logical shapes."""
        return self.forms.map(lambda form: tf.TensorSpec(form.shape, form.dtype))

    @property
    def stored_specs(self) -> NestedMap:
        """Nested map of `tf.TensorSpec`: the arrays' shapes."""
        return self.forms.map(lambda form: tf.TensorSpec(form.stored_shape, form.dtype))

    def same_arrays(self, other: StateLayout) -> bool:
        """Whether what is held so is held as `other` too, without any conversion."""
        pairs = zip(self.forms.leaves(), other.forms.leaves(), strict=True)
        return all(_same_array(ours, theirs) for ours, theirs in pairs)

    def onto(self, other: StateLayout) -> NestedMap:
        """The forms from which a program converts to `other`.

        What is held as there already is not combined, padded or resharded in it.
        """
        return self.forms.map(
            lambda ours, theirs: (
                _plain(ours) if ours.is_logical and _same_array(ours, theirs) else ours
            ),
            other.forms,
        )


def _even(form: StoredForm) -> StoredForm:
    return StoredForm(form.shape, form.dtype, form.sharding.even(form.shape))


def _plain(form: StoredForm) -> StoredForm:
    return StoredForm(form.shape, form.dtype, form.border)


def _same_array(ours: StoredForm, theirs: StoredForm) -> bool:
    return (ours.stored_shape, ours.border) == (theirs.stored_shape, theirs.border)
