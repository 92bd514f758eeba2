"""Faults that others reported of their partitioners, as programs compiled here."""

import jax
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding
from meshwright.framework.sharding.types import reshard
from tests.framework.compiler.programs import assert_close, over_partitioners, specs

ONE = DeviceMesh(("all",), (1,))


def array(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def run(fn, args, mesh, arrives=None, leaves=None, partitioner=Partitioner.SHARDY):
    """The program, and its result as it lies on the mesh."""
    program = compile_program(
        fn,
        [specs(arg) for arg in args],
        mesh,
        in_shardings=arrives and [Sharding.parse(mesh, text) for text in arrives],
        out_shardings=leaves
        and tf.nest.map_structure(lambda text: Sharding.parse(mesh, text), leaves),
        partitioner=partitioner,
    )
    placed = program.shard(*args)
    return program, program(*(placed if len(args) > 1 else (placed,)))


def on_one_device(fn, args):
    return tf.nest.map_structure(np.asarray, run(fn, args, ONE)[1])


def assert_copies_agree(result):
    """Devices that are to have the same shard have it: the copies that nobody reads."""
    for array in tf.nest.flatten(result):
        assert isinstance(array, jax.Array)
        full = np.asarray(array)
        for shard in array.addressable_shards:
            np.testing.assert_allclose(shard.data, full[shard.index], 1e-4, 1e-4)


CUBE = DeviceMesh(("X", "Y", "Z"), (2, 2, 2))
# Where a sum lies that is unreduced along axes, and where it is to lie.
MIXED = {
    "XY": ("[X,_]", "[Y,_]", "[_,X]", "[X.Y,_]", "[X,Z]", "[Z,_]", "[Z,Y]", "[Z.X,_]"),
    "XYZ": ("[X,_]", "[Y,Z]", "[_,Z]", "[Z.X,_]", "[_,X.Y]", "[X.Y.Z,_]"),
    "ZX": ("[Y,_]", "[X,_]", "[Y,Z]", "[Z,X]", "[X.Z,Y]"),
}


@over_partitioners
@pytest.mark.parametrize("pending", MIXED)
def test_a_partial_sum_goes_to_axes_split_and_whole(pending, partitioner):
    """openxla/xla issue 40034, read 2026-11-22; jaxlib 0.10.2.

    A product summed over axes that are then to split its result in part and to have it
    whole in part came without one of its all-reduces: copies on data-parallel devices
    differed. Reported at 4096 devices; open.
    """

    def products(x, y):
        """The sums at once, and after an annotation as pending."""
        total, again = (tf.einsum("bi,bj->ij", x, y) for _ in range(2))
        typed = mesh_split(again, CUBE, [None, None], unreduced=[*pending])
        results = []
        for text in MIXED[pending]:
            dims = [list(axes) for axes in Sharding.parse(CUBE, text).dims]
            results += [mesh_split(total * 2.0, CUBE, dims)]
            results += [reshard(typed, CUBE, dims)]
        return results

    def plain(x, y):
        total = tf.einsum("bi,bj->ij", x, y)
        return [total * 2.0, total] * len(MIXED[pending])

    args = array(16, 8), array(16, 8, seed=1)
    split = f"[{'.'.join(pending)},_]"
    leaves = [text for text in MIXED[pending] for _ in range(2)]
    _, got = run(products, args, CUBE, [split, split], leaves, partitioner)
    assert_copies_agree(got)
    assert_close(tf.nest.map_structure(np.asarray, got), on_one_device(plain, args))


TOKENS = DeviceMesh(("data", "tensor"), (2, 4))


@over_partitioners
@pytest.mark.parametrize("typed", [False, True], ids=["plain", "reduced"])
@pytest.mark.parametrize("stored", ["[tensor,_]", "[data,tensor]", "[data.tensor,_]"])
def test_the_gradient_of_a_table_is_summed_before_it_is_split(
    stored, typed, partitioner
):
    """openxla/xla issue 42481, read 2026-11-22; jaxlib 0.10.2.

    The gradient of rows taken from a gathered table by tokens that another axis splits:
    each device's part was cut to the device's rows before the sum over devices, so rows
    that no token names got gradients. XLA had given up Shardy for GSPMD in silence;
    mended there after 0.10.2. A program compiled here is refused rather than given to
    another partitioner (`test_completion.py`).
    """
    rows, width = 32, 8

    def gradient(table, tokens, weights, mesh=TOKENS):
        def part(x, *dims, **types):
            return mesh_split(x, mesh, dims, **types) if mesh else x

        with tf.GradientTape() as tape:
            tape.watch(table)
            if typed:  # A row of tokens: what is unreduced is split evenly then.
                tokens = tf.reshape(tokens, [-1])
                weights = tf.reshape(weights, [-1, width])
                tokens = part(tokens, ["data", "tensor"])
                reduced = part(table, None, None, reduced=["data", "tensor"])
                taken = part(tf.gather(reduced, tokens), ["data", "tensor"], None)
            else:
                tokens = part(tokens, "data", "tensor")
                reduced = part(table, None, None)
                taken = part(tf.gather(reduced, tokens), "data", "tensor", None)
            loss = tf.reduce_sum(taken * weights)
        table_gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        if not (typed and mesh):
            return table_gradient
        dims = [list(axes) for axes in Sharding.parse(mesh, stored).dims]
        return reshard(table_gradient, mesh, dims)

    # Few rows are taken; each by many tokens.
    tokens = np.random.RandomState(0).choice([1, 9, 17, 30], (4, 8)).astype(np.int32)
    args = array(rows, width), tokens, array(4, 8, width, seed=1)
    arrives = [stored, "[data,tensor]", "[data,tensor,_]"]
    _, got = run(gradient, args, TOKENS, arrives, stored, partitioner)
    assert_copies_agree(got)
    want = on_one_device(lambda *args: gradient(*args, mesh=None), args)
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)
    untaken = np.setdiff1d(np.arange(rows), tokens)
    assert not np.asarray(got)[untaken].any()


