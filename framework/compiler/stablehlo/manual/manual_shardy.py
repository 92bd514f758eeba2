"""Manual regions for Shardy: their ops move into `sdy.manual_computation`s."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jaxlib.mlir.dialects import sdy

from meshwright.framework.compiler.stablehlo.constraints import (
    rewrite_annotation,
    sdy_text,
)
from meshwright.framework.compiler.stablehlo.manual.manual_collectives import (
    build_axis_index,
    build_collective,
)
from meshwright.framework.compiler.stablehlo.stable_hlo import (
    INTO_MANUAL,
    OUT_OF_MANUAL,
    Blame,
    border_config,
    check_axes,
    copy_floating,
    is_annotation,
    operand_places,
    operands_of,
    placeholder_call,
    placeholder_of,
    tensor_type,
    walk,
)
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

Axes = tuple[str, ...]


@dataclasses.dataclass(kw_only=True)
class _Group:
    """Ops of a block that can follow each other; `axes` is None outside of regions."""

    axes: Axes | None
    ops: list


def write_for_shardy(
    blame: Blame,
    mesh: DeviceMesh,
    ops: Sequence,
    axes: Sequence[Axes | None],
    is_floating: Callable[[ir.Value], bool],
) -> None:
    """Rewrites the regions of one block.

    Args:
      blame: for messages.
      mesh: the program's mesh.
      ops: all ops of the block.
      axes: for each op the manual axes of its region, None for an automatic op.
      is_floating: whether a value is made of constants only.
    """
    groups = _groups(ops, axes)
    _carry_across(mesh, groups)
    end = ops[-1]
    for group in groups:
        if group.axes is not None:
            with ir.InsertionPoint(end):
                _Region(blame, mesh, group, is_floating).build()
        else:
            for op in group.ops:
                if op != end:
                    op.move_before(end)


def _groups(ops: Sequence, axes: Sequence[Axes | None]) -> list[_Group]:
    """Alternates automatic ops, as early, and regions, as large, as possible."""
    index = {result: i for i, op in enumerate(ops) for result in op.results}
    needs = [{index[v] for v in operands_of(op) if v in index} for op in ops]
    leaving = {i for i, op in enumerate(ops) if _is(op, OUT_OF_MANUAL)}
    left, done, groups = list(range(len(ops))), set(), []

    def ready(kind: Axes | None) -> list[int]:
        """Ops that need only ops that are done, or each other before a region's end."""
        have, chosen = set(done), []
        for i in left:
            if axes[i] == kind and needs[i] <= have:
                chosen.append(i)
                if i not in leaving:
                    have.add(i)
        return chosen

    while left:
        kind = None
        chosen = ready(None)
        if not chosen:
            kind = next(axes[i] for i in left if needs[i] <= done)
            chosen = ready(kind)
        groups.append(_Group(axes=kind, ops=[ops[i] for i in chosen]))
        done.update(chosen)
        left = [i for i in left if i not in done]
    return groups


def _carry_across(mesh: DeviceMesh, groups: Sequence[_Group]) -> None:
    """Leads manual values that a later region needs out of their region and into that.

    Outside they have a leading dim with an entry for each index along the manual axes.
    """
    home = {r: g for g in groups for op in g.ops for r in op.results if g.axes}
    left_by: dict[ir.Value, ir.Value] = {}
    for group in groups:
        if group.axes is None:
            continue
        entered: dict[ir.Value, ir.Value] = {}
        entries: list = []
        for user, i in _places(group.ops):
            value = user.operands[i]
            source = home.get(value)
            if source in (None, group) or _is(value.owner, OUT_OF_MANUAL):
                continue
            if value not in left_by:
                left_by[value] = _lead_out(mesh, source, value)
            if value not in entered:
                entered[value] = _lead_in(mesh, group, left_by[value], value, entries)
            user.operands[i] = entered[value]
        group.ops[:0] = entries


def _places(ops: Iterable) -> list:
    return [place for op in ops for place in operand_places(op)]


def _lead_out(mesh: DeviceMesh, group: _Group, value: ir.Value) -> ir.Value:
    shape = ir.RankedTensorType(value.type).shape
    count = mesh.axes_size(group.axes)
    with ir.InsertionPoint.after(value.owner), value.owner.location:
        kept = stablehlo.ReshapeOp(tensor_type(value.type, [1, *shape]), value)
        out = placeholder_call(
            OUT_OF_MANUAL,
            kept.result,
            tensor_type(value.type, [count, *shape]),
            _leading_config(mesh, group.axes, len(shape)),
        )
    group.ops += [kept.operation, out.owner.operation]
    return out


def _lead_in(
    mesh: DeviceMesh, group: _Group, out: ir.Value, value: ir.Value, entries: list
) -> ir.Value:
    shape = ir.RankedTensorType(value.type).shape
    with ir.InsertionPoint(group.ops[0]), value.owner.location:
        entry = placeholder_call(
            INTO_MANUAL,
            out,
            tensor_type(value.type, [1, *shape]),
            _leading_config(mesh, group.axes, len(shape)),
        )
        shard = stablehlo.ReshapeOp(value.type, entry)
    entries += [entry.owner.operation, shard.operation]
    return shard.result


