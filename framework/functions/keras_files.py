"""The files of Keras models on a mesh, written by one process for several."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import tensorflow as tf
from absl import logging

from meshwright.framework.compiler.xla.processes import check_same, do_together
from meshwright.framework.functions.layouts.layout import note_path, path_of
from meshwright.framework.functions.mesh_variable import silent_readers
from meshwright.framework.sharding.mesh import DeviceMesh

_WRITTEN_ONCE = ("save", "save_weights", "export")
_REFUSED = ("BackupAndRestore", "OrbaxCheckpoint")
_SAVED_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_LIBRARIES = ("keras.", "keras_hub.", "keras_rs.")


def check_model(model: Any) -> None:
    """Raises an error for what is no Keras model that can be on a mesh.

    Raises:
      TypeError: it is no Keras model of the TensorFlow backend.
      ValueError: it was made in the scope of a `tf.distribute` strategy.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        remedy = "for other TF programs use mw.function"
        if isinstance(model, DeviceMesh):
            remedy = "pass the model first, then the mesh"
        raise TypeError(
            f"mw.keras takes a Keras 3 model, not a {type(model).__module__}."
            f"{type(model).__name__}; {remedy}"
        )
    if keras.backend.backend() != "tensorflow":
        raise TypeError(
            f"{model.name} is a model of Keras's {keras.backend.backend()} backend; "
            "set KERAS_BACKEND=tensorflow before Keras is imported"
        )
    if model._distribute_strategy is not None:  # That it was made under.
        raise ValueError(under_strategy(model.name, model._distribute_strategy))


def variables_of(model: Any) -> list[tf.Variable]:
    """TF's variables of a Keras model and, once it is compiled, its optimizer.

    The model's come first.

    Raises:
      ValueError: one was made in the scope of a `tf.distribute` strategy.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *getattr(optimizer, "variables", ())]
    for variable in variables:
        if isinstance(variable._value, tf.distribute.DistributedValues):
            # A program takes its parts, which have neither its path nor its layout.
            strategy = variable._value.distribute_strategy
            raise ValueError(under_strategy(variable.path, strategy))
    return [note_path(variable) for variable in variables]


def is_built(model: Any) -> bool:
    """Whether all layers have their variables; `build` of a subclass may leave some."""
    return all(layer.built for layer in model._flatten_layers())


def are_of_keras(model: Any, variables: Sequence[tf.Variable]) -> bool:
    """Whether optimizer and metrics have variables, and all code is Keras's own.

    Code of a user may write to what it makes, or to a weight when it first runs: TF
    drops that with the first of two traces; with a single trace each step would do it.
    """
    layers = model._flatten_layers()  # The model is the first.
    if not all(type(layer).__module__.startswith(_LIBRARIES) for layer in layers):
        return False
    parts = [getattr(model, "optimizer", None), *model.metrics]
    of_keras, of_others = set(), set()
    for part in itertools.chain.from_iterable(map(_with_inner, parts)):
        is_own = type(part).__module__.startswith("keras.")
        held = of_keras if is_own else of_others
        held.update(id(variable._value) for variable in part.variables)
    return {id(variable) for variable in variables} <= of_keras - of_others


def _with_inner(part: Any) -> Iterator[Any]:
    """An optimizer or a metric, if any, and those inside it, as a user's in Keras's."""
    if part is None:
        return
    yield part
    held = getattr(part, "metrics", ()), getattr(part, "_metrics", ())
    for inner in (getattr(part, "inner_optimizer", None), *itertools.chain(*held)):
        yield from _with_inner(inner)


def under_strategy(what: str, strategy: tf.distribute.Strategy) -> str:
    """The message on what was made in the scope of a strategy."""
    return (
        f"{what} was made in the scope of a tf.distribute.{type(strategy).__name__}, "
        "which splits batches in place of the mesh: make the model, compile and fit it "
        "outside the scope"
    )


def share_files(model: Any) -> None:
    """Has several processes write a model's files once, and fail together.

    What would have each of them write a file is refused.
    """
    for name in (*_WRITTEN_ONCE, "load_weights"):
        _replace(model, name)
    _refuse_lone_writers(model)
    _check_callbacks(model)


def _replace(model: Any, name: str) -> None:
    """Has a method read or write in all processes together."""
    method = getattr(type(model), name)

    @functools.wraps(method)
    def together(*args: Any, **kwargs: Any) -> None:
        is_export = name == "export"
        with silent_readers() if is_export else _without_values():
            _together(
                model,
                f"{name} of {model.name}",
                functools.partial(method, model, *args, **kwargs),
                by_first=name in _WRITTEN_ONCE,
            )

    setattr(model, name, together)


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Leaves the values of a variable out of Keras's message on its shape."""
    try:
        yield
    except ValueError as error:
        text = re.sub(r", value=[^<>]*>", ">", str(error))
        if text == str(error):
            raise
        raise ValueError(text) from None


