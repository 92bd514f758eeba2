"""What binaries say before TensorFlow is imported, each in a process of its own."""

import inspect
import os
import re
import subprocess
import sys

import gin
import pytest

from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings import of_t5x, stand_ins
from meshwright.trainers.startup import huge_pages

# Calls a binary, and says what it has imported when it ends.
CALL = """
import sys
from meshwright.trainers import {name}

try:
    {name}.run()
finally:
    heavy = {{"tensorflow", "jax", "numpy"}} & set(sys.modules)
    print("imported:", *sorted(heavy))
"""
TINY = "--gin_file=lm/stdlib_tiny.gin"


def call(name, *arguments):
    command = [sys.executable, "-c", CALL.format(name=name), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


SHOW = """
import os, sys
from meshwright.trainers.startup import huge_pages

huge_pages.use_huge_pages()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_huge_pages_where_the_system_has_them(given, expected):
    """The process stays the same, and so do its arguments."""
    if not huge_pages.has_huge_pages():
        expected = given
    command = [sys.executable, "-c", SHOW, "one", "two words"]
    environment = os.environ | {"GLIBC_TUNABLES": given}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    )
    text, _ = process.communicate()
    assert text == f"{process.pid} {expected} one two words\n"


@pytest.mark.parametrize("name", ["train", "plan", "export", "generate"])
def test_help_needs_no_tensorflow(name):
    done = call(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    example = rf"Examples?:\n\n  meshwright-{name} {re.escape(TINY)}"
    assert re.search(example, done.stdout)
    assert "--gin_param: A gin binding" in done.stdout
    assert done.stdout.endswith("imported:\n")


def test_help_ends_with_its_reader():
    command = [sys.executable, "-c", CALL.format(name="train"), "--help"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    process.stdout.close()
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("train", ["--modle_dir=x"], "Unknown .* 'modle_dir'. Did you mean: model_dir"),
        (
            "train",
            ["--gin.TRAIN_STEPS=1000"],
            "'gin.TRAIN_STEPS'\n  Bindings are given as "
            "--gin_param='Experiment.num_steps = 1000'\n",
        ),
        (
            "train",
            ["--gin.ROOT='gs://a/b'"],
            "--gin_param=\"ROOT = 'gs://a/b'\"\n",
        ),
        (
            "train",
            ["--gin.PjitPartitioner.num_partitions=2"],
            "num_partitions'\n  T5X's PjitPartitioner.num_partitions is an axis of the "
            "mesh: MESH_SHAPE = .4, 2. with plans/data_tensor.gin",
        ),
        (
            "train",
            ["--gin.train/utils.DatasetConfig.batch_size=8"],
            "T5X's DatasetConfig.batch_size is Experiment.global_batch",
        ),
        ("plan", ["--gin.ROOT", "3"], "--gin_param='ROOT = VALUE'\n"),
        ("train", ["--gin.MODEL_DIR='/a b'"], "Here it is --model_dir='/a b'\n"),
        (
            "train",
            ["--gin.MIXTURE_OR_TASK_NAME='c4'"],
            "T5X's MIXTURE_OR_TASK_NAME is of seqio: .*Translation.text = @PairDataset",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--mode=infer"],
            "one of <train|eval|train_and_eval>\n  Here it is meshwright-generate, of",
        ),
        (
            "train",
            ["--gin_file=t5x/examples/t5/base.gin", "--model_dir=x"],
            "no gin file 't5x/.*\n  docs/coming_from/lingvo_t5x_praxis.md lists what",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=include 't5x/examples/base.gin'"],
            "no gin file 't5x/.*\n  docs/coming_from/lingvo_t5x_praxis.md lists what",
        ),
        (
            "train",
            ["--gin.network.T5Config.num_heads=4"],
            "T5X's T5Config.num_heads is NUM_HEADS\n",
        ),
        (
            "train",
            ["--gin.TASK_FEATURE_LENGTHS={'inputs': 9, 'targets': 9}"],
            "T5X's TASK_FEATURE_LENGTHS is SEQUENCE_LENGTH of a language model, SOUR",
        ),
        (
            "train",
            ["--gin.INITIAL_CHECKPOINT_PATH='/a'"],
            "T5X's INITIAL_CHECKPOINT_PATH is InitializeFrom.checkpoint",
        ),
        ("train", ["--gin_search_paths=X"], "a gin file is named by its path from the"),
        ("train", ["--gin_bindings=A=1"], "Here it is --gin_param\n"),
        ("train", ["--logdir=/x"], "Here it is --model_dir\n"),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=TRAIN_STEPS = 1000"],
            "to %TRAIN_STEPS: T5X's TRAIN_STEPS is Experiment.num_steps here\n",
        ),
        ("train", [], "--gin_file is required, such as --gin_file=lm/stdlib_tiny.gin"),
        ("train", ["--gin_file=", "--model_dir=x"], "--gin_file is required, such as"),
        ("train", [TINY], "--model_dir is required, such as --model_dir=logs/stdlib_t"),
        ("train", [TINY, "--model_dir="], "--model_dir is required"),
        (
            "train",
            ["--gin_file=lm", "--model_dir=x"],
            "'lm' is a folder, .*params/lm: ",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "lm/stdlib_tiny.gin"],
            "unexpected argument 'lm/stdlib_tiny.gin': give flags alone, as --NAME",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--device_count=x"],
            "--device_count is 'x'; it must be a whole number\n",
        ),
        (
            "export",
            [TINY, "--output=x", "--model_dir=", "--what=bundle"],
            "--model_dir is empty: name the training's folder, or leave it out",
        ),
        ("train", [TINY, "--model_dir=x", "--profile_steps=3"], "must be FIRST,LAST"),
        (
            "train",
            ["--gin_file=lm/stdlib_tny", "--model_dir=x"],
            r"no gin file 'lm/stdlib_tny'.*\n  Did you mean lm/stdlib_tiny.gin",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=Experiment.sed = 1"],
            r"'Experiment' doesn't have .*'sed'(.|\n)*Did you mean seed\?",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=MESH_SHPE = (2, 4)"],
            r"MESH_SHPE = \(2, 4\)\n +nothing in use .*\n  Did you mean %MESH_SHAPE",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=SGD.learning_rate = 1"],
            r"1 gin binding.*\n  SGD.learning_rate = 1\n    gin built no SGD: refer to",
        ),
        ("train", [TINY, "--model_dir=/proc/x"], "--model_dir=/proc/x cannot be writt"),
        (
            "train",
            [TINY, "--model_dir=/proc/x", "--mode=eval"],
            "there is no checkpoint in /proc/x/checkpoints: name the folder of a run",
        ),
        ("train", [TINY, "--model_dir=x", "--num_processes=2"], "without --coordinat"),
        ("plan", [TINY, "--topology=banana"], "banana is no topology: give cpu, or a "),
        ("plan", [TINY, "--search"], "--search ranks .*: name one, as in --topology=v"),
        ("plan", [TINY, "--topology=cpu", "--log_dir=/proc/x"], "--log_dir=/proc/x c"),
        ("plan", [TINY, "--gin_param=Adm.beta1 = 0"], "'Adm'(.|\n)*Did you mean Adam"),
        (
            "plan",
            [TINY, "--gin_param=Experiment.optimizer = @AdamW()"],
            r"'@AdamW(.|\n)*Did you mean Adam, whose weight_decay is that of AdamW\?",
        ),
        (
            "plan",
            [TINY, "--gin_param=Experiment.activation_dtype = %bf16"],
            r"constant %bf16(.|\n)*Did you mean %bfloat16\?\n",
        ),
        ("plan", [TINY, "--gin_param=Adam.beta1 = %B"], "no macro or constant %B"),
        (
            "plan",
            [TINY, "--gin_param=Adam.beta1 = %MODEL_SIZES"],
            r"constant %MODEL_SIZES(.|\n)*  (It must be|Set it, by MODEL_SIZES =)",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=PjitPartitioner.num_devices = 2"],
            r"'PjitPartitioner'(.|\n)*Of T5X's PjitPartitioner, num_partitions is an a",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=network.T5Config.dropout_rate = 0.1"],
            "T5X's T5Config.dropout_rate is transformer_layer.dropout_rate.\n",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=EncoderDecoderModel.z_loss = 0.1"],
            "T5X's EncoderDecoderModel.z_loss is Translation.z_loss.\n",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=RelativePositionBiases.num_heads = 4"],
            "T5X's RelativePositionBiases.num_heads is NUM_HEADS.\n",
        ),
        (
            "train",
            [TINY, "--model_dir=x", "--gin_param=train/eval_period = 4"],
            "T5X's train.eval_period is Experiment.eval_interval\n",
        ),
        (
            "plan",
            [TINY, "--gin_param=SentencePieceVocabulary.sentencepiece_model_file='m'"],
            "T5X's sentencepiece_model_file is 'model_file' here.\n",
        ),
        ("plan", [TINY, "--json_out=x"], "--json_out needs --topology"),
        ("plan", [TINY, "--search_batch=8"], "--search_batch needs --search"),
        ("export", [TINY, "--output=x", "--what=y"], "--what=y must be some of sav"),
    ],
)
def test_what_is_mistyped_is_said_without_tensorflow(name, arguments, message):
    done = call(name, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"meshwright-{name}: ")
    assert re.search(message, done.stderr)
    assert done.stdout == "imported:\n"


def test_what_is_there_in_place_of_a_run_to_evaluate_is_named(tmp_path):
    (tmp_path / "logs/second/checkpoints/300").mkdir(parents=True)
    second = f"{tmp_path}/logs/second"
    (tmp_path / "t5x/checkpoint_10").mkdir(parents=True)
    (tmp_path / "t5x/checkpoint_10/checkpoint").touch()
    for name, message in (
        ("logs", f"train first; runs in {tmp_path}/logs: second\n"),
        ("logs/second/checkpoints", f"first; the run's own folder is {second}\n"),
        ("logs/second/checkpoints/300", f"it is step 300 of the run {second}\n"),
        ("t5x", f"{tmp_path}/t5x has checkpoints of T5X or TensorFlow, to start from"),
    ):
        done = call("train", TINY, f"--model_dir={tmp_path / name}", "--mode=eval")
        assert message in done.stderr


def test_a_file_that_imports_is_left_to_the_real_check(tmp_path):
    (tmp_path / "mine.gin").write_text("import my_missing.module\nMine.width = 3\n")
    done = call("plan", f"--gin_file={tmp_path / 'mine.gin'}")
    assert done.returncode == 1
    assert "No module named 'my_missing'" in done.stderr
    assert done.stdout == "imported: jax numpy tensorflow\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "from __gin__ import dynamic_registration",
            "take it out, .*praxis.md says mo",
        ),
        (
            "import t5x.models",
            "No module named 't5x'.*praxis.md lists what",
        ),
        (
            "from seqio import vocabularies",
            "No module named 'seqio'.*praxis.md lists what",
        ),
    ],
)
def test_what_files_of_t5x_import_is_told_where_it_is_explained(line, message):
    with pytest.raises(config.ConfigError) as error:
        config.load([], [line])
    assert re.search(f"(?s){message}", str(error.value))


def names(registry):
    ours = {name: e for name, e in registry.items() if name.startswith("meshwr")}
    return {
        name: sorted(inspect.signature(entry.wrapped).parameters)
        for name, entry in ours.items()
    }


def test_stand_ins_have_the_names_of_what_they_stand_for(monkeypatch):
    import meshwright.layers
    import meshwright.tasks  # noqa: F401 (both register what gin files name)
    from meshwright.trainers.experiment import experiment  # noqa: F401

    wanted = names(dict(gin.config._REGISTRY.items()))
    constants = {name for name, _ in gin.config._CONSTANTS.items()}
    for name in ("_REGISTRY", "_CONSTANTS"):
        empty = gin.config._REGISTRY.copy()
        empty.clear()
        monkeypatch.setattr(gin.config, name, empty)
    monkeypatch.setattr(gin.config, "_INVERSE_REGISTRY", {})
    stand_ins.register()
    assert len(wanted) > 50
    parameters = {f"{n.rpartition('.')[2]}.{p}" for n, ps in wanted.items() for p in ps}
    hints = [*of_t5x._CLASSES.values(), *of_t5x._MACROS_IN_WORDS.values()]
    named = re.findall(r"(?<!%)\b((?:[A-Z]\w+|[a-z]+_layer)\.\w+)", " ".join(hints))
    assert set(named) <= parameters
    assert names(dict(gin.config._REGISTRY.items())) == wanted
    ours = {name for name in constants if name.startswith("meshwright.")}
    assert {name for name, _ in gin.config._CONSTANTS.items()} == ours
    assert set(config.DTYPES) <= {name.rpartition(".")[2] for name in ours}
