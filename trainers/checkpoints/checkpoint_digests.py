"""Digests of a checkpoint's files: what makes a folder of files a checkpoint.

`SHA256SUMS` is beside the files and is written before the folder gets its final name,
so that a step is damaged if it lacks the list, or if a file is missing, extra, or does
not match. `sha256sum -c SHA256SUMS` makes the same check.

Orbax and TensorStore notice much by themselves, but not all: of 60 bits flipped, one at
a time, in files of arrays, 23 came back as wrong weights without a word.

Why files and not arrays: a damaged file can be named; every file counts, also those
that Orbax writes for itself; and whatever mesh reads them, there is nothing to compile.
The price is a second reading. Of 3.2 GB of weights on two cores, in seconds: 30 to
save, 4 to digest in the background, 16 to restore, after 4 to verify. SHA-256 runs at
1.2 GB/s a core here, CRC-32 at 2.5, BLAKE2 at 0.6.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import orbax.checkpoint as ocp
from etils import epath

from meshwright.trainers.checkpoints.checkpoint_progress import Transfer

DIGESTS = "SHA256SUMS"
# Orbax writes these two while it renames. Neither holds any part of the state.
_AFTERWARDS = ("_CHECKPOINT_METADATA", "commit_success.txt")

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_BLOCK = 4 << 20  # bytes
_MAX_JSON = 64 << 20  # bytes; what describes a state of 100,000 leaves has 10 million
_THREADS = min(8, os.cpu_count() or 1)
_LEAST_SLICE = 1 << 20  # bytes; a smaller one is not worth its program
_MAX_SHOWN = 4
_UNREADABLE = -1  # Instead of a number of problems.

# A removed or exchanged file raises these. No other OSError says anything about the
# files: the disk failed (EIO), the server was restarted (ESTALE), nobody may read them.
_WENT_AWAY = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

Gather = Callable[[int], Sequence[int]]
"""Takes a number from this process and returns those of all, in process order."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or put into this model."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not as they were saved; the message names them.

    Args:
      folder: the checkpoint's folder.
      problems: what is wrong, one text for each file.
    """

    def __init__(self, folder: epath.Path, problems: Sequence[str]):
        shown = list(problems[:_MAX_SHOWN])
        if len(problems) > len(shown):
            shown.append(f"{len(problems) - len(shown)} more")
        super().__init__(f"checkpoint {folder} is damaged: {'; '.join(shown)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """A checkpoint whose files are as they were saved.

    Args:
      folder: the checkpoint's folder.
      sizes: bytes of each file, by path in the folder.
    """

    folder: epath.Path
    sizes: dict[str, int]

    def check_descriptions(self) -> None:
        """Checks that the files which describe arrays are small enough to be parsed.

        Raises:
          ValueError: one is not.
        """
        for path, size in self.sizes.items():
            if size > _MAX_JSON and "/d/" not in path:  # Arrays are in folders `d`.
                raise ValueError(f"{path} has {size:,} bytes, too many to describe")

    def check_still_there(self, gather: Gather) -> None:
        """Checks that no file has gone since, at the cost of reading all sizes.

        Another process's retention may remove what an evaluation is reading, and
        TensorStore's behaviour when files vanish cannot be relied on.

        Raises:
          DamagedError: files have gone or changed.
          CheckpointError: the folder cannot be read.
        """

        def problems() -> list[str]:
            try:
                now = _sizes(self.folder)
            except _WENT_AWAY:
                now = {}
            gone = [path for path, size in self.sizes.items() if now.get(path) != size]
            return [f"{path} changed while it was read" for path in gone]

        _raise_together(self.folder, problems, gather)


class DigestingHandler(ocp.StandardCheckpointHandler):
    """Saves arrays, and then the digests of the files that this process has written.

    The first process thus need not read back what all have written.
    """

    def __init__(self):
        super().__init__()
        # By default each replica of an array saves a slice of it, however small, and
        # JAX compiles a program for each slice.
        types = ocp.type_handlers
        default = types.get_type_handler(jax.Array)
        arrays = types.ArrayHandler(
            min_slice_bytes_for_replica_parallel=_LEAST_SLICE,
            array_metadata_store=getattr(default, "_array_metadata_store", None),
        )
        registry = types.create_type_handler_registry(
            *((kind, types.get_type_handler(kind)) for kind in types.supported_types()),
            (jax.Array, arrays),
        )
        self._impl = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)

    async def async_save(self, directory, item=None, save_args=None, args=None):
        saves = await super().async_save(directory, item, save_args, args)
        folder = directory / f"ocdbt.process_{jax.process_index()}"

        def write_own() -> None:
            # Another process may have written all that is replicated.
            if folder.exists():
                write(folder)

        return [ocp.future.ChainedFuture(saves, write_own)]


def handler_registry() -> ocp.handlers.CheckpointHandlerRegistry:
    """Tells Orbax how the item `state` is saved."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardSave, DigestingHandler())
    return registry


