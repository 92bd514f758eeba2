"""Translation: trained and decoded on one device and on eight; whole and stepwise."""

import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.attention.positions import InputPositions
from meshwright.layers.stacks.beams import BeamCaches
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.text.decoding import BeamSearch, Sampling
from meshwright.tasks.text.vocabulary import SpecialTokens
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.tasks.text.parallel_files import install_all
from tests.trainers.parity import initial_state

SIZES = (
    "MODEL_DIMS = 16",
    "HIDDEN_DIMS = 32",
    "NUM_HEADS = 4",
    "HEAD_DIM = 4",
    "NUM_LAYERS = 2",
    "VOCAB_SIZE = 336",
    "SOURCE_LENGTH = 16",
    "TARGET_LENGTH = 12",
    "TranslationInput.files = @GettextCatalogues()",
    "GettextCatalogues.held_out_one_in = 4",
    "Experiment.optimizer = @SGD()",
    "SGD.learning_rate = @ConstantSchedule()",
    "ConstantSchedule.value = 0.5",
    "SGD.momentum = 0.9",
    "Experiment.global_batch = 8",
    "Experiment.num_steps = 4",
)
# Nothing is dropped, so that what one token says does not hang on the others.
MOE = ("NUM_EXPERTS = 8", "Capacity.factor = 8.0")
PLANS = {
    "sparse": ("mt/moe.gin", "plans/sparse.gin", "MESH_SHAPE = (8,)", *MOE),
    "hybrid": ("mt/moe.gin", "plans/hybrid.gin", "MESH_SHAPE = (2, 4)", *MOE),
    "dense": ("mt/transformer.gin", "plans/finalized.gin", "MESH_SHAPE = (2, 4)"),
    "t5": (
        "docs/examples/from_t5x_pairs.gin",
        "plans/data_tensor.gin",
        "MESH_SHAPE = (2, 4)",
        "GettextCatalogues.domains = ()",
        "GettextCatalogues.languages = ('de', 'fr')",
        "transformer_layer.dropout_rate = 0.0",
    ),
    # GSPMD's Figure 2: two pipelines along an axis, experts along the other.
    "figure2": (
        "mt/pipeline.gin",
        "plans/pipelined_experts.gin",
        "MESH_SHAPE = (2, 4)",
        "NUM_LAYERS = 4",
        "NUM_STAGES = 2",
        "NUM_MICROBATCHES = 2",
        "NUM_EXPERTS = 4",
        "Capacity.factor = 4.0",
    ),
}
EXPERTS = {"sparse": (1, 8), "hybrid": (1, 8), "figure2": (2, 4)}
"""Layers with experts in the encoder, and experts of each."""


DENSE = ("dense", Partitioner.GSPMD)


def settings(always: tuple[str, Partitioner], *quick: tuple[str, Partitioner]):
    """Every plan under both partitioners; all but the quick ones are slow tests."""
    marks = dict.fromkeys(itertools.product(PLANS, Partitioner), [pytest.mark.slow])
    marks |= {always: [pytest.mark.always], **dict.fromkeys(quick, [])}
    return [pytest.param(*case, marks=marks[case]) for case in marks]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogues")
    install_all(folder, {"de": 60, "fr": 40})
    return str(folder)


@functools.cache
def experiment(root, plan="sparse", *more):
    model, mesh, *params = PLANS[plan]
    params = [*SIZES, *params, f"GettextCatalogues.root = '{root}'", *more]
    config.load([model, mesh], params)
    return config.build(Experiment)


def on_one_device(job: Experiment) -> Experiment:
    mesh_shape = (1,) * len(job.plan.mesh_shape)
    return dataclasses.replace(
        job, plan=dataclasses.replace(job.plan, mesh_shape=mesh_shape)
    )


@functools.cache
def initial_theta(root, plan) -> NestedMap:
    """Weights on the host, the same for every mesh, far enough from uniform answers."""
    return initial_state(experiment(root, plan)).theta.map(lambda t: 2 * t)


def sources(job: Experiment) -> NestedMap:
    return next(job.task.decoding.batches(global_batch=job.global_batch))


def decoded(root, plan, search, change=on_one_device, see=None) -> NestedMap:
    job = change(experiment(root, plan))
    task = dataclasses.replace(job.task, search=search)
    programs = StepPrograms(dataclasses.replace(job, task=task))
    if see is not None:
        see(programs.decode)
    return programs.decode(initial_theta(root, plan), sources(job)).map(np.asarray)


