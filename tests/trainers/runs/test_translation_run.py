"""A whole run of a translation task: training, decoding, what TensorBoard gets."""

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.training import loop
from tests.tasks.text.parallel_files import install_all
from tests.tasks.text.test_translation import PLANS, SIZES

RUN = (
    "Experiment.num_steps = 4",
    "Experiment.steps_per_loop = 2",
    "Experiment.checkpoint_interval = 4",
    "Experiment.summary_interval = 2",
    "Experiment.eval_batches = 1",
    "Experiment.decode_batches = 1",
)


@pytest.mark.slow  # Three programs of an encoder, a decoder and experts.
def test_a_run_translates_and_shows_the_load_of_experts(tmp_path):
    install_all(tmp_path / "text", {"de": 60, "fr": 40})
    model, mesh, *params = PLANS["sparse"]
    root = f"GettextCatalogues.root = '{tmp_path / 'text'}'"
    experiment, text = build_experiment([model, mesh], [*SIZES, *params, root, *RUN])
    folder = tmp_path / "model"
    result = loop.train_and_evaluate(
        StepPrograms(experiment), loop.Run(model_dir=str(folder), config=text)
    )
    metrics = result.evaluation
    assert {"loss", "perplexity", "bleu", "chrf"} <= set(metrics)
    assert any(name.startswith("bleu/en-") for name in metrics)
    assert metrics["encoder/dropped"] == 0 and metrics["decoder/busiest_expert"] >= 1
    for name in ("train", "eval"):
        events = EventAccumulator(str(folder / name)).Reload()
        tags = events.Tags()["tensors"]
        assert {"encoder/load_per_expert", "decoder/load_per_expert"} <= set(tags)
        shape = events.Tensors("decoder/load_per_expert")[-1].tensor_proto.string_val
        assert shape[:2] == [b"128", b"16"]  # Eight experts of one layer, enlarged.
    assert "samples" in " ".join(tags)
    again = loop.evaluate_latest(
        StepPrograms(experiment), loop.Run(model_dir=str(folder), config=text)
    )
    assert again == metrics


def test_only_what_decodes_has_batches_to_decode():
    with pytest.raises(ValueError, match="decode_batches is 3, but LanguageModel deco"):
        build_experiment(["lm/stdlib_tiny.gin"], ["Experiment.decode_batches = 3"])
