"""A whole run of speech recognition: training, error rates, what TensorBoard gets."""

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.tasks.speech.speech_files import install, sentences
from tests.tasks.speech.test_speech import BUCKETS, LIGHT, SIZES

RUN = (
    "Experiment.num_steps = 4",
    "Experiment.steps_per_loop = 2",
    "Experiment.eval_batches = 1",
    "Experiment.decode_batches = 1",
    "Experiment.checkpoint_interval = 2",
    "Experiment.summary_interval = 2",
)


@pytest.mark.slow  # Three programs.
def test_a_run_writes_down_what_it_heard_and_resumes(tmp_path):
    manifest = install(tmp_path, sentences(60))
    params = [
        *SIZES,
        *LIGHT,
        f"Manifest.path = '{manifest}'",
        f"SpeechInput.bucket_frames = {BUCKETS}",
        *RUN,
    ]
    files = ["asr/speech.gin", "plans/finalized.gin"]
    experiment, text = build_experiment(files, params)
    folder = tmp_path / "model"
    run = loop.Run(model_dir=str(folder), config=text)
    result = loop.train_and_evaluate(StepPrograms(experiment), run)
    names = {"loss", "wer", "cer", "wer/greedy", "cer/greedy"}
    assert names <= set(result.evaluation)
    events = EventAccumulator(str(folder / "eval")).Reload()
    tags = {name if name == "loss" else f"metrics/{name}" for name in names}
    assert {*tags, "samples"} <= set(events.Tags()["tensors"])
    more, text = build_experiment(files, [*params, "Experiment.num_steps = 6"])
    again = loop.train_and_evaluate(
        StepPrograms(more), loop.Run(model_dir=str(folder), config=text)
    )
    assert set(again.losses) == {5, 6}