@pytest.mark.parametrize(
    ("plan", "positions", "special", "start_id", "end_id"),
    [
        *(
            ("sparse", positions, SpecialTokens.WITH_START, 1, 2)
            for positions in InputPositions
        ),
        ("t5", InputPositions.NONE, SpecialTokens.T5, 0, 1),
    ],
)
def test_step_by_step_is_the_whole_at_once(
    root, plan, positions, special, start_id, end_id
):
    """What greedy search says is the likeliest by the logits of a full forward pass."""

    def change(job):
        text = job.task.text
        vocabulary = dataclasses.replace(text.vocabulary, special_tokens=special)
        task = dataclasses.replace(
            job.task,
            input_positions=positions,
            text=dataclasses.replace(text, vocabulary=vocabulary),
        )
        return on_one_device(dataclasses.replace(job, task=task))

    job = change(experiment(root, plan))
    result = decoded(root, plan, Sampling(temperature=0), change)
    ids, batch = result.ids[:, 0], sources(job)
    start = np.full_like(ids[:, :1], start_id)
    length = np.cumsum(np.cumsum(ids == end_id, axis=1) > 0, axis=1) <= 1
    given = NestedMap(
        batch,
        target_ids=np.concatenate([start, ids[:, :-1]], axis=1),
        target_segment_ids=length.astype(np.int32),
        target_positions=np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
    )

    @tf.function(jit_compile=True, autograph=False)
    def logits(theta, batch):
        ctx = Context(plan=job.plan, mode=Mode.EVAL)
        x, _ = job.task.hidden(ctx, theta, NestedMap(batch))
        return tf.nn.log_softmax(job.task.to_logits(ctx, theta, x))

    full = logits(initial_theta(root, plan), dict(given)).numpy()
    np.testing.assert_array_equal(full.argmax(-1)[length], ids[length])
    taken = np.take_along_axis(full, ids[:, :, None], axis=-1)[:, :, 0]
    total = (taken * length).sum(1)
    np.testing.assert_allclose(total, result.scores[:, 0], rtol=1e-4, atol=1e-4)
    # The test would not see much if all rows ended at once.
    assert length.sum() > 4 * len(ids)


def test_a_beam_of_one_is_greedy(root):
    greedy = decoded(root, "sparse", Sampling(temperature=0))
    beam = decoded(root, "sparse", BeamSearch(beams=1))
    np.testing.assert_array_equal(greedy.ids, beam.ids)


BEAMS = BeamSearch(beams=3)


def see_that_the_cache_is_split(program):
    """Keys and values [layers, 8 x 3 beams, 12 tokens, 4 heads, 4]: an eighth of them.

    A decode that has them whole on each device says the same.
    """
    text = program.hlo_text()
    caches = set(re.findall(r"f32\[[12],(\d+),12,(\d),4\]", text))
    assert max(int(rows) * int(heads) for rows, heads in caches) == 24 * 4 // 8, caches


@functools.cache
def decoded_alone(root, plan):
    return decoded(root, plan, BEAMS)


@pytest.mark.parametrize(
    ("plan", "partitioner"), settings(DENSE, ("sparse", Partitioner.GSPMD))
)
def test_eight_devices_decode_as_one(root, plan, partitioner):
    def change(job):
        return dataclasses.replace(job, partitioner=partitioner)

    alone = decoded_alone(root, plan)
    # In a pipeline each device has all heads, and stages do not split rows.
    see = None if plan == "figure2" else see_that_the_cache_is_split
    together = decoded(root, plan, BEAMS, change, see)
    np.testing.assert_array_equal(together.ids, alone.ids)
    np.testing.assert_allclose(together.scores, alone.scores, rtol=1e-4)


def test_hypotheses_share_a_cache(root):
    """Of a decoder that attends to a memory, with experts, on one device."""
    flat = dataclasses.replace(BEAMS, caches=BeamCaches.FLAT)
    want, got = decoded_alone(root, "sparse"), decoded(root, "sparse", flat)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)


def batches(job: Experiment) -> list[NestedMap]:
    """Of the steps of training."""
    B = job.global_batch
    dataset = job.task.train_batches(0, global_batch=B, rows=range(B))
    return [NestedMap(batch) for batch in dataset.take(job.num_steps)]


