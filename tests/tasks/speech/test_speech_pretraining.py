"""Masked prediction: what is masked, the loss by hand, and on eight devices."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode, initialize
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.tasks.speech.speech_pretraining import MaskedPrediction
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.tasks.speech.speech_files import install, sentences
from tests.tasks.speech.test_speech import LIGHT, SIZES, WHOLE, trained, trained_by_tf

B, S, M = 8, 12, 6
PRETRAINING = (
    "SpeechPretraining.backbone = @DepthwiseConv1D()",
    f"SpeechInput.bucket_frames = {WHOLE}",
    "MaskedPrediction.projected_dims = 4",
    "MaskedPrediction.start_share = 0.2",
    "MaskedPrediction.span = 3",
)
PREDICTION = MaskedPrediction(model_dims=M, projected_dims=4, start_share=0.2, span=3)
KEY = key_from_seed(3)
TRAIN = Context(mode=Mode.TRAIN, key=KEY)


def some(seed=0):
    """Backbone output, features and spans, of which rows have 0, 1 and more."""
    rng = np.random.default_rng(seed)
    x, features = rng.standard_normal([2, B, S, M]).astype(np.float32)
    spans = rng.random([B, S]) < 0.4
    spans[0] = False
    spans[1] = np.arange(S) == 5
    return x, features, spans


def by_hand(theta, x, features, spans):
    nats, correct, frames = 0.0, 0, 0
    for row in range(B):
        masked = np.flatnonzero(spans[row])
        if len(masked) < 2:
            continue
        context = x[row, masked] @ theta.context.numpy()
        target = features[row, masked] @ theta.target.numpy()
        context, target = (
            part / np.linalg.norm(part, axis=-1, keepdims=True)
            for part in (context, target)
        )
        for i in range(len(masked)):
            logits = target @ context[i] / PREDICTION.temperature
            nats += np.log(np.exp(logits).sum()) - logits[i]
            correct += int(logits.argmax() == i)
            frames += 1
    return nats, correct, frames


def test_the_loss_is_of_one_masked_frame_among_those_of_its_utterance():
    theta = initialize(PREDICTION.weights(), KEY)
    x, features, spans = some()
    result = PREDICTION.fprop(TRAIN, theta, x, features=features, spans=spans)
    nats, correct, frames = by_hand(theta, x, features, spans)
    np.testing.assert_allclose(result.nats, nats, rtol=1e-5)
    assert (result.correct, result.frames) == (correct, frames)
    assert 0 < correct < frames


def test_spans_are_whole_and_among_real_frames():
    real = np.arange(200)[None] < np.array([[200]] * 30 + [[50]] * 30)
    prediction = dataclasses.replace(PREDICTION, start_share=0.065, span=10)
    spans = prediction.spans(TRAIN, tf.constant(real)).numpy()
    assert not spans[~real].any()
    # 1 - (1 - 0.065) ** 10 of the frames that are not near the start.
    assert spans[:30, 10:].mean() == pytest.approx(0.49, abs=0.05)
    for row in spans[:30]:
        edges = np.flatnonzero(np.diff(np.r_[False, row, False].astype(int)))
        lengths = (edges[1::2] - edges[::2])[edges[1::2] < 200]
        assert (lengths >= 10).all()
    others = prediction.spans(
        dataclasses.replace(TRAIN, key=key_from_seed(4)), tf.constant(real)
    )
    assert (others != spans).numpy().any()
    evaluated = [prediction.spans(Context(), tf.constant(real)) for _ in range(2)]
    np.testing.assert_array_equal(*evaluated)


def test_masked_frames_are_the_learned_vector():
    theta = initialize(PREDICTION.weights(), KEY)
    x, _, spans = some()
    masked = PREDICTION.masked(TRAIN, theta, x, spans).numpy()
    np.testing.assert_array_equal(masked[~spans], x[~spans])
    assert (masked[spans] == theta.mask_vector.numpy()).all()


@pytest.mark.parametrize("partitioner", Partitioner)
def test_eight_devices_predict_as_one(partitioner):
    plan = ShardingPlan(
        mesh_shape=(2, 4), weights={"model": "Y"}, activations={"batch": "X"}
    )
    x, features, spans = some()
    assert_layer_parity(
        _Whole(prediction=PREDICTION),
        x,
        plan=plan,
        partitioner=partitioner,
        features=features,
        spans=spans,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Whole(MaskedPrediction):
    """Masking and loss, so that every weight has a gradient."""

    prediction: MaskedPrediction
    model_dims: int = M

    def weights(self):
        return self.prediction.weights()

    def fprop(self, ctx, theta, x, *, features, spans):
        x = self.prediction.masked(ctx, theta, x, spans)
        x = ctx.split(tf.cumsum(x, axis=1), ("batch", "sequence", "model"))
        out = self.prediction.fprop(ctx, theta, x, features=features, spans=spans)
        return NestedMap(nats=out.nats)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Pretraining of the subsampling and backbone of a recognizer."""
    manifest = install(tmp_path_factory.mktemp("speech"), sentences(60))
    params = [*SIZES, *LIGHT, f"Manifest.path = '{manifest}'", *PRETRAINING]
    config.load(["asr/pretraining.gin", "plans/finalized.gin"], params)
    return config.build(Experiment)


def test_it_trains_on_eight_devices_as_on_one(job):
    losses, theta = trained_by_tf(job)
    ours, ours_theta = trained(StepPrograms(job))
    np.testing.assert_allclose(ours, losses, rtol=1e-5)

    def compare(path, a, b):
        scale = max(np.abs(b).max(), 0.01)
        np.testing.assert_allclose(a, b, atol=1e-4 * scale, rtol=0, err_msg=path)

    ours_theta.map_with_path(compare, theta)


def test_its_weights_have_the_paths_of_a_recognizer(job):
    assert set(job.task.weights()) == {"subsampling", "backbone", "prediction"}
    sums = {"nats": np.float32(30), "correct": np.float32(4), "frames": np.float32(10)}
    assert job.task.metrics(sums) == {"loss": 3.0, "accuracy": pytest.approx(0.4)}
    assert job.task.decoding is None


@pytest.mark.parametrize("field", ["span", "projected_dims"])
def test_sizes_below_one(field):
    with pytest.raises(ValueError, match=f"MaskedPrediction.{field} is 0"):
        MaskedPrediction(model_dims=M, **{field: 0})


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_out_of_range(share):
    with pytest.raises(ValueError, match="MaskedPrediction.start_share is"):
        MaskedPrediction(model_dims=M, start_share=share)
