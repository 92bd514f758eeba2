"""What meshwright-generate does once TensorFlow is imported."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from etils import epath

from meshwright.framework.compiler.xla.platforms import set_platform
from meshwright.framework.compiler.xla.processes import (
    check_takes_part,
    is_first_process,
)
from meshwright.framework.nested_map import NestedMap
from meshwright.layers.stacks.beams import BeamCaches
from meshwright.tasks.text.decoding import BeamSearch, Decoder, Sampling
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.tasks.text.translation import Translation
from meshwright.tasks.text.translation_input import TranslationInput
from meshwright.trainers import cli
from meshwright.trainers.checkpoints.checkpoint_manifest import (
    ArraySpec,
    check_model,
    config_changes,
)
from meshwright.trainers.checkpoints.checkpoints import (
    Access,
    CheckpointError,
    Checkpoints,
)
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.experiment.state import TrainState
from meshwright.trainers.experiment.step_programs import StepPrograms
from meshwright.trainers.processes import processes
from meshwright.trainers.processes.peers import PeerError
from meshwright.trainers.serving.generation import (
    INCOMPLETE,
    Continued,
    Generator,
    TooLongError,
    check_beams,
    check_prompt,
    language_model,
    text_after,
)
from meshwright.trainers.serving.translating import (
    Translator,
    check_source,
    for_translating,
    target_language,
)
from meshwright.trainers.startup import compile_cache, files, generate_flags, quiet
from meshwright.trainers.startup.messages import escaped, printable
from meshwright.trainers.training import loop
from meshwright.trainers.training.saved_config import warn_of_other_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt.

    Args:
      given: what a result repeats: its text, or its ids.
      ids: its tokens.
      refusal: why it gets no answer; "" if it gets one.
    """

    given: str | list[int]
    ids: list[int]
    refusal: str = ""


def _start() -> tuple[processes.Membership | None]:
    return (processes.start(generate_flags.PLATFORM.value),)


def _run(
    experiment: Experiment,
    config_text: str,
    membership: processes.Membership | None,
) -> None:
    experiment = _with_vocabulary(experiment)
    task = experiment.task
    prompts = _prompts(task)  # What is wrong with them is said before anything else.
    if membership is not None and prompts is None:
        raise ValueError(
            "several processes read no prompts from standard input: give all of them "
            "the same --prompt or --prompts_file"
        )
    search = _search(task)
    check_beams(task, search)
    path = files.output_file(generate_flags.OUTPUT)
    settings = "\n".join([config_text, *_settings(search), repr(prompts)])
    with processes.together(membership, settings):
        generator = _generator(experiment, config_text, membership, search, prompts)
        try:
            with _output(path) as output:
                _continue(generator, prompts, output)
        except BrokenPipeError:  # Whoever reads the text has enough of it.
            if membership is not None:  # The others end by this error.
                raise
            quiet.drop_output()
    if refusals := [prompt.refusal for prompt in prompts or () if prompt.refusal]:
        raise ValueError(
            f"{len(refusals)} of {len(prompts)} prompts are too long, and the others "
            f"are answered: {refusals[0]}"
        )


def _with_vocabulary(experiment: Experiment) -> Experiment:
    """The experiment whose task has the vocabulary of the training.

    Raises:
      ValueError: the task neither continues text nor translates; a flag is not for it;
        it does not translate to the language of --target_language.
    """
    task = experiment.task
    if isinstance(task, Translation):
        if not isinstance(task.text, TranslationInput):
            raise ValueError(
                f"Translation.text is {type(task.text).__name__}, which has no "
                "vocabulary: generate with @TranslationInput() in its place"
            )
        for flag in (generate_flags.MAX_TOKENS, generate_flags.CACHE_LENGTH):
            if flag.value is not None:
                raise ValueError(
                    f"--{flag.name} is for text that goes on; a translation has at "
                    f"most TranslationInput.target_length tokens, "
                    f"{task.text.target_length}: leave it out"
                )
    else:
        task = language_model(experiment)
        if generate_flags.TARGET_LANGUAGE.value is not None:
            raise ValueError(
                f"--target_language is for a Translation, but Experiment.task is "
                f"{type(task).__name__}: leave it out"
            )
    task = task.as_trained(generate_flags.MODEL_DIR.value)
    if isinstance(task, Translation):
        # Sources in a file may be ids, which need no language.
        wanted = generate_flags.TARGET_LANGUAGE.value
        if wanted is not None or generate_flags.PROMPTS_FILE.value is None:
            target_language(task, wanted)
    return dataclasses.replace(experiment, task=task)


