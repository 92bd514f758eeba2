"""The layout of the training state between two programs."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.sharding.stored_form import StoredForm


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """A layout in which the state, or a part of it, is held.

    Args:
      name: for messages and profiles; an experiment has one layout of each name.
      forms: nested map like the state, with the `StoredForm` of each leaf.
    """

    name: str
    forms: NestedMap

    @classmethod
    def of_plan(cls, specs: NestedMap, plan: ShardingPlan) -> StateLayout:
        """The plan's split of each leaf, padded where axes do not divide a dim.

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
        """The layout of logical shapes, split only by axes that divide their dim."""
        return StateLayout("initial", self.forms.map(_even))

    def saved(self, initial: StateLayout) -> StateLayout:
        """A layout of logical shapes: leaves that have them stay, the rest is even.

        Args:
          initial: the even layout of the logical shapes.
        """

        def form(held: StoredForm, even: StoredForm) -> StoredForm:
            return _plain(held) if held.stored_shape == even.shape else even

        return StateLayout("saved", self.forms.map(form, initial.forms))

    def part(self, name: str) -> StateLayout:
        """The layout of a part of the state, such as "theta"."""
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

    def same_arrays(self, layout: StateLayout) -> bool:
        """Whether the arrays are those of `layout` too, without any conversion."""
        pairs = zip(self.forms.leaves(), layout.forms.leaves(), strict=True)
        return all(_same_array(form, target) for form, target in pairs)

    def onto(self, layout: StateLayout) -> NestedMap:
        """The forms from which a program converts to `layout`.

        Leaves that are held so already are not combined, padded or resharded.
        """
        return self.forms.map(
            lambda form, target: (
                _plain(form) if form.is_logical and _same_array(form, target) else form
            ),
            layout.forms,
        )


def _even(form: StoredForm) -> StoredForm:
    return StoredForm(form.shape, form.dtype, form.sharding.even(form.shape))


def _plain(form: StoredForm) -> StoredForm:
    return StoredForm(form.shape, form.dtype, form.border)


def _same_array(form: StoredForm, target: StoredForm) -> bool:
    return (form.stored_shape, form.border) == (target.stored_shape, target.border)