def trained(job: Experiment):
    """Losses of each step, weights after the last, and its metrics."""
    p = StepPrograms(job)
    state = TrainState(p, initial_state(job))
    losses = []
    for batch in batches(job):
        out = p.main(state.stored(), batch.map(lambda t: t.numpy()[None]))
        state.update(out["state"])
        losses.append(float(np.asarray(out["metrics"].loss)[0]))
    theta = state.stored().theta
    return losses, theta.map(np.asarray), out["metrics"]


@functools.cache
def trained_alone(root, plan):
    """Losses and weights by TF on one device: no mesh, no XLA."""
    job = on_one_device(experiment(root, plan))
    step = tf.function(StepPrograms(job).train_step, autograph=False)
    state, losses = initial_state(job).map(tf.constant), []
    for batch in batches(job):
        out = step(state, batch)
        state = out.state
        losses.append(out.metrics.loss.numpy())
    return losses, state.theta.map(lambda t: t.numpy())


@pytest.mark.parametrize(
    ("plan", "partitioner"), settings(DENSE, ("figure2", Partitioner.SHARDY))
)
def test_eight_devices_train_as_one(root, plan, partitioner):
    losses, theta = trained_alone(root, plan)
    job = dataclasses.replace(experiment(root, plan), partitioner=partitioner)
    ours, ours_theta, metrics = trained(job)
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert losses[-1] < losses[0]

    def compare(path, a, b):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a, b, atol=1e-4 * scale, rtol=0, err_msg=path)

    ours_theta.map_with_path(compare, theta)
    if plan in EXPERTS:
        load = np.asarray(metrics.sums.encoder.load)[0]
        tokens = np.asarray(metrics.sums.encoder.tokens)[0]
        assert load.shape == EXPERTS[plan] and load.sum() > tokens.sum()


def test_every_held_out_source_is_decoded_once(root):
    job = experiment(root)
    batches = list(job.task.decoding.batches(global_batch=8))
    numbers = np.concatenate([batch.pair for batch in batches])
    pairs = job.task.text.files.pairs(Split.HELD_OUT)
    kept = numbers[numbers >= 0]
    assert len(set(kept)) == len(kept) and 0.5 * len(pairs) < len(kept) <= len(pairs)
    assert batches[0].map(lambda t: tf.TensorSpec(t.shape, t.dtype)) == (
        job.task.decoding.spec(8)
    )
    few = list(job.task.decoding.batches(global_batch=8, max_batches=1))
    assert len(few) == 1 and (few[0].pair >= 0).all()


def test_references_said_word_for_word_score_100(root, tmp_path):
    task = experiment(root).task
    pairs = task.text.files.pairs(Split.HELD_OUT)
    vocabulary = task.text.trained_vocabulary()
    batch = next(task.decoding.batches(global_batch=8))
    ids = np.zeros([8, 1, 40], np.int32)
    for row, number in enumerate(batch.pair):
        answer = [*vocabulary.encode([pairs[number].target])[0], vocabulary.end_id, 7]
        ids[row, 0, : len(answer)] = answer
    result = task.decoding.score([(batch, NestedMap(ids=ids))], tmp_path)
    assert result.metrics["bleu"] == pytest.approx(100)
    assert result.metrics["chrf"] == pytest.approx(100)
    assert any(name.startswith("bleu/en-") for name in result.metrics)
    assert pairs[batch.pair[0]].target in result.samples
    ids[0] = ids[1]
    worse = task.decoding.score([(batch, NestedMap(ids=ids))], tmp_path).metrics
    assert 0 < worse["bleu"] < 100


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["Translation.label_smoothing = 1.0"], "Translation.label_smoothing is 1.0"),
        (
            ["TokenEmbedding.vocab_size = 300"],
            "vocab_size 300 is smaller than",
        ),
        (["TokenEmbedding.softmax = %SoftmaxKind.SEPARATE"], "give a softmax layer"),
        (
            [
                "Translation.input_positions = %InputPositions.SINUSOIDS",
                "MODEL_DIMS = 15",
            ],
            "a sine and a cosine, but TokenEmbedding.model_dims is 15: make it even",
        ),
        (
            ["decoder/transformer_layer.has_memory = False"],
            "a memory, and has no",
        ),
    ],
)
def test_wrong_configurations(root, params, message):
    with pytest.raises(ValueError, match=message):
        job = experiment(root, "dense", *params)
        StepPrograms(job).noted_dims()