def _settings(search: Decoder) -> list[str]:
    """Flags that must be the same in all processes, but for prompts."""
    given = (
        generate_flags.MODEL_DIR,
        generate_flags.STEP,
        generate_flags.PLATFORM,
        generate_flags.CACHE_LENGTH,
        generate_flags.MAX_TOKENS,
        generate_flags.SEED,
        generate_flags.ROWS,
        generate_flags.TARGET_LANGUAGE,
    )
    text = generate_flags.OUTPUT.value is None
    return [str(search), f"as text: {text}", *(f"{f.name}={f.value}" for f in given)]


@contextlib.contextmanager
def _output(path: pathlib.Path | None) -> Iterator[TextIO | None]:
    """The file at `path`, or None; of several processes, only the first one writes."""
    with contextlib.ExitStack() as stack:
        if not is_first_process():
            path = path and pathlib.Path(os.devnull)
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield path and stack.enter_context(path.open("w", encoding="utf-8"))


def _continue(
    generator: Generator | Translator,
    prompts: list[Prompt] | None,
    output: TextIO | None,
) -> None:
    """Continues prompts, or lines of standard input, and writes to `output`."""
    if prompts is None:
        for number, prompt in enumerate(_lines(generator.task)):
            _answer(generator, [prompt], number, output)
        return
    if len(prompts) > 1:
        output = output or sys.stdout
    rows = generate_flags.ROWS.value
    for number, first in enumerate(range(0, len(prompts), rows)):
        _answer(generator, prompts[first : first + rows], number, output)


def _generator(
    experiment: Experiment,
    config_text: str,
    membership: processes.Membership | None,
    search: Decoder,
    prompts: list[Prompt] | None,
) -> Generator | Translator:
    """A generator with the weights of the checkpoint that the flags name."""
    mesh, platform = experiment.plan.mesh, generate_flags.PLATFORM.value
    compile_cache.use(cli.COMPILE_CACHE.value, is_alone=membership is None)
    given = cli.DEVICE_COUNT.value
    set_platform(platform, processes.devices_each(mesh, membership, platform, given))
    check_takes_part(mesh)  # Too large a mesh fails at once.
    seed = generate_flags.SEED.value
    if isinstance(experiment.task, Translation):
        task = dataclasses.replace(experiment.task, search=search)
        rows = min(generate_flags.ROWS.value, len(prompts or [None]))
        experiment = for_translating(
            dataclasses.replace(experiment, task=task), rows, seed
        )
        programs = StepPrograms(experiment)
        return Translator(programs, _restored(programs, config_text).weights())
    programs = StepPrograms(experiment)
    return Generator(
        programs,
        _restored(programs, config_text).weights(),
        search,
        cache_length=generate_flags.CACHE_LENGTH.value,
        max_tokens=generate_flags.MAX_TOKENS.value,
        seed=seed,
    )


