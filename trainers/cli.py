"""What the binaries share: flags, building the experiment, printing errors.

Neither this file nor `startup` imports TensorFlow or JAX before they are needed: what
is wrong with flags or bindings is said at once.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from absl import app, flags, logging

from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.bindings import gin_check
from meshwright.trainers.experiment.bindings.of_t5x import of_flag, of_value
from meshwright.trainers.experiment.bindings.outside_names import import_modules
from meshwright.trainers.startup import quiet
from meshwright.trainers.startup.messages import LogFormat, printable

if TYPE_CHECKING:
    from meshwright.trainers.experiment.experiment import Experiment

GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", None, "Gin file, by path or by its path under params/; may repeat."
)
GIN_PARAM = flags.DEFINE_multi_string(
    "gin_param", [], "A gin binding that overrides the files; may repeat."
)
IMPORT = flags.DEFINE_multi_string(
    "import",
    [],
    "Python module whose functions and classes gin files can name, such as my_models "
    "for @my_models.make_model; may repeat.",
)
STRICT = flags.DEFINE_bool(
    "strict",
    None,
    "Whether to stop rather than lay an op out otherwise at a cost or leave assertions "
    "unchecked; sets Experiment.strict. Default: as the gin files say.",
)
COMPILE_IN_CHILD = flags.DEFINE_bool(
    "compile_in_child",
    None,
    "Whether XLA compiles in a child process, whose end is an error that names the "
    "program; sets Experiment.compile_in_child. Default: as the gin files say.",
)
DEVICE_COUNT = flags.DEFINE_integer(
    "device_count", None, "Virtual devices on cpu; default: as many as the mesh has."
)
COMPILE_CACHE = flags.DEFINE_string(
    "compile_cache",
    None,
    "Folder to keep compiled programs in for the next start; off: nowhere. Default: "
    "meshwright/compiled in the user's cache, if one process runs by itself.",
)
TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where an error was raised.")

INTERRUPTED = 128 + signal.SIGINT
DOES_NOT_FIT = 3
"""Exit statuses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What a binary does once TensorFlow is imported.

    Args:
      run: takes the experiment and its configuration, and what `start` returned;
        returns the exit status.
      errors: what is told by its message alone, beside ValueError and OSError.
      start: called before anything is built.
    """

    run: Callable[..., int | None]
    errors: tuple[type[Exception], ...] = ()
    start: Callable[[], tuple] = tuple


def run(
    name: str,
    main: Callable[[list[str]], int | None],
    *,
    required: Mapping[str, str],
) -> None:
    """Runs a binary.

    Args:
      name: the binary's, for messages.
      main: takes what absl leaves of the arguments; returns the exit status.
      required: flags that must be given, with an example of each one's value.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            left = flags.FLAGS(argv)
            _check_given(required)
        except flags.Error as error:
            text = printable(_flag_error(error))
            sys.exit(f"{name}: {text}\n(--help lists the flags)")
        except SystemExit:  # By --help and its like, for which absl's status is 1.
            sys.exit(0)
        except BrokenPipeError:  # By --help, longer than what its reader took.
            quiet.drop_output()
            sys.exit(0)
        return left

    # --help shows the text and flags of the main module, which for a console script is
    # a file that has neither: this package's are the command's own.
    sys.modules["__main__"].__doc__ = sys.modules[main.__module__].__doc__
    for module, own in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("meshwright."):
            for flag in own:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    logging.set_verbosity(logging.INFO)
    app.run(main, flags_parser=parse)


def _check_given(required: Mapping[str, str]) -> None:
    """Refuses required flags without a value; `required` as for `run`."""
    for flag, example in required.items():
        value = flags.FLAGS[flag].value
        given = value if isinstance(value, list) else [value]
        if not given or not all(given):
            raise flags.Error(f"--{flag} is required, such as --{flag}={example}")


