"""Random numbers, ours and of TF: known answers, statistics, and how they are split."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.compiler.xla.service import hlo_pb2

from meshwright.framework.compiler.lowering.lower import lower
from meshwright.framework.compiler.program import compile_program
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling import random
from meshwright.framework.sharding.annotations import mesh_split
from meshwright.framework.sharding.mesh import DeviceMesh
from meshwright.framework.sharding.sharding import Sharding

KEY = random.key_from_seed(0x12345678_9ABCDEF0)
KEY_SPEC = tf.TensorSpec([2], tf.uint32)
MESH = DeviceMesh(("data", "model"), (2, 4))
SEED = np.array([3, -7], np.int32)
SEED_SPEC = [tf.TensorSpec([2], tf.int32)]
PHILOX = 1


# From the known answers of Random123, the authors' own code.
@pytest.mark.parametrize(
    "key,counter,answer",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_threefry_gives_the_known_answers(key, counter, answer):
    key, counter = tf.constant(key, tf.uint32), tf.constant(counter, tf.uint32)
    # The counter words come with the key added.
    words = random._threefry(key, counter[0] + key[0], counter[1] + key[1])
    assert tuple(int(word) for word in words) == answer


def test_element_n_has_counter_n():
    key = tf.zeros([2], tf.uint32)
    assert int(random.bits(key, [1])[0]) == 0x6B200159 ^ 0x99BA4EFE
    flat = random.bits(KEY, [60]).numpy()
    np.testing.assert_array_equal(
        random.bits(KEY, [3, 1, 4, 5]).numpy().flatten(), flat
    )
    np.testing.assert_array_equal(random.bits(KEY, [64]).numpy()[:60], flat)
    assert random.bits(KEY, []).numpy() == flat[0]
    assert random.bits(KEY, [0, 3]).shape == (0, 3)


@pytest.mark.parametrize(
    "shape",
    [
        [1, 2**32 - 1],
        [1, 2**16, 2**16],
        [2**31 + 1],
        [3, 2**31, 2],
        [2**30, 2**30],
        [128, 8192, 65536],  # A stacked weight of Table 2.
    ],
)
def test_large_shapes_lower_without_tables(shape):
    lowered = lower(lambda key: random.normal(key, shape), [KEY_SPEC])
    assert lowered.signature.outputs.shape == shape
    assert len(lowered.hlo) < 100_000
    module = hlo_pb2.HloModuleProto.FromString(lowered.hlo)
    operations = [op for c in module.computations for op in c.instructions]
    constants = [op.shape.dimensions for op in operations if op.opcode == "constant"]
    assert max(map(math.prod, constants)) == 1


def test_high_words_of_the_counter_count():
    """Elements 2**32 apart have their own numbers."""
    # Traced only: what is looked at is a slice of an enormous tensor.
    function = tf.function(
        lambda key: random.bits(key, [3, 2**31, 2])[:, :2, 1],
        jit_compile=True,
        input_signature=[KEY_SPEC],
    )
    draws = function(KEY).numpy()
    words = [
        random._threefry(KEY, tf.constant(high, tf.uint32) + KEY[0], low + KEY[1])
        for high, low in [(h, tf.constant([1, 3], tf.uint32)) for h in range(3)]
    ]
    expected = [tf.bitwise.bitwise_xor(*pair).numpy() for pair in words]
    np.testing.assert_array_equal(draws, expected)


@pytest.mark.parametrize("shape", [[2**32 + 1], [5, 2**31, 3], [2] + [2**32] * 2])
def test_more_elements_than_counters_are_refused(shape):
    with pytest.raises(ValueError, match="has too many elements for one key"):
        random.bits(KEY, shape)


def test_uniform_is_uniform():
    x = random.uniform(KEY, [2**18]).numpy()
    n = x.size
    assert x.dtype == np.float32 and x.min() >= 0 and x.max() < 1
    assert np.all(x * 2**24 == np.floor(x * 2**24))  # All 24 bits, and no more.
    counts = np.histogram(x, bins=256, range=(0, 1))[0]
    chi_square = np.sum((counts - n / 256) ** 2 / (n / 256))
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    for lag in (1, 2, 512):
        correlation = np.mean((x[lag:] - 0.5) * (x[:-lag] - 0.5)) * 12
        assert abs(correlation) < 5 / math.sqrt(n)


def test_normal_is_normal():
    x = random.normal(KEY, [2**18]).numpy().astype(np.float64)
    n = x.size
    assert np.isfinite(x).all()
    # Moments 1 to 4 within five standard errors.
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(np.mean(x**power) - mean) < 5 * math.sqrt(variance / n), power
    assert 4 < np.abs(x).max() < 6


@pytest.mark.parametrize("jit_compile", [False, True])
def test_normal_is_finite_at_both_ends(monkeypatch, jit_compile):
    monkeypatch.setattr(random, "bits", lambda bits, shape: bits)
    normal = tf.function(random.normal, jit_compile=jit_compile)
    ends = tf.constant([0, 2**32 - 1, 2**31], tf.uint32)
    low, high, middle = normal(ends, [3]).numpy()
    assert -6 < low < -5 and 5 < high < 6 and abs(middle) < 1e-6


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli_has_its_probability(probability):
    x = random.bernoulli(KEY, probability, [2**16]).numpy()
    assert x.dtype == bool
    sigma = math.sqrt(probability * (1 - probability) / x.size)
    assert abs(x.mean() - probability) <= 5 * sigma


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_masks_drop_at_their_rate(rate):
    x = random.keep_mask(KEY, rate, [3, 64, 1024]).numpy()
    assert x.dtype == bool
    sigma = math.sqrt(rate * (1 - rate) / x.size)
    assert abs((1 - x.mean()) - rate) <= 5 * sigma
    # Of no row or column either, more than at random.
    for axis in ((0, 1), 2):
        counted = x.mean(axis).size
        row = math.sqrt(rate * (1 - rate) * counted / x.size)
        assert np.all(abs((1 - x.mean(axis)) - rate) <= 6 * row)


def rectangles(mask, rate):
    """The sum over rectangles of products of their corners, in standard errors."""
    x = (mask - (1 - rate)) / math.sqrt(rate * (1 - rate))
    rows, columns = x.shape
    pairs = x @ x.T
    pairs = pairs[np.triu_indices(rows, 1)]
    # The variance of a sum of products of `columns` pairs of independent numbers.
    return (np.mean(pairs**2) / columns - 1) / math.sqrt(2 / pairs.size)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_of_masks_do_not_depend_on_each_other(monkeypatch, rate):
    """An element follows from its row and column: so rectangles would tell."""

    def seen():
        masks = [
            random.keep_mask(random.fold_in(KEY, i), rate, [512, 512]).numpy()
            for i in range(8)
        ]
        x = np.concatenate(masks)
        for lag in (1, 2, 128):
            both = (x[lag:] - (1 - rate)) * (x[:-lag] - (1 - rate))
            across = (x[:, lag:] - (1 - rate)) * (x[:, :-lag] - (1 - rate))
            for product in (both, across):
                error = rate * (1 - rate) / math.sqrt(product.size)
                assert abs(product.mean()) < 5 * error
        return np.mean([rectangles(mask, rate) for mask in masks]) * math.sqrt(8)

    # Few dropped elements spread more: at a rate of 0.1 three times as far.
    draw = np.random.default_rng(1).random
    spread = np.std([rectangles(draw([512, 512]) >= rate, rate) for _ in range(32)])
    assert abs(seen()) < 5 * spread
    # With a third as many rounds it can be seen.
    monkeypatch.setattr(random, "_MASK_ROUNDS", 2)
    assert abs(seen()) > 40 * spread


def test_an_element_of_a_mask_takes_six_rounds():
    """The words of rows and columns are not computed again for each element."""

    def masked(key, x):
        x = mesh_split(x, MESH, ["data", None, "model"])
        return tf.where(random.keep_mask(key, 0.3, x.shape), x, 0.0)

    specs = [KEY_SPEC, tf.TensorSpec([4, 16, 48])]
    text = compile_program(masked, specs, MESH).hlo_text()
    assert len(re.findall(r"u32\[2,16,12\]\S* xor\(", text)) == 6


def test_masks_of_other_keys_and_places_differ():
    mask = random.keep_mask(KEY, 0.5, [4, 1000]).numpy()
    other = random.keep_mask(random.fold_in(KEY, 1), 0.5, [4, 1000]).numpy()
    for x in (other, mask[[1, 2, 3, 0]]):
        assert abs(np.mean(mask == x) - 0.5) < 0.05
    assert random.keep_mask(KEY, 0.5, []).shape == ()
    assert random.keep_mask(KEY, 0.5, [7]).shape == (7,)
    assert random.keep_mask(KEY, 0.5, [0, 3]).shape == (0, 3)


def test_keys_from_seeds_and_folds_all_differ():
    keys = [random.key_from_seed(seed) for seed in (0, 1, -1, 2**32, 2**63)]
    names = ["", "a", "b", 0, 1, 2**31, tf.constant(2), tf.constant(7, tf.uint32)]
    keys += [random.fold_in(key, name) for key in keys[:2] for name in names]
    assert len({tuple(key.numpy()) for key in keys}) == len(keys)
    assert all(key.dtype == tf.uint32 and key.shape == (2,) for key in keys)


def test_folds_of_several_names_are_those_of_each():
    names = ["", "a", "decoder.layer.w"]
    for trace in (lambda fn: fn, tf.function):
        keys = trace(lambda: random.fold_in(KEY, names))().numpy()
        want = [random.fold_in(KEY, name).numpy() for name in names]
        np.testing.assert_array_equal(keys, np.transpose(want))


def test_a_fold_depends_on_the_number_not_on_its_type():
    want = random.fold_in(KEY, 5).numpy()
    for five in (tf.constant(5), tf.constant(5, tf.uint32), tf.constant(5, tf.int64)):
        np.testing.assert_array_equal(random.fold_in(KEY, five), want)
    # A fold is none of the numbers that the key gives.
    assert want[0] ^ want[1] not in random.bits(KEY, [10]).numpy()


def draw(key):
    return {
        "bits": random.bits(key, [6, 5]),
        "uniform": random.uniform(key, [16, 8]),
        "normal": random.normal(random.fold_in(key, "normal"), [1024, 1024]),
        "mask": random.bernoulli(key, 0.3, [4, 2, 16]),
        "kept": random.keep_mask(key, 0.3, [4, 6, 16]),
        "long": random.bits(key, [2**16, 16]),
    }


DIMS = {
    "bits": ["X", "Y"],  # Which do not divide.
    "uniform": [("Y", "X"), None],
    "normal": ["X", "Y"],
    "mask": ["Y", None, "X"],
    "kept": ["Y", None, "X"],
    "long": [("Y", "X"), None],
}


@pytest.mark.parametrize("partitioner", Partitioner)
def test_numbers_do_not_depend_on_the_mesh_and_are_made_in_shards(partitioner):
    mesh = DeviceMesh(("X", "Y"), (2, 4))
    shardings = {k: Sharding.from_dims_mapping(mesh, d) for k, d in DIMS.items()}
    program = compile_program(
        draw, [KEY_SPEC], mesh, out_shardings=shardings, partitioner=partitioner
    )
    got = program.unshard(program(KEY.numpy()))
    for name, value in draw(KEY).items():
        if name == "normal":  # Compilers differ in the last bits of a logarithm.
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(got[name], value)
    assert program.collectives() == []
    shard = 1024 * 1024 // mesh.size
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.hlo_text())
    assert max(math.prod(map(int, dims.split(","))) for dims in shapes) == shard
    assert program.memory().temporaries < 1000


# TF's random ops.


def drawn(dtype, shape):
    ends = {"minval": None, "maxval": None} if dtype.is_integer else {}
    return lambda seed: tf.random.stateless_uniform(shape, seed, dtype=dtype, **ends)


@pytest.mark.parametrize("partitioner", Partitioner)
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int32", "uint64"]
)
@pytest.mark.parametrize("shape", [[8, 12], [4, 5, 3], []])
def test_numbers_are_those_of_tfs_jit(shape, dtype, partitioner):
    draw = drawn(tf.as_dtype(dtype), shape)

    def split(seed):
        return mesh_split(draw(seed), MESH, ["data", "model", None][: len(shape)])

    program = compile_program(split, SEED_SPEC, MESH, partitioner=partitioner)
    want = tf.function(draw, jit_compile=True)(tf.constant(SEED))
    np.testing.assert_array_equal(np.asarray(program(SEED)), want.numpy())


@pytest.mark.parametrize("partitioner", Partitioner)
def test_dropout_and_its_gradient_draw_only_what_a_device_holds(partitioner):
    def step(seed, x):
        x = mesh_split(x, MESH, ["data", "model"])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.experimental.stateless_dropout(x, 0.3, seed) ** 2
        return y, tape.gradient(y, x)

    specs = [*SEED_SPEC, tf.TensorSpec([26, 36])]
    program = compile_program(step, specs, MESH, partitioner=partitioner)
    x = np.random.default_rng(1).normal(size=[26, 36]).astype(np.float32)
    want = tf.function(step, jit_compile=True)(tf.constant(SEED), tf.constant(x))
    for ours, theirs in zip(program(SEED, x), want, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6)
    sizes = re.findall(r"\b[usf]\d+\[([\d,]+)\]", program.hlo_text())
    assert max(np.prod([int(n) for n in size.split(",")]) for size in sizes) == 13 * 9
    assert not program.collectives()


@pytest.mark.parametrize("with_state", [False, True])
def test_counters_beyond_64_bits(with_state):
    """Blocks are counted by 128 bits; an op whose new state is read stays as it is."""
    state = np.array([5, 2**64 - 2, 7], np.uint64)

    def draw(state):
        after, bits = xla.rng_bit_generator(PHILOX, state, [40], tf.uint32)
        return (bits, after) if with_state else (bits,)

    specs = [tf.TensorSpec([3], tf.uint64)]
    program = compile_program(draw, specs, MESH)
    want = tf.function(draw, jit_compile=True)(tf.constant(state))
    for ours, theirs in zip(program(state), want, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs.numpy())