def _answer(
    generator: Generator | Translator,
    prompts: list[Prompt],
    number: int,
    output: TextIO | None,
) -> None:
    """Continues prompts and writes JSON lines, or the text of a single one as it comes.

    The text goes to standard output if there is no `output`; that of beams at the end.
    """
    task = generator.task
    if output is None:
        (prompt,) = prompts
        is_whole = isinstance(generator, Translator)
        if is_whole or generator.search.beams > 1:  # The best so far may lose.
            ((best, *_),) = generator.all([prompt.ids], number=number)
            parts = [_text(task, prompt, best.ids)]
        else:
            stream = generator.stream(prompt.ids, number=number)
            parts = _growing(_text(task, prompt, ids) for ids in stream)
        at_terminal = sys.stdout.isatty()
        for part in parts:
            shown = escaped(part, kept="\n\t") if at_terminal else part
            print(shown, end="", flush=True)
        print(flush=True)
        return
    ids = [prompt.ids for prompt in prompts if not prompt.refusal]
    answers = iter(generator.all(ids, number=number) if ids else ())
    for prompt in prompts:
        found = [] if prompt.refusal else next(answers)
        print(_json(_line(task, prompt, found)), file=output, flush=True)


def _line(
    task: LanguageModel | Translation, prompt: Prompt, found: Sequence[Continued]
) -> dict[str, Any]:
    """What a JSON line says about a prompt."""
    name = "translations" if isinstance(task, Translation) else "continuations"
    texts = [
        {"text": _text(task, prompt, each.ids), **dataclasses.asdict(each)}
        for each in found
    ]
    refused = {"refused": prompt.refusal} if prompt.refusal else {}
    return {"prompt": prompt.given, name: texts, **refused}


def _text(task: LanguageModel | Translation, prompt: Prompt, ids: Sequence[int]) -> str:
    """The text of what was found for a prompt."""
    if isinstance(task, Translation):
        return task.text.trained_vocabulary().decode(ids)
    return text_after(task, prompt.ids, ids)


def _json(value: Any) -> str:
    """`value` on a line, with what is not printable escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _growing(texts: Iterable[str]) -> Iterator[str]:
    """What each of `texts` adds to those before, once its characters are complete."""
    shown = text = ""
    for text in texts:
        whole = text.rstrip(INCOMPLETE)
        if whole.startswith(shown):
            yield whole[len(shown) :]
            shown = whole
    yield text[len(shown) :]


def _search(task: LanguageModel | Translation) -> Decoder:
    """The search that the flags describe; without any that of a translation's task."""
    if generate_flags.BEAMS.value is not None:
        is_flat = generate_flags.FLAT_BEAMS.value
        return BeamSearch(
            beams=generate_flags.BEAMS.value,
            caches=BeamCaches.FLAT if is_flat else BeamCaches.REORDERED,
        )
    top_k, top_p = generate_flags.TOP_K.value, generate_flags.TOP_P.value
    temperature = generate_flags.TEMPERATURE.value
    if isinstance(task, Translation) and (temperature, top_k, top_p) == (None,) * 3:
        return task.search
    if temperature is None:
        temperature = 0.0 if (top_k, top_p) == (None, None) else 1.0
    return Sampling(
        temperature=temperature, top_k=top_k, top_p=1.0 if top_p is None else top_p
    )


def _restored(programs: StepPrograms, config_text: str) -> TrainState:
    """What `TrainState.weights` reads, of the checkpoint that the flags name."""
    folder = loop.Run(model_dir=generate_flags.MODEL_DIR.value).checkpoint_dir
    step = generate_flags.STEP.value
    wanted = TrainState.abstract_weights(programs)

    def choose(number: int, saved: dict[str, ArraySpec]) -> NestedMap:
        there = {p: f for p, f in saved.items() if p.partition(".")[0] in wanted}
        read = epath.Path(folder) / str(number)
        check_model(
            f"the checkpoint in {folder}",
            there,
            wanted,
            lambda: config_changes(read, config_text),
        )
        return wanted

    orders = programs.layer_orders
    with Checkpoints(folder, access=Access.READ, orders=orders) as checkpoints:
        state = checkpoints.restore_part(step, choose)
        restored = TrainState(programs, state)
        metadata = checkpoints.metadata(restored.step)
    warn_of_other_rows(programs.experiment.task, metadata)
    programs.experiment.task.check_vocabulary(metadata.get("batches") or {})
    return restored


