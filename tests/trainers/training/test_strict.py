"""How a run has its programs compiled: strictly, in a child process."""

import re

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.repair import check
from meshwright.framework.compiler.repair.op_layout import even_layout
from meshwright.framework.compiler.repair.table import faults
from meshwright.trainers import cli
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.parity import small_experiment

MESH, SMALL = "MESH_SHAPE = (2, 4)", "NUM_LAYERS = 1"


def _replicated(layout):
    splits = [s and max(s.splits(), default=1) > 1 for s in layout.shardings]
    return even_layout(layout, keep=()) if any(splits) else None


@pytest.fixture
def faulty_products(monkeypatch):
    """As if XLA got every product of split tensors wrong."""
    fault = faults.Fault(
        name="products",
        what="is a product",
        ops=("stablehlo.dot_general",),
        choose=_replicated,
        repair="nothing is split",
        smallest={"product": faults.Smallest(faults.Outcome.WRONG, "shown here")},
    )
    monkeypatch.setattr(check, "PRESENT", [fault])
    monkeypatch.setattr(check, "GUARDED", frozenset(fault.ops))


def test_the_programs_of_a_strict_experiment_are_strict(faulty_products):
    experiment = small_experiment(MESH, SMALL, "Experiment.strict = True")
    with pytest.raises(
        LoweringError,
        match=r"^train: the program is compiled strictly, and \d+ of its ops would be "
        r"laid out otherwise at a cost:\n  op '.*\.py:\d+\) is a product, which XLA",
    ):
        _ = StepPrograms(experiment).main


def test_the_programs_of_an_experiment_are_compiled_in_a_child(monkeypatch):
    experiment = small_experiment(MESH, SMALL, "Experiment.compile_in_child = True")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="^train: a child process compiles for the"):
        _ = StepPrograms(experiment).main


@pytest.mark.parametrize("field", ["strict", "compile_in_child"])
@pytest.mark.parametrize("value", ["1", "'yes'", "None"])
def test_it_is_true_or_false(field, value):
    message = re.escape(f"Experiment.{field} is {value}; it must be True or False")
    with pytest.raises(ValueError, match=message):
        small_experiment(MESH, f"Experiment.{field} = {value}")


@pytest.mark.parametrize("field", ["strict", "compile_in_child"])
@pytest.mark.parametrize(
    ("flag", "bound", "wanted"),
    [
        (None, None, False),
        (None, True, True),
        (True, None, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_the_flag_sets_the_field(field, flag, bound, wanted):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["meshwright"])
    lines = []

    def note(*args):
        lines.append(args)

    binding = [] if bound is None else [f"Experiment.{field} = {bound}"]
    given = {"gin_file": ["lm/stdlib_tiny.gin"], "gin_param": binding}
    if flag is not None:
        given[field] = flag
    with flagsaver.flagsaver(**given):
        cli.call("meshwright", ["meshwright"], lambda: cli.Command(run=note))
    ((experiment, config_text),) = lines
    assert getattr(experiment, field) is wanted
    assert (f"Experiment.{field} = True" in config_text) == wanted
