"""Checks gin files and bindings before anything that they name is imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import gin

from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings import stand_ins
from meshwright.trainers.experiment.bindings.gin_messages import OF_YOURS


class _ImportMet(BaseException):  # noqa: N818 (no error, and none to catch as such)
    """A file imports a module, which may register anything."""


def check(gin_files: Sequence[str], gin_params: Sequence[str]) -> None:
    """Detects files that do not exist, unknown names, and names that nothing refers to.

    The check takes a fraction of a second, where TensorFlow takes many to import;
    `config.load` checks again what it lets through. It ends at a file that imports a
    module, and is left out where TensorFlow is imported already.

    Raises:
      ConfigError: as `config.load` raises it.
    """
    if "tensorflow" in sys.modules:
        return
    for path in gin_files:
        config.find_gin_file(path)
    with contextlib.ExitStack() as stack:
        for name in ("_REGISTRY", "_INVERSE_REGISTRY", "_CONSTANTS"):
            copy = getattr(gin.config, name).copy()
            stack.enter_context(config.in_place(gin.config, name, copy))
        stack.enter_context(
            config.in_place(gin.config.ParseContext, "process_import", _stop)
        )
        stack.callback(gin.clear_config)
        stand_ins.register()
        with contextlib.suppress(_ImportMet):
            try:
                config.load(gin_files, gin_params)
            except config.ConfigError as error:
                if OF_YOURS in str(error):  # The real classes say which ones fit.
                    return
                raise
            # Where one is missing, what is missing is the better message.
            if {"task", "plan", "optimizer"} <= config.bound_parameters("Experiment"):
                config.check_all_referred("Experiment")


def _stop(context, statement):
    raise _ImportMet