def _prompts(task: LanguageModel | Translation) -> list[Prompt] | None:
    """The prompts that the flags give, or None if they come by standard input."""
    if texts := generate_flags.PROMPT.value:
        return [
            _prompt(task, text, f"--prompt {number}" if len(texts) > 1 else "--prompt")
            for number, text in enumerate(texts, start=1)
        ]
    if generate_flags.PROMPTS_FILE.value is None:
        return None
    path = pathlib.Path(generate_flags.PROMPTS_FILE.value).expanduser()
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(
            f"--prompts_file={path} cannot be read ({error.strerror}): name a file of "
            "prompts, one a line"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompts_file={path} is no text in UTF-8 ({error.reason} at byte "
            f"{error.start}): save it in UTF-8"
        ) from error
    # Not splitlines: it also cuts at form feeds and at Unicode's separators.
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line]
    if not numbered:
        raise ValueError(f"--prompts_file={path} has no prompts: write one a line")
    is_json = path.suffix == ".jsonl"
    prompts = [
        _prompt_or_refusal(task, _parsed(line, name) if is_json else line, name)
        for number, line in numbered
        for name in [f"line {number} of {path}"]
    ]
    if all(prompt.refusal for prompt in prompts):
        raise ValueError(prompts[0].refusal)
    return prompts


def _parsed(line: str, name: str) -> Any:
    """What a JSON line has as its prompt: a text, or ids.

    Raises:
      ValueError: it has neither.
    """
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{name} is no JSON ({error}): write {{"prompt": "text"}}'
        ) from error
    prompt = content.get("prompt") if isinstance(content, dict) else None
    is_ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise ValueError(
            f'{name} has no prompt: write {{"prompt": "text"}}, or {{"prompt": [ids]}}'
        )
    return prompt


def _prompt_or_refusal(
    task: LanguageModel | Translation, given: str | list[int], name: str
) -> Prompt:
    """As `_prompt`; one that is too long does not keep others from their answers."""
    try:
        return _prompt(task, given, name)
    except TooLongError as error:
        return Prompt(given=given, ids=[], refusal=str(error))


def _prompt(
    task: LanguageModel | Translation, given: str | list[int], name: str
) -> Prompt:
    """A checked prompt; a text gets a start token, or a tag; ids are as they are."""
    ids = given
    if given and isinstance(given, str):
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} is no text in UTF-8 ({error.reason}): give it in UTF-8"
            ) from error
        ids = _encoded(task, given)
    if isinstance(task, Translation):
        check_source(task, ids, name, generate_flags.TARGET_LANGUAGE.value)
    else:
        check_prompt(task, ids, generate_flags.CACHE_LENGTH.value, name)
    return Prompt(given=given, ids=ids)


def _encoded(task: LanguageModel | Translation, text: str) -> list[int]:
    if isinstance(task, Translation):
        language = target_language(task, generate_flags.TARGET_LANGUAGE.value)
        return task.text.encode(text, language)
    return task.text.encode(text)


def _lines(task: LanguageModel | Translation) -> Iterator[Prompt]:
    """The lines of standard input, but for empty ones and those that are refused."""
    sys.stdin.reconfigure(errors="surrogateescape")  # `_prompt` says which line it is.
    at_terminal = sys.stdin.isatty()
    for number in itertools.count(1):
        if at_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if text := line.rstrip("\n"):
            try:
                yield _prompt(task, text, f"line {number}")
            except ValueError as error:  # The next line may be better.
                print(printable(str(error)), file=sys.stderr)


COMMAND = cli.Command(
    run=_run, errors=(CheckpointError, PeerError, ImportError), start=_start
)
