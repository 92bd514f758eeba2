"""GSPMD Figure 7: the collectives that each plan of Table 1 must produce, from the HLO.

X has 2 devices, Y has 4. XLA's CPU backend has no reduce-scatter: there it is an
all-reduce whose result the device slices, which is checked.
"""

import functools
import math
import re

import pytest

from meshwright.framework.compiler.hlo.hlo_text import HloModule, arrays_of
from meshwright.framework.compiler.hlo.report import collectives_of
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.xla_form import axis_groups
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import small_experiment

MESH = DeviceMesh(("X", "Y"), (2, 4))
AG, AR = "all-gather", "all-reduce"
B, S, M, H = 8, 8, 16, 32

# Products of the layer, by their TF op: forward, gradient of the input, of the weight.
PRODUCTS = {
    "w_q": "attention/matmul",
    "w_k": "attention/matmul_1",
    "w_v": "attention/matmul_2",
    "w_o": "attention/matmul_3",
    "w_in": "feed_forward/matmul",
    "w_out": "feed_forward/matmul_1",
}
INTO = ("w_q", "w_k", "w_v", "w_in")  # [M, ...]: read the residual stream.
OUT_OF = ("w_o", "w_out")  # [..., M]: write it.


@functools.cache
def program(plan, partitioner):
    experiment = small_experiment(
        "MESH_SHAPE = (2, 4)",
        "Repeat.recompute = %Recompute.NOTHING",
        "TokenEmbedding.lookup = %Lookup.ONE_HOT",  # The paper's, a product.
        f"Experiment.partitioner = %Partitioner.{partitioner}",
        plan=plan,
    )
    return StepPrograms(experiment).main


def collectives_at(plan, partitioner):
    """{(op in the layer, kind, axes)} of the layer loops, combined ones taken apart."""
    sends = set()
    for collective in program(plan, partitioner).collectives():
        before, inside, op = collective.op_name.partition("PartitionedCall/")
        if inside:
            for name in _op_names(op):
                sends.add((name, collective.kind, collective.axes))
                if collective.axes is not None:
                    assert set(map(frozenset, collective.groups)) == set(
                        map(frozenset, axis_groups(MESH, collective.axes))
                    )
    return sends


def _op_names(name):
    """`a/(b:c)` names two ops that XLA combined into one collective."""
    match = re.fullmatch(r"(.*?)\((.*)\)(.*)", name)
    if match is None:
        return [name]
    return [match[1] + part + match[3] for part in match[2].split(":")]


def of_products(collectives):
    """Only what belongs to the matrix products: {(weight, part, kind, axes)}."""
    parts = {}
    for weight, op in PRODUCTS.items():
        parts[op] = (weight, "forward")
        parts[f"gradients/{op}_grad/MatMul"] = (weight, "input gradient")
        parts[f"gradients/{op}_grad/MatMul_1"] = (weight, "weight gradient")
    return {(*parts[op], kind, axes) for op, kind, axes in collectives if op in parts}


def expected(plan):
    X, Y = ("X",), ("Y",)
    want = set()
    for w in INTO + OUT_OF:
        contracted, other = (X, Y) if w in INTO else (Y, X)
        if plan == "attempt1":
            # Nothing is gathered: products over a split dim are summed over its axis.
            want.add((w, "forward", AR, contracted))
            want.add((w, "input gradient", AR, other))
            continue
        # Weights are gathered along X right before use; their gradients are summed
        # over the batch, split along X.
        want.add((w, "forward", AG, X))
        want.add((w, "input gradient", AG, X))
        want.add((w, "weight gradient", AR, X))
        # What contracts heads or hidden features is summed along Y.
        want.add((w, "forward" if w in OUT_OF else "input gradient", AR, Y))
        if plan == "finalized" and w in OUT_OF:
            want.add((w, "input gradient", AG, Y))
            want.add((w, "weight gradient", AG, Y))
    if plan == "finalized":
        # The residual stream is gathered along Y once for each norm that reads it.
        for w in ("w_q", "w_in"):
            want.add((w, "forward", AG, Y))
    return want


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
@pytest.mark.parametrize("plan", ["attempt1", "attempt2", "finalized"])
def test_collectives_of_the_layer(plan, partitioner):
    products = of_products(collectives_at(plan, partitioner))
    if plan == "finalized":
        # One more gather of the normalized stream, for the weight gradients; which of
        # the products that share it carries its name is up to XLA.
        gathers = {f for f in products if f[1:] == ("weight gradient", AG, ("Y",))}
        shared = {f for f in gathers if f[0] in INTO}
        assert {f[0] for f in shared} & {"w_q", "w_k", "w_v"}
        assert "w_in" in {f[0] for f in shared}
        products -= shared
    assert products == expected(plan)


@pytest.mark.parametrize("plan", ["attempt2", "finalized"])
def test_gathered_weights_are_whole_along_x_only(plan):
    gathered = {
        collective.shapes[0]
        for collective in program(plan, "SHARDY").collectives()
        if collective.kind == AG
        and collective.axes == ("X",)
        and collective.op_name.endswith("feed_forward/matmul")
    }
    assert gathered == {(M, H // 4)}


_RENAMINGS = {"get-tuple-element", "bitcast", "reshape", "copy", "transpose"}


def readers(module, name):
    """(opcode, dims of each result) of what reads a value, also inside of fusions."""
    for user in module.users.get(name, []):
        if user.opcode == "fusion":
            for inside in module.instructions:
                if (
                    inside.computation in user.called
                    and inside.opcode == "parameter"
                    and user.operands[inside.number] == name
                ):
                    yield from readers(module, inside.name)
        elif user.opcode in _RENAMINGS and not user.is_root:
            yield from readers(module, user.name)
        else:
            yield user.opcode, *(dims for _, dims in arrays_of(user.type))


def sums_along(module, axis):
    """[(dims, readers)] of each array that is summed along a mesh axis."""
    for sum_ in collectives_of(module, MESH):
        if sum_.kind != AR or sum_.axes != (axis,):
            continue
        if len(sum_.shapes) == 1:
            yield sum_.shapes[0], list(readers(module, sum_.name))
            continue
        for part in module.users[sum_.name]:
            yield sum_.shapes[part.number], list(readers(module, part.name))


@pytest.mark.parametrize("partitioner", ["SHARDY", "GSPMD"])
def test_finalized_sums_are_scattered(partitioner):
    """What sums outputs along Y and weights' gradients along X is sliced at once.

    So they are reduce-scatters in all but name, and no long-lived tensor is whole.
    """
    text = program("finalized", partitioner).hlo_text()
    module = HloModule(text)
    outputs = [r for dims, r in sums_along(module, "Y") if dims == (B // 2 * S, M)]
    assert len(outputs) == len(PRODUCTS) + 2  # Embedding and softmax, too.
    for read in outputs:
        assert read and set(read) <= {
            ("dynamic-slice", (B // 2, S, M // 4)),
            ("dynamic-slice", (B // 2 * S, M // 4)),
        }
    gradients = [(dims, r) for dims, r in sums_along(module, "X") if len(dims) == 2]
    assert len(gradients) == len(PRODUCTS) + 2
    for dims, read in gradients:
        assert {opcode for opcode, *_ in read} == {"dynamic-slice"}
        assert {math.prod(part) for _, part in read} == {math.prod(dims) // 2}
    replicated = rf"f32\[2,{B // 2},{S},{M}\]"
    assert not re.search(replicated, text), "no stack of saved inputs is whole along Y"
