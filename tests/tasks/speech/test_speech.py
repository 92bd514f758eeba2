"""Speech recognition: on one device and on eight, by buckets and whole; read out."""

import dataclasses
import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.convolutions import convolution  # noqa: F401  Known to gin.
from meshwright.tasks.input.example_order import Split
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.tasks.speech.speech_files import install, sentences
from tests.trainers.parity import initial_state

SIZES = (
    "MODEL_DIMS = 8",
    "HIDDEN_DIMS = 16",
    "NUM_HEADS = 2",
    "HEAD_DIM = 4",
    "NUM_LAYERS = 2",
    "NUM_BINS = 16",
    "LABEL_LENGTH = 26",
    "ConvSubsampling.channels = 4",
    "Repeat.recompute = %Recompute.NOTHING",
    "Manifest.held_out_one_in = 4",
    "Experiment.optimizer = @SGD()",
    "SGD.learning_rate = @ConstantSchedule()",
    "ConstantSchedule.value = 0.1",
    "SGD.momentum = 0.9",
    "Experiment.global_batch = 8",
    "Experiment.num_steps = 3",
    "MESH_SHAPE = (4, 2)",
)
# Layers have tests of their own, and conformers compile for long.
LIGHT = (
    "SpeechRecognition.backbone = @DepthwiseConv1D()",
    "DepthwiseConv1D.model_dims = %MODEL_DIMS",
    "DepthwiseConv1D.window = 5",
)
CONFORMER = ("conformer_layer.window = 3", "conformer_layer.dropout_rate = 0.1")
WHOLE, BUCKETS = (200,), (80, 200)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return str(install(tmp_path_factory.mktemp("speech"), sentences(60)))


@functools.cache
def experiment(manifest, buckets=WHOLE, *more, backbone=LIGHT):
    params = [
        *SIZES,
        *backbone,
        "SpecAugment.bin_width = 6",
        f"Manifest.path = '{manifest}'",
        f"SpeechInput.bucket_frames = {buckets}",
        *more,
    ]
    config.load(["asr/speech.gin", "plans/finalized.gin"], params)
    return config.build(Experiment)


def on_one_device(job: Experiment) -> Experiment:
    plan = dataclasses.replace(job.plan, mesh_shape=(1, 1))
    return dataclasses.replace(job, plan=plan)


def batches(job: Experiment) -> list[NestedMap]:
    """Of the steps of training."""
    B = job.global_batch
    dataset = job.task.train_batches(0, global_batch=B, rows=range(B))
    return [NestedMap(batch) for batch in dataset.take(job.num_steps)]


def trained(p: StepPrograms):
    """Losses of each step, and weights after the last."""
    state = TrainState(p, initial_state(p.experiment))
    losses = []
    for batch in batches(p.experiment):
        out = p.main(state.stored(), batch.map(lambda t: t.numpy()[None]))
        state.update(out["state"])
        losses.append(float(np.asarray(out["metrics"].loss)[0]))
    return losses, state.stored().theta.map(np.asarray)


def trained_by_tf(job: Experiment):
    """The same on one device, eagerly: no mesh, no compiler."""
    job = on_one_device(job)
    state, losses = initial_state(job).map(tf.constant), []
    for batch in batches(job):
        out = StepPrograms(job).train_step(state, batch)
        state = out.state
        losses.append(out.metrics.loss.numpy())
    return losses, state.theta.map(lambda t: t.numpy())


@functools.cache
def trained_alone(manifest, buckets, backbone):
    return trained_by_tf(experiment(manifest, buckets, backbone=backbone))


@functools.cache
def programs(manifest, buckets, backbone, partitioner) -> StepPrograms:
    job = experiment(manifest, buckets, backbone=backbone)
    return StepPrograms(dataclasses.replace(job, partitioner=partitioner))