def _together(model: Any, what: str, do: Any, *, by_first: bool) -> None:
    """Reads or writes a file of a model's variables, in one process or several."""
    if jax.process_count() == 1:
        do()
        return
    check_same(what, {})
    variables = variables_of(model)
    for variable in variables:
        variable.numpy()  # Of which each process may have a part only.
    model._meshwright_writes = True
    try:
        do_together(what, do, by_first=by_first)
    finally:
        model._meshwright_writes = False
        gc.collect()  # Functions that were exported would read the variables.
        for variable in variables:
            # TF may have taken the handle where the file was written: then that process
            # alone would put the value onto the mesh anew.
            _ = variable.handle


def _refuse_lone_writers(model: Any) -> None:
    """Refuses Keras's functions that write a model's file in each process."""
    method = type(model).save_own_variables

    @functools.wraps(method)
    def save_own_variables(store: Any) -> None:
        if jax.process_count() > 1 and not getattr(model, "_meshwright_writes", False):
            raise RuntimeError(
                f"{model.name}: each of {jax.process_count()} processes would write "
                "the same file: call save, save_weights or export of the model that "
                "was distributed, as model.save(path), not keras.saving.save_model"
            )
        method(model, store)

    model.save_own_variables = save_own_variables


def _check_callbacks(model: Any) -> None:
    """Has `fit` look at the callbacks: those of several processes, and `backup`."""
    method = type(model).fit
    signature = inspect.signature(method)

    @functools.wraps(method)
    def fit(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(model, *args, **kwargs).arguments.get("callbacks")
        callbacks = tf.nest.flatten(getattr(given, "callbacks", given))
        if jax.process_count() > 1:
            for callback in callbacks:
                _check_callback(callback)
        wants_variables = any(hasattr(c, "wants_variables") for c in callbacks)
        is_building = wants_variables and not is_built(model)
        with _building(model) if is_building else contextlib.nullcontext():
            return method(model, *args, **kwargs)

    model.fit = fit


@contextlib.contextmanager
def _building(model: Any) -> Iterator[None]:
    """Has `fit` make all variables before its callbacks are called.

    Keras does so with other backends. No batch is read: that would change the order of
    those that follow, where a dataset shuffles.
    """
    begin = model._maybe_symbolic_build

    def build(iterator):
        model._maybe_symbolic_build = begin  # Once: callbacks may evaluate.
        begin(iterator=iterator)
        # Of a batch Keras takes shapes and dtypes alone.
        model._symbolic_build(data_batch=iterator._distributed_dataset.element_spec)

    model._maybe_symbolic_build = build
    try:
        yield
    finally:
        model._maybe_symbolic_build = begin


def end_at_once(model: Any) -> None:
    """Has `fit` and `evaluate` of arrays end with their last step.

    The thread with which TF tunes an input pipeline may miss that it is to end (TF
    2.21). It then sleeps on, up to as long as the pipeline has been there, the
    compilation of the first step included, and at most a minute. Keras's pipeline of
    arrays, which is a slice for each batch, does without the tuning.
    """
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    begin = type(model)._maybe_symbolic_build

    def untune(iterator=None, data_batch=None):
        dataset = getattr(iterator, "_distributed_dataset", None)
        of_arrays = isinstance(
            getattr(iterator, "data_adapter", None), ArrayDataAdapter
        )
        # In the scope of a strategy, which is refused below, it is of another kind.
        if of_arrays and isinstance(dataset, tf.data.Dataset):
            options = tf.data.Options()
            options.autotune.enabled = False
            iterator._distributed_dataset = dataset.with_options(options)
        begin(model, iterator=iterator, data_batch=data_batch)

    model._maybe_symbolic_build = untune


def shorten_tracebacks() -> None:
    """Has Keras leave frames of this folder out of tracebacks, as its own and TF's.

    They are between `fit` and the user's layer in each error of a trace.
    """
    from keras.src.utils import traceback_utils

    hidden, here = traceback_utils._EXCLUDED_PATHS, os.path.dirname(__file__)
    if here not in hidden:
        traceback_utils._EXCLUDED_PATHS = (*hidden, here)


def _check_callback(callback: Any) -> None:
    import keras

    for name in _REFUSED:
        if isinstance(callback, getattr(keras.callbacks, name)):
            raise ValueError(
                f"keras.callbacks.{name} in {jax.process_count()} processes: each "
                "would write and delete the same files: pass mw.keras.backup(folder)"
            )
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        folder = os.path.dirname(callback.filepath)
        if folder and "{" not in folder:
            # Keras fails where another process makes it in the same moment.
            tf.io.gfile.makedirs(folder)


def backup(folder: str | os.PathLike) -> Any:
    """A callback for `fit` that saves after each epoch, and goes on from there.

    In place of Keras's BackupAndRestore: the training may be killed at any moment, in
    the middle of a save too, and be one of several processes, which all see the folder.
    All variables of the model and its optimizer are saved, those of dropout's random
    numbers and the learning rate too; not what other callbacks keep. A backup stays
    when the training has ended: `fit` then has nothing to do, unless it is asked for
    more epochs.

    Args:
      folder: of this training alone; on a shared file system, or as "gs://...".

    Returns:
      The callback.

    Raises:
      TypeError: the folder is no path.
      NotADirectoryError: the folder is a file.
      ValueError: in `fit`: the model is neither built nor on a mesh; the backup is of
        other variables, by their number, shapes or dtypes; or it is damaged.
    """
    import keras

    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"mw.keras.backup: the folder is {folder!r}; pass its path, such as "
            "'backups/first'"
        )
    if tf.io.gfile.exists(folder) and not tf.io.gfile.isdir(folder):
        raise NotADirectoryError(
            f"mw.keras.backup: {os.fspath(folder)} is a file: pass a folder, "
            "which need not exist"
        )

    class Backup(keras.callbacks.Callback):
        wants_variables = True

        def on_train_begin(self, logs=None):
            self._backup = _Backup(self.model, os.fspath(folder))
            epoch = self._backup.restore()
            self.model._initial_epoch = epoch or None  # As by BackupAndRestore.
            if epoch >= self.params["epochs"]:
                logging.warning(
                    "%s has a training of %d epochs, and fit is to end after %d: "
                    "nothing is left to train, and the history of fit is empty; to "
                    "train on, pass more epochs, such as epochs=%d; for a new "
                    "training, pass another folder",
                    *(folder, epoch, self.params["epochs"], epoch + 1),
                )

        def on_epoch_begin(self, epoch, logs=None):
            self.model._initial_epoch = None  # Keras would keep it for the next `fit`.

        def on_train_end(self, logs=None):
            self.model._initial_epoch = None

        def on_epoch_end(self, epoch, logs=None):
            self._backup.save(epoch + 1)

    return Backup()


