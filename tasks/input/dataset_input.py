"""Any `tf.data.Dataset` as a task's input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gin
import tensorflow as tf

from meshwright.framework.modeling.checks import bounded
from meshwright.framework.nested_map import NestedMap, as_key
from meshwright.tasks.input.batched_input import BatchedInput, Resume, read_ahead
from meshwright.tasks.input.example_order import SEEDS, BatchRows

ROW_WEIGHTS = "row_weights"
"""The name of what tells examples, 1, from rows that fill up a batch, 0."""
OF_DATASET = "the dataset of"
"""What begins the name of a pipeline's description in a fingerprint."""

_READY_BATCHES = 2
_NAMES = ("x", "y", "sample_weight")


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetInput(BatchedInput):
    """Batches of the examples of a `tf.data.Dataset`.

    A batch has the tensors of an example: by name if examples are dicts; if they are
    tuples, as those for Keras's `fit`, `x`, `y` and `sample_weight`; else `x`. In
    addition it has `row_weights`, float32 [rows]: 0 for rows that fill up the last
    batch of held-out examples, else 1.

    Training starts another pass when the examples end. All processes have to read the
    same examples in the same order. `tf.data` has them in order, and its random numbers
    follow `seed` where they have no other seed, those of ops in a parallel `map` too;
    your function has to seed Python's random numbers.

    The functions are called when the input is made, and for each pass; before them
    TensorFlow's global seed is set.

    Args:
      train: a function without arguments that returns the examples for training, as a
        `tf.data.Dataset` that is not batched.
      held_out: the same for evaluation; None for none.
      seed: of random numbers of the datasets.
      resume: where a resumed run continues in the examples for training.
        `Resume.STEP` reads what comes before and skips it; `Resume.STATE` keeps the
        state of `tf.data`'s iterator with each checkpoint, with all that is in buffers
        of `shuffle`; `Resume.ANEW` begins a new pass, with other random numbers.

    Raises:
      ValueError: a function is none, or returns no dataset of examples of known shapes;
        held-out examples are not like those for training; the examples for training
        come from a `tf.data` service, which begins anew, and `resume` is another.
    """

    is_by_number: ClassVar[bool] = False
    _held_out_hint: ClassVar[str] = ""
    """For the message on held-out examples unlike those for training."""

    train: Callable[[], tf.data.Dataset]
    held_out: Callable[[], tf.data.Dataset] | None = None
    seed: int = bounded(0, **SEEDS)
    resume: Resume = Resume.STEP

    def __post_init__(self):
        super().__post_init__()
        for name in ("train", "held_out"):
            value = getattr(self, name)
            if not callable(value) and (name == "train" or value is not None):
                raise ValueError(
                    f"{self._name}.{name} is {value!r}; it must be a function that "
                    "returns a tf.data.Dataset (in gin @function, without brackets)"
                )
        # Now, so that gin sees that the functions' bindings take effect.
        train, held_out = self._examples("train"), self._examples("held_out")
        if held_out is not None and held_out.element_spec != train.element_spec:
            raise ValueError(
                f"{self._name}.held_out and {self._name}.train return examples that "
                "differ: give both the same tensors, of the same shapes and kinds "
                "(.unbatch() undoes .batch())"
                f"{self._held_out_hint}\nheld_out:{_lines(held_out, train)}\n"
                f"train:{_lines(train, held_out)}"
            )
        object.__setattr__(self, "_structure", train.element_spec)
        object.__setattr__(self, "_description", _description(train))

    def element_spec(self, batch: int | None) -> NestedMap:
        return batch_spec(self.structure, batch)

    @property
    def _name(self) -> str:
        """The class's, for messages: of a subclass too."""
        return type(self).__name__

    @property
    def structure(self) -> Any:
        """An example as its function makes it: a `tf.TensorSpec` for each tensor."""
        return self._structure

    def fingerprint(self) -> dict[str, str | int]:
        return {
            f"{self._name}.train": getattr(self.train, "__name__", "a function"),
            f"{self._name}.seed": self.seed,
            f"{OF_DATASET} {self._name}.train": self._description,
        }

    def _examples(self, field: str, seed: int | None = None) -> tf.data.Dataset | None:
        """What a function returns; None if there is no function.

        Raises:
          ValueError: it is no dataset of examples of known shapes.
        """
        if getattr(self, field) is None:
            return None
        # For ops of the dataset without seeds.
        tf.random.set_seed(self.seed if seed is None else seed)
        examples = getattr(self, field)()
        name = f"{self._name}.{field}"
        if not isinstance(examples, tf.data.Dataset):
            raise ValueError(
                f"{name} returns {type(examples).__name__}; it must return a "
                "tf.data.Dataset of examples"
            )
        if (
            field == "held_out"
            and examples.cardinality() == tf.data.INFINITE_CARDINALITY
        ):
            raise ValueError(
                f"{name} returns a dataset without end: leave out .repeat()"
            )
        if ROW_WEIGHTS in named(examples.element_spec):
            raise ValueError(
                f"{name}: examples have a {ROW_WEIGHTS!r}, which is the name of what "
                "tells examples from rows of padding: call it otherwise"
            )
        if examples.cardinality() == 0:
            raise ValueError(f"{name} returns an empty dataset: there is nothing in it")
        for path, leaf in named(examples.element_spec).items_by_path():
            if not isinstance(leaf, tf.TensorSpec) or leaf.dtype == tf.string:
                raise ValueError(
                    f"{name}: {path} of an example is {_line(leaf)}, which no device "
                    "takes: map it to tensors of numbers"
                )
            if not leaf.shape.is_fully_defined():
                raise ValueError(
                    f"{name}: {path} of an example has shape {leaf.shape}: have the "
                    "dataset return single examples (.unbatch() undoes .batch()), "
                    "padded to a fixed shape (.map with tf.ensure_shape tells it)"
                )
        if field == "train" and self.resume is not Resume.ANEW:
            _check_resumes(examples, self.resume, self._name)
        return _in_order(examples)

    def _named(self, field: str, seed: int | None = None) -> tf.data.Dataset:
        # Made anew: each pass over one dataset may be in another order.
        examples = self._examples(field, seed)
        is_tuple = isinstance(examples.element_spec, tuple)
        return examples.map(lambda *parts: named(parts if is_tuple else parts[0]))

    def train_batches(
        self, start_step: int, *, global_batch: int, rows: range
    ) -> tf.data.Dataset:
        """As of `BatchedInput`, but from the first on unless `resume` is by step."""
        given = BatchRows(global_batch, rows)
        # A new pass has an order of its own: after many restarts too, all is read.
        is_anew = self.resume is Resume.ANEW
        seed = (self.seed + start_step) % SEEDS["below"] if is_anew else None
        examples = self._named("train", seed).repeat()
        batches = examples.batch(global_batch, drop_remainder=True)
        if self.resume is Resume.STEP:
            batches = batches.skip(start_step)
        return _of_rows(batches, given)

    def held_out_batches(
        self, *, global_batch: int, rows: range, max_batches: int | None = None
    ) -> tf.data.Dataset:
        """As of `BatchedInput`, but `max_batches` are the first ones.

        Raises:
          ValueError: the rows are not of a batch of that size, or there are no held-out
            examples.
        """
        given = BatchRows(global_batch, rows)
        if self.held_out is None:
            raise ValueError(
                f"{self._name}.held_out is not set, and there is no evaluation without "
                "it: set it, or train with --mode=train"
            )
        examples = self._named("held_out")
        batches = examples.batch(global_batch).map(lambda b: _filled(b, global_batch))
        if max_batches is not None:
            batches = batches.take(max_batches)
        return _of_rows(batches, given)


