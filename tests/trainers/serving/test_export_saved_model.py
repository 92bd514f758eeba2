"""What plain TensorFlow makes of a SavedModel is what the trainer's evaluation says."""

import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from meshwright.framework.modeling.layer import Context
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.beams import BeamCaches
from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.serving.saved_model import (
    EVALUATE,
    SERVE,
    ExportError,
    export_saved_model,
    plain_graph,
)
from tests.tasks.speech import test_speech
from tests.tasks.text import test_translation
from tests.trainers.parity import initial_state, random_batches, small_experiment
from tests.trainers.planning.search import pipelined
from tests.trainers.runs import (
    test_image_run,
    test_recommendation_run,
    test_segmentation_run,
)

# Other kernels add up in another order.
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
# Not sums of what single rows give: of all rows together.
JOINT = {"seg": {"loss"}, "moe": {"stack.balance"}}


def language_model(*params, **more) -> Experiment:
    return small_experiment("MESH_SHAPE = (2, 4)", *params, **more)


def translation(*more: str) -> Experiment:
    model, mesh, *params = test_translation.PLANS["dense"]
    params = [*test_translation.SIZES, *params, "GettextCatalogues.root = '/'", *more]
    return build_experiment([model, mesh], params)[0]


def speech() -> Experiment:
    params = [
        *test_speech.SIZES,
        *test_speech.LIGHT,
        "Manifest.path = '/manifest'",
        f"SpeechInput.bucket_frames = {test_speech.BUCKETS}",
    ]
    return build_experiment(["asr/speech.gin", "plans/finalized.gin"], params)[0]


def pipeline() -> Experiment:
    return build_experiment(list(pipelined.GIN_FILES), list(pipelined.PARAMS))[0]


def segmentation() -> Experiment:
    params = ("PATCH = (16, 8, 6)", "VolumeFiles.path = '/volumes'")
    return test_segmentation_run.experiment("spatial", *params)


CASES = {
    "lm": language_model,
    "unrolled": lambda: language_model("Repeat.unroll = %Unroll.UNROLLED"),
    "moe": lambda: language_model(experts=4),
    "pipeline": pipeline,
    "image": lambda: test_image_run.experiment(8),
    "rec": lambda: test_recommendation_run.experiment(8),
    "seg": segmentation,
    "speech": speech,
    "mt": translation,
}

# Those that compile for long, or differ little from others.
SLOW = ("unrolled", "mt")
MARKED = [
    pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else [])
    for case in CASES
]


def rows_of_text(experiment: Experiment) -> NestedMap:
    """Sources and targets of random tokens, each of another length."""
    rng, spec = np.random.default_rng(0), NestedMap(experiment.task.batch_spec(8))

    def column(path, s):
        lengths = 3 + np.arange(8) % (s.shape[1] - 3)
        real = np.arange(s.shape[1]) < lengths[:, None]
        if path.endswith("positions"):
            return np.broadcast_to(np.arange(s.shape[1], dtype=np.int32), s.shape)
        if path.endswith(("segment_ids", "weights")):
            return real.astype(s.dtype.as_numpy_dtype)
        return np.where(real, rng.integers(3, 300, s.shape), 0).astype(np.int32)

    return spec.map_with_path(column)


def sounds(experiment: Experiment) -> NestedMap:
    rng, spec = np.random.default_rng(0), experiment.task.batch_spec(8)
    return NestedMap(
        features=rng.standard_normal(spec.features.shape).astype(np.float32),
        frames=np.array([80, 60, 75, 40, 200, 120, 199, 0], np.int32),
        labels=rng.integers(1, 20, spec.labels.shape).astype(np.int32),
        label_counts=np.array([3, 2, 4, 1, 9, 5, 8, 0], np.int32),
    )


def batch_of(case: str, experiment: Experiment) -> NestedMap:
    first = lambda batches: batches[0].map(lambda x: x[0])  # noqa: E731
    if case == "image":
        return first(test_image_run.pictures(experiment, 1))
    if case == "rec":
        return first(test_recommendation_run.batches_of(experiment, 1))
    if case == "seg":
        return first(test_segmentation_run.volumes(experiment, 1))
    if case == "speech":
        return sounds(experiment)
    if case == "mt":
        return rows_of_text(experiment)
    return first(random_batches(experiment, 1))