class _Backup:
    """The state of a training, in a folder.

    Args:
      model: the Keras model, built.
      folder: see `backup`.
    """

    def __init__(self, model: Any, folder: str):
        if not is_built(model):
            raise ValueError(
                f"{model.name} has no variables yet, which {folder} may have: call it "
                "once before fit, as model(x[:1]), or pass it to mw.keras.distribute, "
                "after which fit builds it"
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        metrics = {id(variable._value) for variable in model.metrics_variables}
        variables = [v for v in variables_of(model) if id(v) not in metrics]
        self._model = model
        self._folder = folder
        self._epoch = tf.Variable(0, dtype=tf.int64)
        self._variables = variables
        self._checkpoint = tf.train.Checkpoint(epoch=self._epoch, variables=variables)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, folder, max_to_keep=1
        )

    def restore(self) -> int:
        """Restores the newest backup; returns its epoch, 0 if there is none."""
        newest = self._manager.latest_checkpoint
        check_same(
            f"going on from the backup in {self._folder}",
            {"the newest": newest or "none"},
            remedy="all processes see the same files of one folder",
        )
        if newest is None:
            self._check_is_empty()
            return 0
        before = self._learning_rate()
        self._together("restoring", lambda: self._restore(newest), by_first=False)
        if before != (now := self._learning_rate()):
            logging.warning(
                "the learning rate is %g, that of the backup in %s, not %g",
                now,
                self._folder,
                before,
            )
        return int(self._epoch.numpy())

    def _check_is_empty(self) -> None:
        lost = tf.io.gfile.glob(os.path.join(self._folder, "ckpt-*.index"))
        if lost:
            raise ValueError(
                f"{self._folder} has backups, such as {os.path.basename(lost[0])}, but "
                "lacks the file 'checkpoint', which names the newest: bring it back "
                "from a copy, or pass another folder to mw.keras.backup"
            )

    def _learning_rate(self) -> float | None:
        """What is to be the learning rate; None if a schedule says so."""
        rate = self._model.optimizer._learning_rate
        return float(rate) if hasattr(rate, "assign") else None

    def _restore(self, newest: str) -> None:
        try:
            # First: TF may find a file damaged that is of another model.
            if difference := self._difference(tf.train.load_checkpoint(newest)):
                raise ValueError(difference)
            status = self._checkpoint.restore(newest)
            status.expect_partial().assert_existing_objects_matched()
            status.assert_consumed()
        except (IndexError, tf.errors.OpError) as error:
            raise ValueError(
                f"the backup {newest} is damaged: remove it to begin anew, or bring it "
                f"back from a copy ({error})"
            ) from error
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"{newest} is no backup of {self._model.name} and its optimizer as "
                "they are now: pass another folder to mw.keras.backup, or restore what "
                f"was changed ({error})"
            ) from error

    def _difference(self, backup: tf.train.CheckpointReader) -> str:
        """How the variables of a backup differ from those here; "" if they do not."""
        shapes = backup.get_variable_to_shape_map()
        dtypes = backup.get_variable_to_dtype_map()
        saved = {key: f"{dtypes[key].name} {shapes[key]}" for key in shapes}
        here = {
            f"variables/{i}{_SAVED_VALUE}": v for i, v in enumerate(self._variables)
        }
        count = sum(key.startswith("variables/") for key in saved)
        differences = []
        if count != len(here):
            differences.append(f"it has {count} variables, not {len(here)}")
        for key, variable in here.items():
            kind = f"{variable.dtype.name} {variable.shape.as_list()}"
            if key in saved and saved[key] != kind:
                path = path_of(variable)
                differences.append(f"{path} is {kind}, and {saved[key]} in it")
                break
        return "; ".join(differences)

    def save(self, epoch: int) -> None:
        """Saves the state after `epoch` epochs, in place of the backup before."""
        self._epoch.assign(epoch)
        self._together(
            f"saving epoch {epoch}",
            lambda: self._manager.save(checkpoint_number=epoch),
            by_first=True,
        )

    def _together(self, what: str, do: Any, *, by_first: bool) -> None:
        what = f"{what} of {self._model.name}, {self._folder}"
        _together(self._model, what, do, by_first=by_first)
