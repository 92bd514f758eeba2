"""A step of a shipped job tells where the axes of its tensors come from."""

from meshwright.trainers.cli import build_experiment
from meshwright.trainers.experiment.step_programs import StepPrograms

SMALL = ("NUM_LAYERS = 2", "MODEL_DIMS = 16", "SEQUENCE_LENGTH = 16")


def test_experts_without_drops_have_reasons():
    """Shardy's records ended the process for this program, when they were complete."""
    experiment, _ = build_experiment(["lm/stdlib_experts.gin"], list(SMALL))
    program = StepPrograms(experiment).traced_main
    text = str(program.why("dropless.py:167", "X"))
    assert "X on dim 0 is from" in text
