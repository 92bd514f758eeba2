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

from meshwright.framework.compiler.stablehlo.dataflow.carried import Carried, Use
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    BRANCHES,
    after,
    cut_end,
    end_of,
    is_annotation,
    location_of,
    pad_end,
    shape_of,
    sharding_call,
    tensor_type,
    with_sharding,
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
    reduce_scattered,
)
from meshwright.framework.compiler.weight_update_sharding.update_layouts import (
    UpdateLayout,
)
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
        layout, links = self.layout, self.cluster.links
        values = [v for v in self.cluster.values if layout.first(v) is not None]
        inside = [v for v in values if self.cluster.made_inside(v)]
        entries = [v for v in self.cluster.entries() if v in values]
        exits = {v: u for v, u in self.cluster.exits().items() if v in values}
        borders = {
            link.argument: self._form(forms[link.argument], link)
            for link in links
            if link.argument is not None and link.values[0] in values
        }
        for value, uses in exits.items():
            self._leave(value, uses)
        for value in entries:
            self._enter(value)
        for op in self.cluster.ops:
            if is_annotation(op) and op.results[0] in values:
                sharding = layout.sharding(op.results[0]).to_hlo()
                op.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
                op.attributes["backend_config"] = ir.StringAttr.get("")
        for op, number in (use for link in links for use in link.uses):
            if (value := op.operands[number]) in inside:
                with ir.InsertionPoint(op), op.location:
                    op.operands[number] = self._annotated(value, split=True)
        # Types change last: dims are told apart by them.
        for value in inside:
            self._retype(value, self._type(value))
        for link in links:
            if link.argument in borders:
                self._pad(link, borders[link.argument])
        return borders

    def _type(self, value: ir.Value) -> ir.Type:
        return tensor_type(value.type, self.layout.shape(value))

    def _annotated(self, value: ir.Value, *, split: bool) -> ir.Value:
        """A tensor of the cluster in its layout, split or not."""
        sharding = self.layout.sharding(value, split=split).to_hlo()
        return sharding_call("Sharding", value, self._type(value), sharding)

    def _form(self, form: StoredForm, link: Carried) -> StoredForm:
        value = link.values[0]
        combined = (self.layout.first(value), self.layout.count)
        return dataclasses.replace(
            form,
            split=self.layout.sharding(value),
            combined=combined if self.layout.count > 1 else None,
        )

    def _leave(self, value, uses: Sequence[Use]) -> None:
        """Gathers a tensor for uses outside; inside rare branches for those in them."""
        for point, users in _by_place(value, uses):
            with point, location_of(value):
                gathered = self._annotated(value, split=False)
                if gathered.type != value.type:
                    gathered = stablehlo.reshape(value.type, gathered)
            for op, number in users:
                op.operands[number] = gathered

    def _enter(self, value) -> None:
        uses = [use for use in uses_of(value) if self.cluster.inside(use)]
        type_, split = self._type(value), self.layout.sharding(value)
        summed = find_sum(self.completed, self.reduced, value)
        with after(value), location_of(value):
            shard = None
            if summed is not None and len(uses) == len(uses_of(value)):
                shard = reduce_scattered(self.completed, summed, value, self.layout)
            if shard is None:
                # Unsplit first: else the split would propagate to what is summed, such
                # as a convolution's images, which would be gathered to be split anew.
                shard = with_sharding(value, self.completed.sharding(value))
                if type_ != value.type:
                    shard = stablehlo.reshape(type_, shard)
            shard = with_sharding(shard, split)
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
            logical = with_sharding(cut_end(argument, shape), form.border)
        for op, place in uses:
            op.operands[place] = logical
        with ir.InsertionPoint(end), end.location:
            result = pad_end(end.operands[number], stored)
            end.operands[number] = with_sharding(result, form.border)


def _reduce_all(op, value: ir.Value) -> None:
    """Renumbers a reduction's dims: where dims are combined, it is over all dims."""
    if op.name == "stablehlo.reduce":
        dims = list(range(len(shape_of(value))))
        op.attributes["dimensions"] = ir.DenseI64ArrayAttr.get(dims)


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