def _flag_error(error: flags.Error) -> str:
    """absl's message, in terms of the flag where it has Python's words for a number.

    A flag of T5X or Lingvo gets the one that stands for it here.
    """
    text = str(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        hint = of_flag(error.flagname, error.flagvalue)
        return (
            f"Unknown command line flag {error.flagname!r}\n  {hint}" if hint else text
        )
    if match := re.match(r"flag --(\w+)=(\w+): value should be one of", text):
        hint = of_value(match[1], match[2])
        return f"{text}\n  {hint}" if hint else text
    match = re.match(
        r"flag --(\w+)=(.*): (invalid literal|could not convert)", text, re.DOTALL
    )
    if match is None:
        return text
    kind = "whole number" if match[3] == "invalid literal" else "number"
    return f"--{match[1]} is {match[2]!r}; it must be a {kind}"


def gin_params() -> list[str]:
    """Bindings of the command line: those of --gin_param, then flags that make one."""
    bound = (STRICT, COMPILE_IN_CHILD)
    given = [flag for flag in bound if flag.value is not None]
    return [
        *GIN_PARAM.value,
        *(f"Experiment.{flag.name} = {flag.value}" for flag in given),
    ]


def build_experiment(
    gin_files: list[str], gin_params: list[str]
) -> tuple[Experiment, str]:
    """The experiment of gin files and bindings, and the configuration in effect.

    Raises:
      ConfigError: see `config.load_and_build`.
    """
    import meshwright.layers
    import meshwright.tasks  # noqa: F401 (both register what gin files name)
    from meshwright.trainers.experiment.experiment import Experiment

    experiment, unused = config.load_and_build(Experiment, gin_files, gin_params)
    for text in config.undone():
        logging.warning("%s", text)
    if unused:
        logging.info(
            "no effect, as later lines of the same file, or later parameters, replace "
            "what they are for; they can go: %s",
            ", ".join(unused),
        )
    return experiment, config.operative_text()


def call(
    name: str,
    argv: list[str],
    load: Callable[[], Command],
    *,
    check: Callable[[], object] = tuple,
) -> int | None:
    """Builds the experiment that the flags name and runs a command with it.

    Args:
      name: the command's, for messages.
      argv: what absl left over; there must be no arguments.
      load: imports the command, and TensorFlow with it.
      check: raises ValueError for flags that are wrong, before anything is imported.
    """
    logging.get_absl_handler().setFormatter(LogFormat())
    errors = ()
    sys.path.append(os.getcwd())  # Last: the user's modules hide no others.
    try:
        if len(argv) > 1:
            raise ValueError(
                f"unexpected argument {argv[1]!r}: give flags alone, as --NAME=VALUE"
            )
        check()
        if not IMPORT.value:  # Which may register anything.
            gin_check.check(GIN_FILE.value, gin_params())
        with quiet.importing_tensorflow() as is_new:
            command = load()
        import_modules(IMPORT.value)
        errors = command.errors
        started = command.start()
        if is_new:
            quiet.look_for_devices()
        return command.run(*build_experiment(GIN_FILE.value, gin_params()), *started)
    except (ValueError, OSError, *errors) as error:
        text = f"{name}: {printable(str(error))}\n(--traceback shows where)"
        if TRACEBACK.value:
            _leave_others(traceback.format_exc(), 1)
            raise
        _leave_others(text, 1)
        sys.exit(text)
    except KeyboardInterrupt:
        text = f"{name}: interrupted"
        _leave_others(text, INTERRUPTED)
        if TRACEBACK.value:
            raise
        print(text, file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        text = _of_bucket(error)
        if text and not TRACEBACK.value:
            text = f"{name}: {printable(text)}\n(--traceback shows where)"
            _leave_others(text, 1)
            sys.exit(text)
        _leave_others(traceback.format_exc(), 1)
        raise


_UNREACHED = (
    "Aborted",
    "FailedPrecondition",
    "NotFound",
    "PermissionDenied",
    "Unauthenticated",
    "Unavailable",
)
"""TensorFlow's errors on a file system that it cannot reach, or may not."""


def _of_bucket(error: Exception) -> str:
    """What to tell if TensorFlow cannot reach a path in a bucket, "" otherwise."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return ""
    kinds = tuple(getattr(tensorflow.errors, f"{name}Error") for name in _UNREACHED)
    if not isinstance(error, kinds):
        return ""
    path = re.search(r"\b(gs|s3|hdfs)://[^\s'\"]+", error.message)
    if path is None:
        return ""
    return (
        f"{path[0]} cannot be reached: check its name, the network, and the rights of "
        "your credentials, or take a folder on a disk. TensorFlow: "
        + " ".join(error.message.split())
    )


def _leave_others(text: str, status: int) -> None:
    """Ends this process, if it is one of several, with a text and an exit status.

    At exit JAX would wait for the others, which end too.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(status)