@functools.cache
def trainer(case: str) -> tuple[StepPrograms, NestedMap, NestedMap]:
    """The programs, weights that are not those of the first step, and a batch."""
    experiment = CASES[case]()
    rng = np.random.default_rng(1)
    theta = initial_state(experiment).theta.map(
        lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype) * (x.ndim > 1)
    )
    return StepPrograms(experiment), theta, batch_of(case, experiment)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """(case, signature, arguments by path) -> results by path, in a plain process."""
    folder = tmp_path_factory.mktemp("saved_models")
    script = pathlib.Path(__file__).with_name("saved_model_client.py")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    numbers = itertools.count()

    def call(case, signature, arguments):
        model = folder / case
        if not model.exists():
            programs, theta, _ = trainer(case)
            # Split over files as those of large models are.
            export_saved_model(programs.experiment, theta, model, file_bytes=20_000)
        number = next(numbers)
        given, output = folder / f"{number}.npz", folder / f"{number}.out.npz"
        np.savez(given, **arguments)
        request = [str(model), signature, str(given), str(output)]
        print(json.dumps(request), file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        with np.load(output) as out:
            return {name: out[name] for name in out.files}

    yield call
    process.stdin.close()
    process.wait()


def leaves(batch: NestedMap, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    return {path: leaf[rows] for path, leaf in batch.items_by_path()}


@pytest.mark.parametrize("case", MARKED)
def test_sums_are_those_of_the_trainers_evaluation(client, case):
    programs, theta, batch = trainer(case)
    want = programs.eval(theta, batch)
    want = {path: np.asarray(value) for path, value in want.items_by_path()}
    got = client(case, EVALUATE, leaves(batch))
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_allclose(got[path], value, **TOLERANCE, err_msg=path)
    # Batches of one row, of three, and of the rest make the same sums.
    parts = [
        client(case, EVALUATE, leaves(batch, slice(start, end)))
        for start, end in ((0, 1), (1, 4), (4, None))
        if start < len(batch.leaves()[0])
    ]
    for path in want.keys() - JOINT.get(case, set()):
        total = sum(part[path] for part in parts)
        np.testing.assert_allclose(total, want[path], **TOLERANCE, err_msg=path)


@pytest.mark.parametrize("case", MARKED)
def test_a_row_is_answered_alike_in_any_batch(client, case):
    programs, _, batch = trainer(case)
    task = programs.experiment.task
    names = task.serving.spec(None).keys()
    inputs = {name: batch[name] for name in names}
    want = client(case, SERVE, inputs)
    for rows in (slice(0, 1), slice(0, 3)):
        some = {name: value[rows] for name, value in inputs.items()}
        got = client(case, SERVE, some)
        assert got.keys() == want.keys()
        for name, value in got.items():
            expected = want[name][rows]
            if value.ndim == 2 and name == "ids":  # As long as the longest row.
                expected = expected[:, : value.shape[1]]
            np.testing.assert_allclose(
                value, expected, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_what_a_language_model_serves_are_the_chances_in_its_loss(client):
    programs, theta, batch = trainer("lm")
    # Texts of one document, as requests are: a row's tokens see all before them.
    batch = NestedMap(batch, segment_ids=np.ones_like(batch.segment_ids))
    batch.ids = np.maximum(batch.ids, 1)
    scores = client("lm", SERVE, {"ids": batch.ids})["log_probs"]
    picked = np.take_along_axis(scores, batch.labels[..., None], -1)[..., 0]
    nats = -np.sum(picked * batch.weights)
    want = programs.eval(theta, batch)
    np.testing.assert_allclose(nats, np.asarray(want.nats), rtol=1e-5)


@pytest.mark.parametrize(
    "case", ["seg", "speech", pytest.param("mt", marks=pytest.mark.slow)]
)
def test_answers_are_what_the_trainer_decodes(client, case):
    programs, theta, batch = trainer(case)
    task = programs.experiment.task
    spec = task.decoding.spec(programs.experiment.global_batch)
    number = next(name for name in spec if name in ("tile", "utterance", "pair"))
    rows = np.arange(programs.experiment.global_batch, dtype=np.int32)
    given = NestedMap({n: rows if n == number else batch[n] for n in spec})
    want = programs.decode(theta, given)
    got = client(case, SERVE, {name: batch[name] for name in task.serving.spec(None)})
    for path, value in want.items_by_path():
        np.testing.assert_allclose(
            got[path], np.asarray(value), rtol=1e-4, atol=1e-4, err_msg=path
        )


def test_weights_are_variables_of_logical_shapes(client, tmp_path):
    programs, theta, _ = trainer("pipeline")
    client("pipeline", SERVE, {"ids": np.ones([1, 8], np.int32)})
    export_saved_model(programs.experiment, theta, tmp_path / "model", file_bytes=5000)
    files = [path.stat().st_size for path in (tmp_path / "model").rglob("*.data-*")]
    assert len(files) > 3 and max(files) <= 5000
    loaded = tf.saved_model.load(str(tmp_path / "model")).weights
    for path, value in theta.items_by_path():
        entry = functools.reduce(lambda tree, name: tree[name], path.split("."), loaded)
        np.testing.assert_array_equal(entry.numpy(), value, err_msg=path)


def test_a_task_that_serves_nothing_is_refused(tmp_path):
    params = [
        *(p for p in test_speech.SIZES if not p.startswith("ConvSub")),
        "ConvSubsampling.channels = 4",
        "Manifest.path = '/manifest'",
        "SpeechInput.bucket_frames = (80,)",
    ]
    experiment, _ = build_experiment(
        ["asr/conformer.gin", "asr/pretraining.gin", "plans/finalized.gin"], params
    )
    with pytest.raises(ExportError, match="SpeechPretraining serves nothing, so"):
        export_saved_model(experiment, NestedMap(), tmp_path / "model")


def test_an_op_of_a_mesh_is_refused():
    @tf.function
    def manual(x):
        spec = [tf.TensorSpec([2])]
        return xla.custom_call_v2("meshwright.all_reduce", [x], spec)[0]

    graph = manual.get_concrete_function(tf.TensorSpec([2])).graph.as_graph_def()
    with pytest.raises(ExportError, match="is a XlaCustomCallV2, which only a program"):
        plain_graph(graph)


def test_draws_want_a_known_batch(tmp_path):
    experiment = translation("Translation.search = @Sampling()")
    theta = initial_state(experiment).theta
    with pytest.raises(ValueError, match=r"Sampling.temperature is 1.0, but an export"):
        export_saved_model(experiment, theta, tmp_path / "model")


def test_beams_that_share_a_cache_translate_a_batch_of_any_size(tmp_path):
    experiment = translation(
        "Translation.search = @BeamSearch()", "BeamSearch.caches = %BeamCaches.FLAT"
    )
    theta = initial_state(experiment).theta.map(lambda x: 2 * x if x.ndim > 1 else x)
    export_saved_model(experiment, theta, tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model")).signatures[SERVE]
    task = experiment.task
    each = dataclasses.replace(
        task, search=dataclasses.replace(task.search, caches=BeamCaches.REORDERED)
    )
    serve = functools.partial(each.serving.serve, Context(), theta.map(tf.constant))
    ids = rows_of_text(experiment).source_ids
    batch = NestedMap(source_ids=tf.constant(ids))
    want = tf.function(serve, autograph=False)(batch)
    assert len(np.unique(want.ids)) > 6
    for rows in (1, 5):
        got = served(source_ids=tf.constant(ids[:rows]))
        np.testing.assert_array_equal(got["ids"], want.ids[:rows])
        np.testing.assert_allclose(got["scores"], want.scores[:rows], rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="source_ids_must_have_th"):
        served(source_ids=tf.constant(ids[:, :-1]))