@over_partitioners
@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("batch", ["X.Y", "Y"])
def test_a_batch_of_grouped_convolutions_stays_split(batch, groups, partitioner):
    """openxla/xla issue 47945, read 2026-11-22; jaxlib 0.10.2.

    A convolution of channels in groups, its batch split and its kernel whole, gathers
    the batch, and every device does all of it. Open, with pull request 48086. Here it
    is laid out in a manual region. Depthwise ones are split by XLA itself, but not the
    gradients of their images.
    """
    mesh = DeviceMesh(("X", "Y"), (2, 4))
    dims = [batch.split("."), None, None, None]

    def gradients(x, kernel, on=mesh):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            image = mesh_split(x, mesh, dims) if on else x
            y = tf.nn.conv2d(image, kernel, 1, "SAME")
            y = tf.sin(mesh_split(y, mesh, dims) if on else y)
            loss = tf.reduce_sum(y)
        return [y, *tape.gradient(loss, [x, kernel])]

    args = array(16, 4, 4, 8), array(3, 3, 8 // groups, 16, seed=1)
    image, kernel = f"[{batch},_,_,_]", "[_,_,_,_]"
    program, got = run(
        gradients, args, mesh, [image, kernel], [image, image, kernel], partitioner
    )
    want = on_one_device(lambda *args: gradients(*args, on=None), args)
    assert_close(tf.nest.map_structure(np.asarray, got), want)
    # The sum of the kernel's gradient alone.
    sends = [(c.kind, c.bytes) for c in program.collectives()]
    assert sends == [("all-reduce", args[1].nbytes)]


STEPS, VOCABULARY, WIDTH, HIDDEN = 4, 16, 8, 32


def trained(mesh, tokens):
    """Losses and norms of the gradients of some steps of a small language model.

    Its weights are drawn on the mesh, split along "tensor"; so are dropout's masks.
    """

    def part(x, *dims):
        return mesh_split(x, mesh, dims)

    def normal(seed, *shape):
        return tf.random.stateless_normal(shape, [seed, 7]) / WIDTH**0.5

    def step(i, weights, tokens):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            table, up, down = weights
            x = part(tf.gather(table, tokens[:, :-1]), "data", None, None)
            hidden = part(tf.nn.gelu(x @ up), "data", None, "tensor")
            keep = tf.random.stateless_uniform(tf.shape(hidden), [i, 3]) < 0.8
            hidden = tf.where(keep, hidden / 0.8, 0.0)
            x += part(hidden @ down, "data", None, None)
            logits = part(tf.einsum("bsm,vm->bsv", x, table), "data", None, "tensor")
            picked = tf.one_hot(tokens[:, 1:], VOCABULARY) * logits
            loss = tf.reduce_logsumexp(logits, -1) - tf.reduce_sum(picked, -1)
            loss = tf.reduce_mean(loss)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
        norm = tf.linalg.global_norm(gradients)
        moved = [w - 0.5 * g / norm for w, g in zip(weights, gradients, strict=True)]
        return moved, loss, norm

    def train(tokens):
        weights = [
            part(normal(1, VOCABULARY, WIDTH), "tensor", None),
            part(normal(2, WIDTH, HIDDEN), None, "tensor"),
            part(normal(3, HIDDEN, WIDTH), "tensor", None),
        ]
        losses, norms = [], []
        for i in range(STEPS):
            weights, loss, norm = step(i, weights, tokens)
            losses.append(loss)
            norms.append(norm)
        return tf.stack(losses), tf.stack(norms)

    return train


@over_partitioners
def test_the_loss_is_that_of_one_device_at_every_degree_of_tensor_parallelism(
    partitioner,
):
    """pytorch/torchtitan issue 1750, read 2026-11-22; jaxlib 0.10.2.

    Loss and norm of the gradients differ with the tensor-parallel degree, seed and
    settings the same; its weights are drawn shard by shard. Here a random number does
    not depend on the mesh. What is left is the order of sums.
    """
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (8, 9)).astype(np.int32)

    def at(data, tensor):
        mesh = DeviceMesh(("data", "tensor"), (data, tensor))
        arrives = ["[data,_]"]
        result = run(trained(mesh, tokens), [tokens], mesh, arrives, None, partitioner)
        return tf.nest.map_structure(np.asarray, result[1])

    alone = at(1, 1)
    assert (np.diff(alone[0]) < 0).all()
    for data, tensor in ((1, 2), (1, 4), (1, 8), (2, 4), (4, 2)):
        for got, want in zip(at(data, tensor), alone, strict=True):
            np.testing.assert_allclose(got, want, 2e-5, err_msg=f"{data} x {tensor}")