def _check_resumes(examples: tf.data.Dataset, resume: Resume, name: str) -> None:
    """Checks that a run can find its place again in the examples for training."""
    if any(kind.startswith("_DataService") for kind in _kinds(examples)):
        raise ValueError(
            f"{name}.train reads from a tf.data service, which keeps no state and "
            f"no order from which a run could resume, and {name}.resume is "
            f"Resume.{resume.name}: set it to %Resume.ANEW, and a run that resumes "
            "begins a new pass"
        )


def _kinds(examples: tf.data.Dataset) -> list[str]:
    """The class of a dataset, and of those that it is made of."""
    # The graph would say so too, but a copy of what is in memory is in it.
    inner = [kind for dataset in examples._inputs() for kind in _kinds(dataset)]
    return [type(examples).__name__, *inner]


def _description(examples: tf.data.Dataset) -> str:
    """What can be said of a dataset without reading it."""
    count = int(examples.cardinality())
    return f"{count} x {examples.element_spec}: {', '.join(_kinds(examples))}"


def _in_order(examples: tf.data.Dataset) -> tf.data.Dataset:
    """The examples in an order, and with random numbers, that are always the same."""
    options = tf.data.Options()
    options.deterministic = True
    examples = examples.with_options(options)
    # A parallel map keeps its examples in order, but its random ops, and other ops with
    # a state, run in any. This rewrite has them run in turn, and the rest in parallel.
    # By itself TF makes it only in a process all of whose ops are to be deterministic.
    leaves = tf.nest.flatten(examples.element_spec)
    rewritten = tf.raw_ops.OptimizeDatasetV2(
        input_dataset=tf.data.experimental.to_variant(examples),
        optimizations_enabled=["make_deterministic"],
        optimizations_disabled=[],
        optimizations_default=[],
        output_types=[leaf.dtype for leaf in leaves],
        output_shapes=[leaf.shape for leaf in leaves],
    )
    return tf.data.experimental.from_variant(rewritten, examples.element_spec)