@pytest.mark.parametrize(
    ("buckets", "backbone", "partitioner"),
    [
        pytest.param(BUCKETS, LIGHT, Partitioner.SHARDY, marks=pytest.mark.always),
        pytest.param(BUCKETS, LIGHT, Partitioner.GSPMD, marks=pytest.mark.slow),
        pytest.param(WHOLE, LIGHT, Partitioner.SHARDY, marks=pytest.mark.slow),
        pytest.param(BUCKETS, CONFORMER, Partitioner.SHARDY, marks=pytest.mark.slow),
        pytest.param(BUCKETS, CONFORMER, Partitioner.GSPMD, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_train_as_one(manifest, buckets, backbone, partitioner):
    together = programs(manifest, buckets, backbone, partitioner)
    losses, theta = trained_alone(manifest, buckets, backbone)
    ours, ours_theta = trained(together)
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    start = initial_state(together.experiment).theta
    for path in ("softmax.kernel", "subsampling.first.kernel"):
        moved = np.abs(ours_theta.get_path(path) - start.get_path(path))
        assert moved.max() > 1e-2, "steps go all the way back"

    def compare(path, a, b):
        # A bias of attention's keys has no gradient, but for rounding.
        scale = max(np.abs(b).max(), 0.01)
        np.testing.assert_allclose(a, b, atol=1e-4 * scale, rtol=0, err_msg=path)

    ours_theta.map_with_path(compare, theta)


def held_out(job: Experiment) -> list[NestedMap]:
    B = job.global_batch
    batches = job.task.eval_batches(global_batch=B, rows=range(B))
    return [NestedMap(batch) for batch in batches]


NOTHING_RANDOM = (
    "SpecAugment.bin_masks = 0",
    "SpecAugment.time_masks = 0",
)


def test_a_bucket_computes_what_the_whole_length_does(manifest):
    """Each batch cut to its bucket: losses and gradients in training, sums without."""
    results = {}
    for buckets in (WHOLE, BUCKETS):
        job = on_one_device(experiment(manifest, buckets, *NOTHING_RANDOM))
        theta = initial_state(job).theta.map(tf.constant)
        batches = held_out(experiment(manifest, BUCKETS))
        batches = [batches[0], batches[-1]]
        lengths = [int(np.max(batch.frames)) for batch in batches]
        assert min(lengths) <= BUCKETS[0] < max(lengths)
        results[buckets] = [sums_and_gradients(job, theta, batch) for batch in batches]
    for full, cut in zip(results[WHOLE], results[BUCKETS], strict=True):
        for a, b in zip(full, cut, strict=True):
            scale = np.abs(a).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def sums_and_gradients(job, theta, batch):
    """Sums of an evaluation, and the gradients of a training step."""
    plan, leaves = job.plan, theta.leaves()
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        key = tf.constant([1, 2], tf.uint32)
        ctx = Context(plan=plan, mode=Mode.TRAIN, key=key)
        result = job.task.loss(ctx, theta.pack(leaves), batch)
    gradients = tape.gradient(result.loss, leaves)
    evaluated = job.task.loss(Context(plan=plan), theta, batch)
    return [*evaluated.sums.leaves(), *result.sums.leaves(), *gradients]


def test_a_program_has_a_part_for_each_bucket(manifest):
    """And a branch that chooses."""
    p = programs(manifest, BUCKETS, LIGHT, Partitioner.SHARDY)
    text = p.main.hlo_text()
    assert "conditional(" in text
    # Logits: frames after subsampling are 20 of 80 and 50 of 200.
    assert "f32[2,20,16]" in text and "f32[2,50,16]" in text


def test_eight_devices_say_as_one(manifest, tmp_path):
    p = programs(manifest, BUCKETS, LIGHT, Partitioner.SHARDY)
    job, theta = p.experiment, initial_state(p.experiment).theta
    alone = StepPrograms(on_one_device(job))
    together = []
    for batch in job.task.decoding.batches(global_batch=job.global_batch):
        result = p.decode(theta, batch)
        want = alone.decode_step(*(tree.map(tf.constant) for tree in (theta, batch)))
        np.testing.assert_array_equal(result.frames, want.frames)
        np.testing.assert_allclose(result.log_probs, want.log_probs, rtol=0, atol=2e-4)
        together.append((batch, result))
    text = p.decode.hlo_text()
    assert "f32[2,50,16]" in text and not re.search(r"f32\[8,(50|200),", text)
    numbers = np.concatenate([batch.utterance for batch, _ in together])
    count = len(job.task.speech.utterances(Split.HELD_OUT).listed)
    assert sorted(numbers[numbers >= 0]) == list(range(count))
    scored = job.task.decoding.score(together, tmp_path)
    assert set(scored.metrics) == {"wer", "cer", "wer/greedy", "cer/greedy"}
    assert scored.metrics["wer"] > 0.5, "it has not learned to write"


def test_transcripts_said_frame_by_frame_have_no_errors(manifest, tmp_path):
    task = experiment(manifest).task
    listed = task.speech.utterances(Split.HELD_OUT).listed
    batch = next(task.decoding.batches(global_batch=8))
    log_probs = np.full([8, 60, 32], -9.0, np.float32)
    log_probs[:, :, 0] = -1.0
    for row, number in enumerate(batch.utterance):
        labels = task.speech.vocabulary.encode([listed[number].transcript])[0]
        log_probs[row, 2 * np.arange(len(labels)), labels] = 0.0
    out = NestedMap(log_probs=log_probs, frames=np.full([8], 60, np.int32))
    result = task.decoding.score([(batch, out)], tmp_path)
    assert set(result.metrics.values()) == {0.0}
    assert listed[batch.utterance[0]].transcript in result.samples
    log_probs[0] = log_probs[1]
    assert 0 < task.decoding.score([(batch, out)], tmp_path).metrics["wer"] < 1


def test_what_is_said_of_the_data(manifest):
    task = experiment(manifest).task
    facts = task.describe_data()
    total = facts["training utterances"] + facts["held-out utterances"]
    left_out = [n for name, n in facts.items() if "utterances " in name]
    assert len(left_out) == 6 and total + sum(left_out) == 60
    assert facts["training minutes"] > facts["held-out minutes"] > 0
    assert set(task.data_fingerprint()) == {
        "utterances",
        "vocabulary",
        "SpeechInput.seed",
        "SpeechInput.bucket_frames",
    }
    assert task.tokens(8) == 1600 and task.train_flops(8) > task.train_flops(4) > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["Softmax.vocab_size = 31"], "Softmax.vocab_size 31 is smaller than the 32"),
        (["SpeechInput.subsampling = 2"], "makes 50 frames of 200, but .* makes 100"),
        (["SpeechRecognition.beams = 0"], "SpeechRecognition.beams is 0"),
        (["NUM_BINS = 20", "LogMel.bins = 16"], r"takes inputs whose last dims"),
    ],
)
def test_wrong_configurations(manifest, params, message):
    with pytest.raises(ValueError, match=message):
        StepPrograms(experiment(manifest, WHOLE, *params)).noted_dims()
