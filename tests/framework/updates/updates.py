"""Training steps in small, and what weight-update sharding's analysis finds in them."""

import contextlib
import dataclasses

import tensorflow as tf

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.stablehlo.module import Module
from meshwright.framework.compiler.stablehlo.savings.precision import (
    propagate_precision,
)
from meshwright.framework.compiler.stablehlo.shardy.completed import CompletedModule
from meshwright.framework.compiler.stablehlo.tidy import tidy
from meshwright.framework.compiler.weight_update_sharding.carried_state import (
    carried_of,
)
from meshwright.framework.compiler.weight_update_sharding.clusters import (
    Cluster,
    Dims,
    find_clusters,
)
from meshwright.framework.compiler.weight_update_sharding.decide import (
    Decision,
    Machine,
    WeightUpdateSharding,
    decide,
)
from meshwright.framework.compiler.weight_update_sharding.gathers import place_gathers
from meshwright.framework.compiler.weight_update_sharding.redundancy import (
    Redundancy,
    analyze,
)
from meshwright.framework.compiler.weight_update_sharding.rewrite import rewrite
from meshwright.framework.devices.hardware import Hardware
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.stored_form import StoredForm

B, M, H, L = 8, 16, 32, 4  # Batch, model and hidden units, layers.
DATA = DeviceMesh(("data",), (8,))
BOTH = DeviceMesh(("data", "model"), (4, 2))
MADE_UP = Hardware(
    jax_name="made up",
    memory_bandwidth=1e9,
    link_bandwidth=1e9,
    latency=0.0,
    source="none",
)
NO_LATENCY = Machine(hardware=MADE_UP)
ALL, AUTO, OFF = (WeightUpdateSharding(mode) for mode in ("all", "auto", "off"))
# How the batch is split, and the shapes of what `momentum` takes.
X = {"x": ("data", None)}
DENSE = {"w": [M, H], "m": [M, H], "x": [B, M]}


@dataclasses.dataclass
class Analysed:
    """A module with what was found in it; arguments and results by name."""

    completed: CompletedModule
    redundancy: Redundancy
    clusters: list[Cluster]
    dims: Dims
    arguments: dict
    results: dict

    def alike(self, name: str) -> set[str]:
        return set(self.redundancy.alike[self.results[name]])

    def reductions(self) -> set[str]:
        """Names of the ops that sum over data axes."""
        return {value.owner.name for value in self.redundancy.reduced}

    def state(self, update: Cluster | Decision) -> list[str]:
        """Names of the arguments of an update."""
        cluster = getattr(update, "cluster", update)
        return [list(self.arguments)[number] for number in cluster.state]

    def updated(self) -> list[list[str]]:
        return [self.state(cluster) for cluster in self.clusters]

    def decide(self, machine=NO_LATENCY, mode=ALL) -> dict[str, Decision]:
        """By the names of the state, in a row."""
        if mode is not OFF:
            for cluster in self.clusters:
                place_gathers(cluster, self.dims, self.redundancy)
        decisions = decide(
            self.clusters,
            self.dims,
            self.completed,
            self.redundancy,
            machine=machine,
            mode=mode,
        )
        return {" ".join(self.state(decision)): decision for decision in decisions}

    def rewrite(self, machine=NO_LATENCY, mode=ALL) -> dict[str, StoredForm]:
        """Changes the module; the new forms of state by name."""
        forms = [
            StoredForm.of(tf.TensorSpec(v.type.shape), self.completed.sharding(v))
            for v in self.arguments.values()
        ]
        decisions = list(self.decide(machine, mode).values())
        new = rewrite(self.completed, self.redundancy, decisions, forms)
        return {list(self.arguments)[number]: form for number, form in new.items()}


@contextlib.contextmanager
def analysed(fn, shapes, split, *, mesh=DATA, data_axes=("data",)):
    """Analyses `fn`, of named tensors to named tensors; equal names are state.

    `shapes` are of float32 tensors, or specs; `split` has dims mappings by name, for
    what is not whole.
    """
    specs = {
        name: shape if isinstance(shape, tf.TensorSpec) else tf.TensorSpec(shape)
        for name, shape in shapes.items()
    }
    lowered = lower(lambda tensors: fn(**tensors), [specs], name="step")
    names, made = sorted(specs), sorted(lowered.signature.outputs)

    def form(name):
        rank = specs[name].shape.rank
        sharding = Sharding.from_dims_mapping(mesh, split.get(name, [None] * rank))
        return StoredForm.of(specs[name], sharding)

    module = Module(
        lowered,
        mesh,
        in_forms=[form(name) for name in names],
        out_forms=[form(name) if name in specs else None for name in made],
    )
    with module.opened():
        tidy(module.write())
        propagate_precision(module.write())
        completed = module.completed()
        block = completed.main.regions[0].blocks[0]
        end = block.operations[len(block.operations) - 1]
        redundancy = analyze(completed, data_axes)
        carried = [(names.index(n), made.index(n)) for n in made if n in names]
        links = carried_of(completed, carried)
        clusters, dims = find_clusters(completed.main, redundancy, links)
        yield Analysed(
            completed,
            redundancy,
            clusters,
            dims,
            dict(zip(names, block.arguments, strict=True)),
            dict(zip(made, end.operands, strict=True)),
        )


def gradients(loss, *weights):
    with tf.GradientTape() as tape:
        tape.watch(weights)
        value = loss(*weights)
    return [tf.convert_to_tensor(g) for g in tape.gradient(value, weights)]


def mean_square(y):
    return tf.reduce_mean(tf.square(y))


def momentum(w, m, x):
    """One step of SGD with momentum for a dense layer."""
    (g,) = gradients(lambda w: mean_square(tf.tanh(x @ w)), w)
    m = 0.9 * m + g
    return {"w": w - m, "m": m}
