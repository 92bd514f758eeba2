"""Step times of Keras's `fit`, on one device and on a mesh, and of our own layers.

    python benchmarks/step_times/keras_fit.py [--settings=tiny,large]
      [--meshes=1x1,2x4] [--layouts=data,tensor] [--rounds=3] [--steps=N]

All programs train the same Transformer: the size of `lm/stdlib_tiny.gin`, with layer
norms and without positions, as Keras's layers have them. It is made of Keras's layers
and trained by `fit`, as it is and after `mw.keras.distribute`; and of our layers,
trained by the trainer's step program with the plan that the layout stands for. Initial
weights, tokens and optimizer are the same, and each call makes one step and reports
its loss.

Each program has a process of its own; those of a mesh take turns, so that other load of
the machine meets them alike. A ratio is the time of `fit` on a mesh over another's in
the same round; the table has medians over rounds. Programs that do not train alike are
not compared.

Dims: B batch, S sequence, M model, V vocabulary, L layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import interleave
import numpy as np
from absl import app, flags

FIT = "fit"
LABELS = {
    FIT: "fit on the mesh",
    "layers": "our layers",
    "keras": "Keras's fit",
}
"""The variants, and their names in the table; Keras's own is on one device."""
CHECKED_STEPS = 4
LOSS_TOLERANCE = 1e-4  # Relative.
PLANS = {"data": "plans/data_2d.gin", "tensor": "plans/data_tensor.gin"}
"""The sharding plans of the trainer, by the layout that says the same."""
COMMON = (
    "LanguageModel.final_norm = @LayerNorm()",
    "LayerNorm.model_dims = %MODEL_DIMS",
    "transformer_layer.norm = @LayerNorm",
    "transformer_layer.positions = %PositionKind.NONE",
    "Adam.learning_rate = 0.001",
    "Experiment.steps_per_loop = 1",
    'Experiment.weight_update_sharding = "off"',
)
"""Bindings that make our model and optimizer those that Keras has too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A size of the model.

    Args:
      bindings: bindings that override those of `lm/stdlib_tiny.gin`.
      steps: steps of an epoch, which is a turn.
    """

    bindings: Sequence[str] = ()
    steps: int


SETTINGS = {
    "tiny": Setting(steps=10),
    # About a second per step on one device of two cores.
    "large": Setting(
        bindings=(
            "MODEL_DIMS = 512",
            "HIDDEN_DIMS = 2048",
            "NUM_HEADS = 8",
            "HEAD_DIM = 64",
            "NUM_LAYERS = 6",
            "Experiment.global_batch = 8",
        ),
        steps=3,
    ),
    # For the test of this file.
    "smallest": Setting(
        bindings=(
            "MODEL_DIMS = 16",
            "HIDDEN_DIMS = 32",
            "HEAD_DIM = 4",
            "NUM_LAYERS = 2",
            "SEQUENCE_LENGTH = 16",
            "Experiment.global_batch = 8",
        ),
        steps=2,
    ),
}


