"""The passes of the compiler, in order.

TF2XLA makes a module of a TF function, and the passes below change it. Then JAX lowers
it for the devices of a mesh, and XLA partitions and compiles it.
"""

from __future__ import annotations

import dataclasses

import jax

from meshwright.framework.compiler.lowering.errors import unknown_size
from meshwright.framework.compiler.partial.carry import carry_partial_sums
from meshwright.framework.compiler.repair.check import repair
from meshwright.framework.compiler.repair.repaired import Repair
from meshwright.framework.compiler.stablehlo.constraints import refuse_foreign
from meshwright.framework.compiler.stablehlo.kernels.fill_kernels import fill_kernels
from meshwright.framework.compiler.stablehlo.manual.divergence import divergent_ops
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import (
    Stage,
    work_around,
)
from meshwright.framework.compiler.stablehlo.savings.precision import (
    propagate_precision,
)
from meshwright.framework.compiler.stablehlo.savings.products import sum_in_products
from meshwright.framework.compiler.stablehlo.savings.random_bits import (
    split_random_bits,
)
from meshwright.framework.compiler.stablehlo.settle import settle_state
from meshwright.framework.compiler.stablehlo.tidy import tidy
from meshwright.framework.compiler.stablehlo.written import write_for
from meshwright.framework.compiler.weight_update_sharding.decisions import UpdateReport
from meshwright.framework.compiler.weight_update_sharding.shard import (
    UpdateSharding,
    shard_weight_updates,
)
from meshwright.framework.compiler.xla.mesh_program import Target, Written


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassResults:
    """What the passes made of a program, and what they have to say of it.

    Args:
      written: the program, written for its partitioner.
      plain: MLIR bytecode of the program before ops were laid out for a partitioner,
        which tells why tensors lie where they lie.
      repairs: the ops that were laid out so that XLA's partitioner gets them right.
      updates: what was decided on weight updates; None: not requested.
    """

    written: Written
    plain: bytes
    repairs: tuple[Repair, ...]
    updates: UpdateReport | None


def run_passes(
    module: Module,
    target: Target,
    *,
    carried: int = 0,
    update_sharding: UpdateSharding | None = None,
    strict: bool = False,
) -> PassResults:
    """Takes a module from TF2XLA to the partitioner.

    Args:
      module: the module; changed in place.
      target: what it is compiled by, and for.
      carried: how many leaves are state: the first of the arguments, and in their place
        the first of the result.
      update_sharding: which weight updates to shard.
      strict: refuse a program rather than repair it at a cost.

    Raises:
      LoweringError: the module has an op that no partitioner can split; or a pass
        refuses it.
      ValueError: `update_sharding` does not fit the program or the mesh.
    """
    with module.opened():
        simplify(module, carried)
        # Each device updates a part of the weights (Xu et al. 2020).
        updates = None
        if update_sharding is not None:
            updates = shard_weight_updates(module, update_sharding, target.devices)
        # What XLA cannot split, or splits badly, becomes other ops: empty tensors,
        # roundings, strides, cropped images, rolls.
        work_around(Stage.SPLITTABLE, module.write())
        # What is compared with its own maximum is computed once, for all that read it.
        work_around(Stage.COMPUTED_ONCE, module.write())
        # Each device draws the random numbers of its own shards.
        split_random_bits(module.write())
        # Branches that devices may take differently are noted: in the compiled program
        # no collective in them may wait for devices that take another.
        module.divergent = divergent_ops(module.operation)
        # So far axes come from annotations of the program: layouts below hide them.
        plain = module.bytecode()
        # Ops that XLA gets wrong as they are sharded, such as some convolutions, are
        # laid out differently.
        repairs = repair(module, target, strict=strict)
        # Placeholders of fused kernels become what JAX lowers the kernels to.
        device = (target.devices or jax.devices())[0]
        module.platform = fill_kernels(module.write(), device)
        # Manual regions and annotations are written as the partitioner reads them.
        write_for(module.blame, module.write(), module.mesh, target.partitioner)
        return PassResults(
            written=module.written(), plain=plain, repairs=repairs, updates=updates
        )


def simplify(module: Module, carried: int = 0) -> None:
    """The passes that come before any that asks how tensors are split.

    Args:
      module: the module, opened; changed in place.
      carried: see `run_passes`.

    Raises:
      LoweringError: see `run_passes`.
    """
    # What no partitioner can split is refused.
    _refuse_unknown_sizes(module)
    refuse_foreign(module.blame, module.operation)
    # A single function, without calls, tuples and no-ops.
    tidy(module.write())
    # Conversions stand where they let fewer bits be moved.
    propagate_precision(module.write())
    # Gradients of weights are a single product, not one for each row of a batch.
    sum_in_products(module.write())
    # Sums that types call unreduced are computed in parts up to where they end.
    carry_partial_sums(module)
    # State that is left to completion leaves the program as it arrives.
    settle_state(module, carried)


def _refuse_unknown_sizes(module: Module) -> None:
    if module.unknown_size is not None and module.mesh.size > 1:
        where = module.blame.sources.text(module.unknown_size)
        raise unknown_size(module.signature.name, where, what="a tensor")