STARTS = np.array([5, -3, 0, 2, 9], np.int32)


@over_partitioners
def test_a_slice_that_starts_out_of_range_is_moved_inside(partitioner):
    """openxla/xla issues 49118 and 49122, read 2026-11-23; jaxlib 0.10.2.

    Of a split dim a slice that starts too late was read by each shard from elsewhere,
    and an update written by none of them.
    """
    mesh = DeviceMesh(("x",), (2,))

    def split(x):
        return mesh_split(x, mesh, [None, "x"])

    def moved(x, part, starts):
        x, results = split(x), []
        for i in range(len(STARTS)):
            start = [0, starts[i]]
            read = xla.dynamic_slice(x, start, [2, 6])
            written = xla.dynamic_update_slice(x, part, start)
            results += [split(read), split(written)]
        return results

    args = (
        np.arange(16, dtype=np.int32).reshape(2, 8),
        np.full((2, 3), 99, np.int32),
        STARTS,
    )
    program, got = run(moved, args, mesh, partitioner=partitioner)
    assert {repair.fault.name for repair in program.repairs} == {"starts out of range"}
    assert not any(repair.bytes for repair in program.repairs)
    for number, start in enumerate(STARTS):
        read, written = map(np.asarray, got[2 * number : 2 * number + 2])
        first = np.clip(start, 0, 2)
        np.testing.assert_array_equal(read, args[0][:, first : first + 6])
        first, want = np.clip(start, 0, 5), args[0].copy()
        want[:, first : first + 3] = 99
        np.testing.assert_array_equal(written, want)


@over_partitioners
def test_a_complex128_transform_of_a_split_dim(partitioner):
    """jax-ml/jax issue 39291, read 2026-11-23; jaxlib 0.10.2.

    XLA's own method for a dim that all devices split multiplies complex128 by factors
    of complex64, which it then refuses.
    """
    mesh = DeviceMesh(("x",), (4,))

    def transformed(x):
        y = tf.signal.fft(mesh_split(x, mesh, [None, None, "x"]))
        return mesh_split(y, mesh, [None, None, "x"])

    x = (array(2, 2, 32) + 1j * array(2, 2, 32, seed=1)).astype(np.complex128)
    _, got = run(transformed, [x], mesh, partitioner=partitioner)
    np.testing.assert_allclose(np.asarray(got), np.fft.fft(x), 1e-12, 1e-12)


@over_partitioners
def test_two_rolls_of_a_tensor_of_an_element_a_shard(partitioner):
    """jax-ml/jax issue 39301, read 2026-11-23; jaxlib 0.10.2.

    Two concatenations of parts of a tensor, an element in each shard, came with shapes
    that XLA refuses; reported with jaxlib 0.11.0.
    """
    mesh = DeviceMesh(("x",), (4,))

    def rolled(x):
        x = mesh_split(x, mesh, ["x"])
        return [mesh_split(tf.roll(x, by, 0), mesh, ["x"]) for by in (1, 3, 0, 2)]

    x = array(4)
    _, got = run(rolled, [x], mesh, ["[x]"], partitioner=partitioner)
    for by, result in zip((1, 3, 0, 2), got, strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.roll(x, by))