def worker(
    variant: str, setting: str, mesh: str, layout: str, steps: int
) -> interleave.Served:
    """One of the programs, after its first steps."""
    import jax
    import keras
    import tensorflow as tf

    from meshwright import framework as mw

    mw.set_platform("cpu", math.prod(map(int, mesh.split("x"))))
    trained = train(variant, step_programs(setting, mesh, layout), layout, steps)
    facts = {
        "losses": trained.losses,
        "weights": trained.weights,
        "versions": {
            "tensorflow": tf.__version__,
            "jax": jax.__version__,
            "Keras": keras.__version__,
        },
    }
    return interleave.Served(facts=facts, call=trained.epoch, steps=steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A program after its first steps.

    Args:
      losses: the losses of these.
      weights: the number of the model's weights.
      epoch: makes the steps of a turn.
    """

    losses: Sequence[float]
    weights: int
    epoch: Callable[[], Any]


def train(variant: str, programs: Any, layout: str, steps: int) -> Trained:
    """Makes the first steps of a program."""
    tokens = random_tokens(programs, steps)
    if variant == "layers":
        return of_layers(programs, tokens, steps)
    return of_keras(programs, layout if variant == FIT else None, tokens, steps)


def step_programs(setting: str, mesh: str, layout: str) -> Any:
    """The trainer's programs for our layers."""
    from meshwright.trainers.cli import build_experiment
    from meshwright.trainers.experiment.step_programs import StepPrograms

    shape = f"MESH_SHAPE = ({mesh.replace('x', ', ')})"
    experiment, _ = build_experiment(
        ["lm/stdlib_tiny.gin", PLANS[layout]],
        [*COMMON, *SETTINGS[setting].bindings, shape],
    )
    return StepPrograms(experiment)


def random_tokens(programs: Any, steps: int) -> np.ndarray:
    """Inputs and labels of some batches: [2, steps, B, S]."""
    random = np.random.default_rng(0)
    _, B, S = programs.abstract_batches().ids.shape
    vocab_size = programs.experiment.task.text.vocab_size
    size = [max(steps, CHECKED_STEPS), B, S + 1]
    tokens = random.integers(vocab_size, size=size, dtype=np.int32)
    return np.stack([tokens[..., :-1], tokens[..., 1:]])


def of_layers(programs: Any, tokens: np.ndarray, steps: int) -> Trained:
    """Our layers, by the trainer's step program."""
    from meshwright.framework.nested_map import NestedMap
    from meshwright.trainers.experiment.state import TrainState

    state = TrainState.initial(programs)

    def train(batches: np.ndarray) -> list[float]:
        losses = []
        for ids, labels in zip(*batches, strict=True):
            B, S = ids.shape
            given = NestedMap(
                ids=ids,
                labels=labels,
                segment_ids=np.ones([B, S], np.int32),
                segment_positions=np.tile(np.arange(S, dtype=np.int32), [B, 1]),
                weights=np.ones([B, S], np.float32),
            )
            out = programs.main(state.stored(), given.map(lambda x: x[None]))
            state.update(out["state"])
            losses.append(float(np.asarray(out["metrics"].loss)[0]))
        return losses

    return Trained(
        losses=train(tokens[:, :CHECKED_STEPS]),
        weights=sum(math.prod(spec.shape) for spec in programs.weights.leaves()),
        epoch=lambda: train(tokens[:, :steps]),
    )


def of_keras(
    programs: Any, layout: str | None, tokens: np.ndarray, steps: int
) -> Trained:
    """Keras's layers, by `fit`: on the plan's mesh if a layout is given."""
    import keras
    import tensorflow as tf

    from meshwright import framework as mw

    theta = programs.init.unshard(programs.init(programs.seed())).theta
    optimizer = programs.experiment.optimizer
    model = keras_model(programs.experiment.task)
    assign(model, theta)
    if layout is not None:
        mw.keras.distribute(model, programs.experiment.plan.mesh, layout)
    model.compile(
        keras.optimizers.Adam(
            float(optimizer.learning_rate(tf.constant(0))),
            epsilon=optimizer.epsilon,
            global_clipnorm=optimizer.clip_global_norm,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )

    def train(batches: np.ndarray, callbacks: Sequence[Any] = ()) -> None:
        x, y = batches.reshape(2, -1, batches.shape[-1])
        B = batches.shape[2]
        model.fit(x, y, B, verbose=0, shuffle=False, callbacks=[*callbacks])

    sums = [0.0]
    note = keras.callbacks.LambdaCallback(
        # Keras reports the mean of the losses so far.
        on_train_batch_end=lambda step, logs: sums.append(logs["loss"] * (step + 1))
    )
    train(tokens[:, :CHECKED_STEPS], [note])
    return Trained(
        losses=np.diff(sums).tolist(),
        weights=model.count_params(),
        epoch=lambda: train(tokens[:, :steps]),
    )


def keras_model(task: Any) -> Any:
    """The Transformer of a language model's task, of Keras's layers."""
    import keras

    L, body = task.stack.num_layers, task.stack.body
    M, V = task.embedding.model_dims, task.embedding.vocab_size
    heads, size = body.attention.num_heads, body.attention.head_dim
    hidden, epsilon = body.feed_forward.hidden_dims, task.final_norm.epsilon
    layers = keras.layers

    class Transformer(keras.Model):
        """Pre-norm, causal, with one table for embedding and softmax."""

        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(V, M)
            self.blocks = [
                {
                    "attention_norm": layers.LayerNormalization(epsilon=epsilon),
                    "attention": layers.MultiHeadAttention(heads, size, use_bias=False),
                    "feed_forward_norm": layers.LayerNormalization(epsilon=epsilon),
                    "w_in": layers.Dense(hidden, "relu", use_bias=False),
                    "w_out": layers.Dense(M, use_bias=False),
                }
                for _ in range(L)
            ]
            self.final_norm = layers.LayerNormalization(epsilon=epsilon)

        def call(self, ids):
            x = self.embedding(ids) * M**0.5
            for block in self.blocks:
                h = block["attention_norm"](x)
                x += block["attention"](h, h, use_causal_mask=True)
                h = block["feed_forward_norm"](x)
                x += block["w_out"](block["w_in"](h))
            table = keras.ops.transpose(self.embedding.embeddings)
            return keras.ops.matmul(self.final_norm(x), table)

    model = Transformer()
    model(np.zeros([1, task.text.sequence_length], np.int32))
    return model


def assign(model: Any, theta: Any) -> None:
    """Gives a model of `keras_model` the weights of our layers."""

    def norm(theta, number=...):
        return [theta.scale[number], theta.bias[number]]

    model.embedding.set_weights([theta.embedding.table])
    model.final_norm.set_weights(norm(theta.final_norm))
    for number, block in enumerate(model.blocks):
        of = theta.stack
        block["attention_norm"].set_weights(norm(of.attention_norm, number))
        block["feed_forward_norm"].set_weights(norm(of.feed_forward_norm, number))
        attention = [of.attention[f"w_{name}"][number] for name in "qkvo"]
        block["attention"].set_weights(_in_order(block["attention"], attention))
        for name in ("w_in", "w_out"):
            block[name].set_weights([of.feed_forward[name][number]])


def _in_order(attention: Any, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The weights of query, key, value and output, as Keras's layer lists them."""
    kernels = [
        getattr(attention, f"{name}_dense").kernel
        for name in ("query", "key", "value", "output")
    ]
    by_id = {id(k): weight for k, weight in zip(kernels, weights, strict=True)}
    return [by_id[id(kernel)] for kernel in attention.weights]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The measurements of one setting on one mesh.

    Args:
      turns: turns of each program, by round; a program is a variant and a layout.
      loss_difference: the largest relative difference between losses.
      weights: the number of weights of each program's model.
      versions: versions of the libraries.
    """

    turns: Mapping[tuple[str, str], Sequence[interleave.Turn]]
    loss_difference: float
    weights: int
    versions: Mapping[str, str]


def programs_of(mesh: str, layouts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The programs to compare on a mesh: variants and layouts."""
    # On one device all layouts are the same.
    for layout in layouts[:1] if mesh == "1x1" else layouts:
        yield FIT, layout
        yield "layers", layout
    if mesh == "1x1":
        yield "keras", layouts[0]


def compare(
    setting: str, mesh: str, layouts: Sequence[str], rounds: int, steps: int | None
) -> Comparison:
    """Starts a worker for each program, checks that they train alike, times them.

    Raises:
      ValueError: losses or numbers of weights differ.
      RuntimeError: a worker ended.
    """
    steps = steps or SETTINGS[setting].steps
    programs = [*programs_of(mesh, layouts)]
    with contextlib.ExitStack() as stack:
        workers = []
        for variant, layout in programs:
            command = [sys.executable, __file__, f"--worker={variant}"]
            command += [f"--settings={setting}", f"--meshes={mesh}"]
            command += [f"--layouts={layout}", f"--steps={steps}"]
            name = f"{variant}, {setting}, {mesh}, {layout}"
            workers.append(stack.enter_context(interleave.Worker(name, command)))
        facts = {p: w.facts() for p, w in zip(programs, workers, strict=True)}
        difference = interleave.loss_difference(
            {" ".join(p): fact["losses"] for p, fact in facts.items()}, LOSS_TOLERANCE
        )
        (weights, *others) = {fact["weights"] for fact in facts.values()}
        if others:
            raise ValueError(f"models of {weights} and {others[0]} weights")
        turns = interleave.take_turns(workers, rounds=rounds, steps=steps)
    return Comparison(
        turns=dict(zip(programs, turns, strict=True)),
        loss_difference=difference,
        weights=weights,
        versions=facts[programs[0]]["versions"],
    )


_CLOCKS = f"{'CPU':>7}  {'wall':>7}"
HEADER = f"""\
{"":38}  {"seconds a step":^16}  {"fit / program":^16}
{"setting":9}{"mesh":6}{"layout":8}{"program":15}  {_CLOCKS}  {_CLOCKS}
{"-" * 74}"""


def table_rows(setting: str, mesh: str, comparison: Comparison) -> list[str]:
    """The lines below `HEADER` for one comparison: medians."""
    rows = []
    for (variant, layout), turns in comparison.turns.items():
        start = [setting, mesh] if not rows else ["", ""]
        is_fit = variant == FIT
        label = f"{start[0]:9}{start[1]:6}{layout if is_fit else '':8}"
        label += f"{LABELS[variant]:15}"
        first = None if is_fit else comparison.turns[FIT, layout]
        rows.append(interleave.table_row(label, turns, first))
    return rows


def main(argv: Sequence[str]) -> None:
    """Measures and prints."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    for values, known in (
        (flags.FLAGS.settings, SETTINGS),
        (flags.FLAGS.layouts, PLANS),
    ):
        for name in set(values) - set(known):
            raise app.UsageError(f"unknown {name!r}: one of {[*known]}")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if flags.FLAGS.worker:
        parts = [flags.FLAGS[f].value[0] for f in ("settings", "meshes", "layouts")]
        interleave.serve(lambda: worker(flags.FLAGS.worker, *parts, flags.FLAGS.steps))
        return
    difference = None
    for setting in flags.FLAGS.settings:
        for mesh in flags.FLAGS.meshes:
            try:
                comparison = compare(
                    setting,
                    mesh,
                    flags.FLAGS.layouts,
                    flags.FLAGS.rounds,
                    flags.FLAGS.steps,
                )
            except (RuntimeError, ValueError) as error:
                sys.exit(f"keras_fit.py: {error}")
            if difference is None:
                rounds = flags.FLAGS.rounds
                print(interleave.conditions(comparison.versions, rounds))
                print(HEADER)
            difference = max(difference or 0.0, comparison.loss_difference)
            rows = table_rows(setting, mesh, comparison)
            print(*rows, f"  {comparison.weights} weights", sep="\n", flush=True)
    print(f"Losses of the first {CHECKED_STEPS} steps agree within {difference:.0e}.")


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 3, "Turns of each program.", lower_bound=1)
    flags.DEFINE_integer("steps", None, "Steps of a turn.", lower_bound=1)
    flags.DEFINE_list("settings", ["tiny", "large"], "Sizes of the model.")
    flags.DEFINE_list("meshes", ["1x1", "2x4"], "Meshes of CPU devices.")
    flags.DEFINE_list("layouts", [*PLANS], "Layouts of the weights.")
    flags.DEFINE_enum("worker", None, [*LABELS], "For this program itself.")
    app.run(main)
