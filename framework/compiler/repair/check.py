"""The pass that lays a program out so that XLA partitions it correctly.

The shardings of an operation's tensors are known only after propagation. So a program
is completed beforehand (`inspection`). Where an operation is sharded as a row of the
table of faults says (`faults`), or a convolution so that XLA would add up too much
(`conv_layout`), a copy of the program's module is written with that operation laid out
differently, and inspected again. Its layout then stays, but propagation may change
the layouts of others: hence the rounds.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from absl import logging
from jax.extend.mlir import ir

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.repair import inspection
from meshwright.framework.compiler.repair.convolutions import conv_layout
from meshwright.framework.compiler.repair.convolutions.conv_rewrite import lay_out
from meshwright.framework.compiler.repair.halos.halo_rewrite import lay_out_in_blocks
from meshwright.framework.compiler.repair.halos.halos import Halos
from meshwright.framework.compiler.repair.match import Shardings
from meshwright.framework.compiler.repair.op_layout import (
    EvenLayout,
    OpLayout,
    even_layout,
)
from meshwright.framework.compiler.repair.repaired import Repair, repair_of
from meshwright.framework.compiler.repair.table.fault import Chosen, Fault
from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.repair.table.patterns import (
    CONCATENATE,
    FOURIER,
    PRODUCTS,
    REDUCE,
    RESHAPE,
    SLICE,
    STEPPED,
    combines_otherwise,
    is_of_roll,
    is_roll,
    may_cut_no_shard,
    merges_after_one,
    reshaped,
    shrunk_dims,
    stepped_dims,
)
from meshwright.framework.compiler.repair.table.product_patterns import may_regroup
from meshwright.framework.compiler.repair.write import Pin, lay_out_evenly
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites.starts import (
    DYNAMIC_SLICE,
    DYNAMIC_UPDATE_SLICE,
    Clamped,
    clamp_starts,
    unclamped_dims,
)
from meshwright.framework.compiler.stablehlo.shardy.propagation import Propagated
from meshwright.framework.compiler.stablehlo.stable_hlo import Blame, shape_of, walk
from meshwright.framework.compiler.stablehlo.written import write_borders, write_for
from meshwright.framework.compiler.xla import jax_bridge
from meshwright.framework.compiler.xla.completion import ending_early
from meshwright.framework.compiler.xla.mesh_program import Target, put_on_mesh
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import DeviceMesh

PRESENT = [fault for fault in FAULTS if fault.is_in(jax_bridge.JAXLIB)]
GUARDED = frozenset(name for fault in PRESENT for name in fault.ops)
Decision = tuple[Chosen, Repair]
"""A layout for an operation, and the changes that it makes."""
_ROUNDS = 8
_REMEDY = "Annotate these tensors so, or split their other dims"
_WARNED_BYTES = 1024
"""Of a repair that sends fewer bytes to each device there is no warning."""


def repair(
    module: Module, target: Target, *, strict: bool = False
) -> tuple[Repair, ...]:
    """Lays operations out so that XLA partitions them correctly.

    Args:
      module: a module that XLA can split; it is not written for a partitioner yet.
      target: what it is compiled by, and for.
      strict: refuse a program rather than repair it at a cost.

    Returns:
      The ops that were laid out otherwise than propagation chose.

    Raises:
      LoweringError: an annotation cannot be honoured; an operation cannot be laid out,
        such as a convolution in a manual region; or a repair costs communication and
        `strict` forbids it.
    """
    blame, mesh, partitioner = module.blame, module.mesh, target.partitioner
    if mesh.size == 1:
        return ()
    guarded = [op for op in walk(module.operation) if _is_guarded(op)]
    if not guarded:
        return ()

    def inspect(copy: ir.Operation) -> Iterator[tuple[int, OpLayout]]:
        write_for(blame, copy, mesh, partitioner)
        if partitioner is Partitioner.GSPMD:
            with ending_early(copy, target.devices):
                program = put_on_mesh(module.written(copy), target)
            return inspection.by_gspmd(program, copy)
        write_borders(copy, mesh, **module.boundary)
        return inspection.by_shardy(Propagated(blame, copy, mesh))

    operation = module.write()
    inspection.number(guarded)
    chosen, right, repairs = decided(blame, operation, mesh, inspect)
    _report(module.signature.name, list(repairs.values()), strict)
    pinned = right if partitioner is Partitioner.SHARDY else {}
    _lay_out(operation, mesh, chosen, pinned)
    inspection.drop_numbers(operation)
    return tuple(repairs.values())


def decided(
    blame: Blame,
    module: ir.Operation,
    mesh: DeviceMesh,
    inspect: Callable[[ir.Operation], Iterable[tuple[int, OpLayout]]],
) -> tuple[dict[int, Chosen], dict[int, Shardings], dict[int, Repair]]:
    """Which operations are to be laid out differently, which may stay, and the repairs.

    Args:
      blame: for messages.
      module: the module, prepared and numbered; it is not changed.
      mesh: the program's mesh.
      inspect: completes a copy of the module, and returns the layouts of its
        operations.

    Returns:
      By number of the operation: the chosen layouts; the shardings of operations that
      are right but near a fault; the repairs that the chosen layouts are.

    Raises:
      LoweringError: no layout is right after the last round.
    """
    chosen: dict[int, Chosen] = {}
    unsharded: dict[int, Decision] = {}
    repairs: dict[int, Repair] = {}
    for _ in range(_ROUNDS):
        copy = module.clone()
        _lay_out(copy, mesh, chosen, {})
        wrong, right = {}, {}
        for place, layout in inspect(copy):
            before = chosen.get(place), unsharded.get(place)
            if decisions := _wrong(blame, layout, *before):
                wrong[place], unsharded[place] = decisions
            elif place not in chosen and _is_near(layout):
                right[place] = layout.shardings
        if not wrong:
            return chosen, right, repairs
        for place, (choice, repair) in wrong.items():
            chosen[place], repairs[place] = choice, repair
    raise LoweringError(
        f"{blame.program}: no layout was found in which XLA gets the program right. "
        f"The last attempt: {repairs[next(iter(wrong))]}. Annotate the op's operands "
        "and its result"
    )


def _lay_out(
    module,
    mesh: DeviceMesh,
    chosen: Mapping[int, Chosen],
    pinned: Mapping[int, Shardings],
) -> None:
    """Lays numbered operations out as chosen, and keeps others as they were examined.

    For Shardy these are `pinned`: XLA's own propagation comes after other passes, and
    may differ from the examined one.
    """
    numbered = inspection.numbered(module)
    pin = Pin(mesh)
    for place, shardings in pinned.items():
        pin(numbered[place], shardings)
    for place, choice in chosen.items():
        match choice:
            case conv_layout.Layout():
                lay_out(numbered[place], mesh, choice)
            case Halos():
                lay_out_in_blocks(numbered[place], choice)
            case Clamped():
                clamp_starts(numbered[place])
            case _:
                lay_out_evenly(numbered[place], choice)


def _report(name: str, repairs: Sequence[Repair], strict: bool) -> None:
    """Warns of repairs that cost communication, or refuses them; logs small ones."""
    costly = [repair for repair in repairs if repair.is_costly]
    costly.sort(key=lambda repair: -repair.bytes)
    if costly and strict:
        listed = "\n  ".join(map(str, costly))
        raise LoweringError(
            f"{name}: the program is compiled strictly, and {len(costly)} of its ops "
            f"would be laid out otherwise at a cost:\n  {listed}\n{_REMEDY}, or "
            "compile with strict=False"
        )
    groups: dict[tuple, list[Repair]] = {}  # What has one cause is told once.
    for repair in _REPORT.get()(name, costly):
        level = logging.WARNING if repair.bytes >= _WARNED_BYTES else logging.INFO
        groups.setdefault((level, repair.fault.name), []).append(repair)
    for (level, _), (largest, *others) in groups.items():
        more = ""
        if others:
            count = f"{len(others)} other{'s' if len(others) > 1 else ''}"
            size = sum(repair.bytes for repair in others)
            more = f" So {'are' if len(others) > 1 else 'is'} {count} ({size} bytes)."
        logging.log(level, "%s: %s.%s %s", name, largest, more, _REMEDY)


_REPORT = contextvars.ContextVar(
    "report of costly repairs", default=lambda name, repairs: repairs
)


@contextlib.contextmanager
def reported_to(
    report: Callable[[str, Sequence[Repair]], Sequence[Repair]],
) -> Iterator[None]:
    """Has others than annotations of tensors be the remedy that a warning names.

    Args:
      report: is given the program's name, and the repairs that cost communication, and
        returns those of which a warning is due nevertheless.
    """
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def _is_guarded(op) -> bool:
    """Whether an operation may meet a fault, as far as its own attributes tell."""
    if op.name not in GUARDED:
        return False
    if op.name == CONCATENATE:
        return is_roll(op)
    if op.name == REDUCE:
        return combines_otherwise(op)
    if op.name == RESHAPE:
        before, after = shape_of(reshaped(op)), shape_of(op.results[0])
        return merges_after_one(before, after) or bool(shrunk_dims(before, after))
    if op.name in (DYNAMIC_SLICE, DYNAMIC_UPDATE_SLICE):
        return bool(unclamped_dims(op))
    cuts = op.name == SLICE and may_cut_no_shard(op)
    return cuts or op.name not in STEPPED or bool(stepped_dims(op))


def _is_near(layout: OpLayout) -> bool:
    """Whether an operation might meet a fault if XLA completed it a little differently.

    Most products of a model cannot, and are left to XLA as they are. So are transforms,
    whose dims Shardy does not split by itself; and rolls, which XLA is to recognize.
    """
    if layout.op.name in PRODUCTS:
        return may_regroup(layout)
    return layout.op.name != FOURIER and not is_of_roll(layout.op)


def _wrong(
    blame: Blame, layout: OpLayout, before: Chosen | None, unsharded: Decision | None
) -> tuple[Decision, Decision] | None:
    """How an operation is to be laid out if XLA would get it wrong.

    Args:
      blame: for messages.
      layout: the operation as completed.
      before: the layout chosen for it in an earlier round, if any.
      unsharded: the layout with none of its tensors split, if any was chosen.

    Returns:
      The choice, and the layout with none of the operation's tensors split; None if XLA
      gets the operation right.
    """
    problem = _choice(layout)
    if problem is None:
        return None
    fault, choice = problem
    if choice == before and _copies(layout, choice):
        return None
    if unsharded is not None:  # The earlier choice did not help.
        if before != unsharded[0]:
            return unsharded, unsharded
        if any(layout.shardings):
            raise blame.error(
                layout.op,
                f"{fault.what}, which XLA gets wrong, and propagation keeps the layout "
                f"{', '.join(str(t.sharding) for t in layout.tensors)} though it is "
                "annotated differently; annotate its operands, or use the other "
                "partitioner",
            )
        return None  # XLA replaced the op; its operands and results are replicated.
    if layout.manual and isinstance(choice, conv_layout.Layout):
        choice = even_layout(layout)  # XLA takes no region within a region.
    last = even_layout(layout, keep=())
    repair, replicated = (
        repair_of(layout, fault, option, blame.sources) for option in (choice, last)
    )
    return (choice, repair), (last, dataclasses.replace(replicated, is_last=True))


def _copies(layout: OpLayout, choice: Chosen) -> bool:
    """Whether an operation already has a layout that only had to be annotated."""
    return isinstance(choice, EvenLayout) and choice.copies and choice.is_of(layout)


def _choice(layout: OpLayout) -> tuple[Fault, Chosen] | None:
    for fault in PRESENT:
        if layout.op.name in fault.ops and (choice := fault.choose(layout)) is not None:
            return fault, choice
    return None