def _leading_config(mesh: DeviceMesh, axes: Axes, rank: int) -> dict:
    """The config of a border that splits a leading dim, which `rank` others follow."""
    return border_config(mesh, axes, [axes, *[()] * rank])


def _is(op, kind: str) -> bool:
    placeholder = placeholder_of(op)
    return placeholder is not None and placeholder.kind == kind


class _Region:
    """One `sdy.manual_computation`, built before the insertion point."""

    def __init__(self, blame: Blame, mesh: DeviceMesh, group: _Group, is_floating):
        self.blame = blame
        self.mesh = mesh
        self.axes = group.axes
        self.ops = group.ops
        self.is_floating = is_floating
        self.copies: dict[ir.Value, ir.Value] = {}

    def build(self) -> None:
        entering = [op for op in self.ops if _is(op, INTO_MANUAL)]
        leaving = [op for op in self.ops if _is(op, OUT_OF_MANUAL)]
        computation = sdy.ManualComputationOp(
            [op.results[0].type for op in leaving],
            [op.operands[0] for op in entering],
            self._shardings(entering),
            self._shardings(leaving),
            self._manual_axes(self.axes),
        )
        block = computation.regions[0].blocks.append(
            *(op.results[0].type for op in entering)
        )
        for op, argument in zip(entering, block.arguments, strict=True):
            op.results[0].replace_all_uses_with(argument)
        with ir.InsertionPoint(block):
            end = sdy.ReturnOp([]).operation  # The other ops are put before it.
        with ir.InsertionPoint(end):
            for op in self.ops:
                if op not in entering:
                    copy_floating(op, self.is_floating, self.copies, self._finish)
                if op not in entering and op not in leaving:
                    op.move_before(end)
                    self._finish(op)
            sdy.ReturnOp([op.operands[0] for op in leaving])
        end.erase()
        for op, result in zip(leaving, computation.results, strict=True):
            op.results[0].replace_all_uses_with(result)
        for op in (*entering, *leaving):
            op.erase()

    def _shardings(self, borders: Sequence) -> ir.Attribute:
        texts = []
        for op in borders:
            dims = placeholder_of(op).config["dims"]
            rest = self.mesh.axes_size(self.axes) < self.mesh.size
            sharding = Sharding(
                self.mesh,
                tuple(map(tuple, dims)),
                tuple(range(len(dims))) if rest else (),
            )
            texts.append(sdy_text(sharding, self.mesh))
        return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(texts)}]>")

    def _manual_axes(self, axes: Sequence[str]) -> ir.Attribute:
        # Shardy wants the axes in the mesh's order.
        ordered = [axis for axis in self.mesh.axis_names if axis in axes]
        quoted = ", ".join(f'"{axis}"' for axis in ordered)
        return ir.Attribute.parse(f"#sdy<manual_axes{{{quoted}}}>")

    def _finish(self, op) -> list[ir.Value]:
        """Replaces placeholders in an op that has moved; returns its final results."""
        results = list(op.results)
        for inner in [*walk(op), op]:
            placeholder = placeholder_of(inner)
            check_axes(self.blame, inner, placeholder, self.axes, self.mesh)
            with ir.InsertionPoint(inner), inner.location:
                if placeholder is None:
                    new = None
                elif placeholder.kind == "axis_index":
                    new = self._axis_index(placeholder.axes)
                else:
                    operands = list(inner.operands)
                    new = build_collective(
                        placeholder, operands, inner.results[0].type, self.mesh
                    ).results[0]
            if is_annotation(inner):
                new = rewrite_annotation(
                    self.blame, inner, self.mesh, Partitioner.SHARDY, manual=self.axes
                )
            elif new is not None:
                inner.results[0].replace_all_uses_with(new)
                inner.erase()
            if new is not None and inner is op:
                results = [new]
        return results

    def _axis_index(self, axes: Axes) -> ir.Value:
        """A device's number means something only where all axes are manual."""
        rest = [axis for axis in self.mesh.axis_names if axis not in self.axes]
        if self.mesh.axes_size(rest) == 1:
            return build_axis_index(axes, self.mesh)
        scalar = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        sharding = sdy_text(Sharding.replicated(self.mesh, 0), self.mesh)
        nested = sdy.ManualComputationOp(
            [scalar],
            [],
            ir.Attribute.parse("#sdy.sharding_per_value<[]>"),
            ir.Attribute.parse(f"#sdy.sharding_per_value<[{sharding}]>"),
            self._manual_axes(rest),
        )
        with ir.InsertionPoint(nested.regions[0].blocks.append()):
            sdy.ReturnOp([build_axis_index(axes, self.mesh)])
        return nested.results[0]