def write(folder: epath.Path) -> None:
    """Writes the digests of all files in `folder`; a single process calls this.

    Digests in its subfolders are taken over.
    """
    sizes, known = _sizes(folder), {}
    for path in [path for path in sizes if path.endswith(f"/{DIGESTS}")]:
        prefix = path.removesuffix(DIGESTS)
        listed = _listed((folder / path).parent).digests
        known |= {prefix + file: digest for file, digest in listed.items()}
        (folder / path).unlink()
        del sizes[path]
    remaining = {path: size for path, size in sizes.items() if path not in known}
    digests = known | _digests(folder, remaining, f"digests of {folder}")
    lines = [f"{digests[path]}  {path}\n" for path in sorted(digests)]
    (folder / DIGESTS).write_text("".join(lines))


def verify(folder: epath.Path, gather: Gather) -> Verified:
    """Checks that the files in `folder` are those whose digests were written.

    In a program of several processes each reads its share, and all come to the same
    result.

    Raises:
      DamagedError: they are not those.
      CheckpointError: some process cannot read them; they may be intact.
    """
    sizes: dict[str, int] = {}

    def problems() -> list[str]:
        sizes.update(_sizes(folder))
        return _problems(folder, sizes)

    _raise_together(folder, problems, gather)
    return Verified(folder=folder, sizes=sizes)


def are_as_saved(folder: epath.Path, paths: Iterable[str]) -> bool:
    """Whether files that describe arrays match their digests, for this process."""
    try:
        listed = _listed(folder).digests
        for path in paths:
            file = folder / path
            if file.stat().length > _MAX_JSON:
                return False
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if listed.get(path) != digest:
                return False
    except OSError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Listed:
    """What a list of digests says: digests by path, and numbers of other lines."""

    digests: dict[str, str]
    others: list[int]


def _listed(folder: epath.Path) -> _Listed:
    """Reads the list in `folder`; raises OSError if there is none."""
    text = (folder / DIGESTS).read_bytes().decode(errors="replace")
    lines = [_LINE.fullmatch(line) for line in text.splitlines()]
    return _Listed(
        digests={match[2]: match[1] for match in lines if match},
        others=[number for number, match in enumerate(lines, start=1) if not match],
    )


def _raise_together(
    folder: epath.Path, find_problems: Callable[[], list[str]], gather: Gather
) -> None:
    """Raises in every process if any process has problems, or cannot look for them."""
    problems, failure = [], None
    try:
        problems = find_problems()
    except _WENT_AWAY as error:
        problems = [str(error)]
    except OSError as error:
        failure = error
    everywhere = gather(len(problems) if failure is None else _UNREADABLE)
    if _UNREADABLE in everywhere:
        why = "another process says why" if failure is None else failure
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({why}), which is no damage: nothing "
            "was renamed. Check disk, network and permissions and start again; or "
            "move the step elsewhere, to go on from an earlier step"
        ) from failure
    if problems:
        raise DamagedError(folder, problems)
    if any(everywhere):
        raise DamagedError(folder, ["another process found this, and says what"])


def _problems(folder: epath.Path, sizes: dict[str, int]) -> list[str]:
    try:
        listed = _listed(folder)
    except FileNotFoundError:
        return [
            f"{DIGESTS} is missing, nothing can be verified "
            "(docs/reference/training/checkpoints.md says how to make one)"
        ]
    saved = listed.digests
    problems = [f"line {n} of {DIGESTS} is no digest of a file" for n in listed.others]
    problems += [f"{path} is missing" for path in sorted(saved.keys() - sizes)]
    problems += [f"{path} is not in {DIGESTS}" for path in sorted(sizes.keys() - saved)]
    if problems:
        return problems
    # The largest first and in turn: even shares.
    paths = sorted(sizes, key=lambda path: (-sizes[path], path))
    share = paths[jax.process_index() :: jax.process_count()]
    sizes_here = {path: sizes[path] for path in share}
    return [
        f"{path} ({sizes[path]:,} bytes) does not match its digest in {DIGESTS}"
        for path, digest in _digests(folder, sizes_here, f"verifying {folder}").items()
        if digest != saved[path]
    ]


def _sizes(folder: epath.Path) -> dict[str, int]:
    """Bytes of each file that has, or ought to have, a digest."""
    return {
        path: size
        for path, size in _files(folder)
        if path not in (DIGESTS, *_AFTERWARDS)
    }


def _files(folder: epath.Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    for file in folder.iterdir():
        # `is_dir` and `exists` are false where the disk fails; this raises.
        status = file.stat()
        if status.is_directory:
            yield from _files(file, f"{prefix}{file.name}/")
        else:
            yield prefix + file.name, status.length


def _digests(folder: epath.Path, sizes: dict[str, int], what: str) -> dict[str, str]:
    """SHA-256 of the files in `sizes`; `what` names the work in the log."""
    with (
        Transfer(what, sum(sizes.values())) as transfer,
        concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
    ):
        digests = pool.map(lambda path: _digest(folder / path, transfer), sizes)
        return dict(zip(sizes, digests, strict=True))


def _digest(file: epath.Path, transfer: Transfer) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            transfer.add(len(block))
    return digest.hexdigest()


def brief(error: BaseException | None) -> str:
    """The first cause, on one line: TensorStore says what failed at the very end."""
    if error is None:
        return "in another process"
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    if len(text) > 400:
        text = f"{text[:150]} ... {text[-250:]}"
    return f"{type(error).__name__}: {text}"