def named(example: Any) -> NestedMap:
    """An example, or its specs, by name.

    Raises:
      ValueError: it is a tuple of more than three, or two names are alike.
    """
    if isinstance(example, Mapping):
        return NestedMap(_by_name(example))
    parts = example if isinstance(example, tuple) else (example,)
    if len(parts) > len(_NAMES):
        raise ValueError(
            f"an example is a tuple of {len(parts)}: give the model's input, labels "
            "and weights at most, or a dict"
        )
    return NestedMap(_by_name(dict(zip(_NAMES, parts, strict=False))))


def batch_spec(structure: Any, batch: int | None) -> NestedMap:
    """The `tf.TensorSpec` of each tensor in a batch of examples.

    Args:
      structure: of an example, with a `tf.TensorSpec` for each tensor.
      batch: the number of rows.
    """
    spec = named(structure).map(
        lambda leaf: tf.TensorSpec([batch, *leaf.shape], leaf.dtype)
    )
    spec[ROW_WEIGHTS] = tf.TensorSpec([batch], tf.float32)
    return spec


def unnamed(batch: NestedMap, structure: Any) -> tuple:
    """The tensors of a batch as a tuple of parts that have an example's structure.

    Args:
      batch: named tensors.
      structure: an example that `named` has named.
    """
    if isinstance(structure, Mapping):
        return (_structured(batch, structure),)
    parts = structure if isinstance(structure, tuple) else (structure,)
    return tuple(
        _structured(batch[name], part)
        for name, part in zip(_NAMES, parts, strict=False)
    )


def _lines(examples: tf.data.Dataset, others: tf.data.Dataset) -> str:
    """A line for each tensor of examples that others have otherwise, or not at all."""
    lines, theirs = (
        {path: f"\n  {path}: {_line(leaf)}" for path, leaf in of.items_by_path()}
        for of in (named(each.element_spec) for each in (examples, others))
    )
    differ = [line for path, line in lines.items() if theirs.get(path) != line]
    return "".join(differ) or " nothing else"


def _line(leaf: Any) -> str:
    is_tensor = isinstance(leaf, tf.TensorSpec)
    return f"{leaf.dtype.name} {leaf.shape}" if is_tensor else str(leaf)


def _by_name(value: Any) -> Any:
    parts = _parts(value)
    if parts is None:
        return value
    out = {as_key(key): _by_name(part) for key, part in parts.items()}
    if len(out) < len(parts):
        raise ValueError(f"some of the names {list(parts)} of an example are alike")
    return out


def _structured(tensors: Any, structure: Any) -> Any:
    parts = _parts(structure)
    if parts is None:
        return tensors
    out = {key: _structured(tensors[as_key(key)], v) for key, v in parts.items()}
    return out if isinstance(structure, Mapping) else list(out.values())


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """The parts of a dict, tuple or list by name; None for a leaf."""
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, (tuple, list)) else None


def _filled(batch: NestedMap, rows: int) -> NestedMap:
    """A batch filled up with rows of zeros, whose weights are 0."""
    count = tf.shape(batch.leaves()[0])[0]

    def fill(leaf: tf.Tensor) -> tf.Tensor:
        rest = [[0, 0]] * (leaf.shape.rank - 1)
        filled = tf.pad(leaf, [[0, rows - count], *rest])
        return tf.ensure_shape(filled, [rows, *leaf.shape[1:]])

    filled = batch.map(fill)
    filled[ROW_WEIGHTS] = tf.cast(tf.range(rows) < count, tf.float32)
    return filled


def _of_rows(batches: tf.data.Dataset, rows: BatchRows) -> tf.data.Dataset:
    """The rows of each batch that are read here."""

    def pick(batch: NestedMap) -> NestedMap:
        batch = NestedMap(batch)
        batch.setdefault(ROW_WEIGHTS, tf.ones([rows.global_batch]))
        if len(rows) == rows.global_batch:
            return batch
        return batch.map(lambda leaf: tf.gather(leaf, rows.within))

    return read_ahead(batches.map(pick), _READY_BATCHES)
