"""Rewrites a program so that weight updates are computed on shards (4.2).

Gradients are reduced onto their shards (`scatter`); where the op that sums them is not
known there, they are sliced once they are reduced. Results of an update are gathered
just before ops outside read them, in the precision that these read. The rest is left to
annotations, so that either partitioner does the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    after,
    end_of,
    is_annotation,
    location_of,
    shape_of,
    sharding_call,
    tensor_type,
)
from meshwright.framework.compiler.weight_update_sharding.carried_state import (
    Carried,
    Use,
)
from meshwright.framework.compiler.weight_update_sharding.clusters import (
    Cluster,
    block_of,
    uses_of,
)
from meshwright.framework.compiler.weight_update_sharding.decide import Decision
from meshwright.framework.compiler.weight_update_sharding.gradient import find_sum
from meshwright.framework.compiler.weight_update_sharding.redundancy import Redundancy
from meshwright.framework.compiler.weight_update_sharding.scatter import (
    cut_end,
    pad_end,
    reduce_scattered,
)
from meshwright.framework.compiler.weight_update_sharding.update_layouts import (
    UpdateLayout,
)
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm


def rewrite(
    completed: CompletedModule,
    redundancy: Redundancy,
    decisions: Sequence[Decision],
    forms: Sequence[StoredForm | None],
) -> dict[int, StoredForm]:
    """Changes the module in place.

    Args:
      completed: the module.
      redundancy: which values are summed over which axes.
      decisions: on each update.
      forms: the forms of the program's arguments before.

    Returns:
      The new forms of arguments, and of the results that replace them, by number of the
      argument.
    """
    new_forms: dict[int, StoredForm] = {}
    for decision in decisions:
        if decision.layout is not None:
            update, layout = decision.cluster, decision.layout
            rewriting = _Rewriting(completed, redundancy.reduced, update, layout)
            new_forms.update(rewriting.run(forms))
    _retype_function(completed.main)
    return new_forms


class _Rewriting:
    """The rewriting of a cluster."""

    def __init__(
        self,
        completed: CompletedModule,
        reduced,
        cluster: Cluster,
        layout: UpdateLayout,
    ):
        self.completed = completed
        self.reduced = reduced
        self.cluster = cluster
        self.layout = layout

    def run(self, forms) -> dict[int, StoredForm]:
        values = [v for v in self.cluster.values if self.layout.first(v) is not None]
        inside = [v for v in values if self.cluster.made_inside(v)]
        # All is planned before anything changes, as dims are told apart by the types.
        entries = [v for v in self.cluster.entries() if v in values]
        exits = {v: u for v, u in self.cluster.exits().items() if v in values}
        types = {v: tensor_type(v.type, self.layout.shape(v)) for v in values}
        split = {v: self.layout.sharding(v) for v in values}
        unsplit = {v: self.layout.sharding(v, split=False) for v in exits}
        enter = {v: [u for u in uses_of(v) if self.cluster.inside(u)] for v in entries}
        marks = [op for op in self.cluster.ops if is_annotation(op)]
        marks = [(op, split[op.results[0]]) for op in marks if op.results[0] in split]
        ends = [
            (use, types[value], split[value])
            for link in self.cluster.links
            for use, value in zip(link.uses, link.entering(), strict=True)
            if value in inside
        ]
        borders = {
            link.argument: self._form(forms[link.argument], link)
            for link in self.cluster.links
            if link.argument is not None and link.values[0] in values
        }
        for value, uses in exits.items():
            self._leave(value, uses, types[value], unsplit[value])
        for value in entries:
            self._enter(value, enter[value], types[value], split[value])
        for op, sharding in marks:
            op.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding.to_hlo())
            op.attributes["backend_config"] = ir.StringAttr.get("")
        for (op, number), type_, sharding in ends:
            with ir.InsertionPoint(op), op.location:
                value, text = op.operands[number], sharding.to_hlo()
                op.operands[number] = sharding_call("Sharding", value, type_, text)
        for value in inside:
            self._retype(value, types[value])
        for link in self.cluster.links:
            if link.argument in borders:
                self._pad(link, borders[link.argument])
        return borders

    def _form(self, form: StoredForm, link: Carried) -> StoredForm:
        value = link.values[0]
        combined = (self.layout.first(value), self.layout.count)
        return dataclasses.replace(
            form,
            split=self.layout.sharding(value),
            combined=combined if self.layout.count > 1 else None,
        )

    def _leave(self, value, uses: Sequence[Use], type_, unsplit: Sharding) -> None:
        """Gathers a tensor for uses outside; inside rare branches for those in them."""
        for point, users in _by_place(value, uses):
            with point, location_of(value):
                gathered = sharding_call("Sharding", value, type_, unsplit.to_hlo())
                if type_ != value.type:
                    gathered = stablehlo.reshape(value.type, gathered)
            for op, number in users:
                op.operands[number] = gathered

    def _enter(self, value, uses: Sequence[Use], type_, split: Sharding) -> None:
        summed = find_sum(self.completed, self.reduced, value)
        with after(value), location_of(value):
            shard = None
            if summed is not None and len(uses) == len(uses_of(value)):
                shard = reduce_scattered(self.completed, summed, value, self.layout)
            if shard is None:
                # Unsplit first: else the split would propagate to what is summed, such
                # as a convolution's images, which would be gathered to be split anew.
                shard = _annotate(value, self.completed.sharding(value))
                if type_ != value.type:
                    shard = stablehlo.reshape(type_, shard)
            shard = _annotate(shard, split)
        for op, number in uses:
            op.operands[number] = shard
            if self.layout.count > 1:
                _reduce_all(op, shard)

    def _retype(self, value, type_) -> None:
        if value.type == type_:
            return
        value.set_type(type_)
        maker = value.owner
        if isinstance(maker, ir.Block):
            return
        if maker.name == "stablehlo.constant":
            splat = ir.DenseElementsAttr(maker.attributes["value"]).get_splat_value()
            maker.attributes["value"] = ir.DenseElementsAttr.get_splat(type_, splat)
        for user, _ in uses_of(value):
            _reduce_all(user, value)

    def _pad(self, link: Carried, form: StoredForm) -> None:
        """Cuts the padding off an argument, and pads the result that replaces it."""
        (argument,), ((end, number),) = link.values, link.uses
        shape, stored = shape_of(argument), form.stored_shape
        if shape == stored:
            return
        padded = tensor_type(argument.type, stored)
        uses = uses_of(argument)
        argument.set_type(padded)
        with after(argument), location_of(argument):
            logical = _annotate(cut_end(argument, shape), form.border)
        for op, place in uses:
            op.operands[place] = logical
        with ir.InsertionPoint(end), end.location:
            result = pad_end(end.operands[number], stored)
            end.operands[number] = _annotate(result, form.border)


def _reduce_all(op, value: ir.Value) -> None:
    """Renumbers a reduction's dims: where dims are combined, it is over all dims."""
    if op.name == "stablehlo.reduce":
        dims = list(range(len(shape_of(value))))
        op.attributes["dimensions"] = ir.DenseI64ArrayAttr.get(dims)


def _annotate(value: ir.Value, sharding: Sharding) -> ir.Value:
    return sharding_call("Sharding", value, value.type, sharding.to_hlo())


def _by_place(value: ir.Value, uses: Sequence[Use]):
    """Insertion points to gather at, with their uses: one, and one in each branch."""
    home, places = block_of(value), {}
    for op, number in uses:
        block, inner = None, op
        while inner.block != home:
            if inner.parent.operation.name in BRANCHES:
                block = inner.block
            inner = inner.parent.operation
        places.setdefault(block, []).append((op, number))
    for block, users in places.items():
        if block is None:
            yield after(value), users
        else:
            yield ir.InsertionPoint.at_block_begin(block), users


def _retype_function(main) -> None:
    block = main.regions[0].blocks[0]
    takes = [argument.type for argument in block.arguments]
    gives = [operand.type for operand in end_of(block).operands]
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(takes, gives)
    )
