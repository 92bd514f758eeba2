"""Each reader of outside data: what it makes of a folder is right, or an error."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable

import gin
import jax
import numpy as np
from absl import flags
from absl.testing import flagsaver

from meshwright.layers.attention.attention import MultiHeadAttention
from meshwright.layers.attention.positions import PositionKind
from meshwright.layers.basic.embedding import Softmax, TokenEmbedding
from meshwright.layers.basic.feed_forward import Activation, FeedForward
from meshwright.layers.basic.normalization import RMSNorm
from meshwright.layers.stacks.repeat import Repeat
from meshwright.layers.transformer import TransformerLayer
from meshwright.tasks.images.image_files import ImageFiles
from meshwright.tasks.images.image_input import ImageInput
from meshwright.tasks.input.example_order import Split
from meshwright.tasks.recommendation.interactions import RatingsFile
from meshwright.tasks.segmentation.volume_files import (
    Case,
    Intensities,
    VolumeFiles,
    grid,
    load,
)
from meshwright.tasks.speech.speech_audio import read_wav, wav_length
from meshwright.tasks.speech.speech_manifest import Manifest
from meshwright.tasks.text import parallel_text
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.tasks.text.text_input import TextInput
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary
from meshwright.trainers import cli, train
from meshwright.trainers.checkpoints.checkpoint_initialize import weights_from
from meshwright.trainers.checkpoints.checkpoint_rules import InitializeFrom
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.experiment import config
from meshwright.trainers.experiment.batches import readable
from meshwright.trainers.experiment.experiment import Experiment
from meshwright.trainers.planning.search import search_main
from meshwright.trainers.startup import search_flags, train_flags

Reader = Callable[[pathlib.Path], None]

CLASSES = ("background", "liver", "tumour")
SPACING = (2.0, 2.0, 2.0)


def _wav(folder: pathlib.Path) -> None:
    path = folder / "a.wav"
    length = wav_length(path)
    sound = read_wav(path)
    assert sound.dtype == np.float32 and sound.shape == (length,)
    assert np.isfinite(sound).all()


def _volume(folder: pathlib.Path) -> None:
    (path,) = folder.glob("a.nii*")
    _load(Case("a", str(path)))


def _label(folder: pathlib.Path) -> None:
    paths = str(folder / "image.nii.gz"), str(folder / "a.nii.gz")
    label = _load(Case("image", *paths)).label
    assert label.dtype == np.int32 and 0 <= label.min() <= label.max() < len(CLASSES)


def _load(case: Case):
    size = grid(case, spacing=SPACING)
    volume = load(case, CLASSES, spacing=SPACING, intensities=Intensities())
    assert volume.image.dtype == np.float32 and volume.image.shape == size
    assert np.isfinite(volume.image).all()
    return volume


def _dataset(folder: pathlib.Path) -> None:
    files = VolumeFiles(path=str(folder / "dataset.json"))
    assert len(files.classes()) > 1
    for split in Split:
        assert all(pathlib.Path(case.image).is_file() for case in files.read(split))


def _pairs(kind: type, **settings) -> Reader:
    def read(folder: pathlib.Path) -> None:
        files = kind(root=str(folder), **settings)
        for split in Split:
            for pair in files.pairs(split):
                assert pair.source.strip() and pair.target.strip()
                assert f"{pair.source}\t{pair.target}".encode()

    return read


def _pictures(folder: pathlib.Path) -> None:
    files = ImageFiles(train=f"{folder}/a.records", held_out=f"{folder}/a.records")
    pictures = ImageInput(files=files, size=4, num_classes=3)
    trained = pictures.train_batches(0, global_batch=2, rows=range(2))
    held_out = pictures.held_out_batches(global_batch=2, rows=range(2))
    for batch in (*readable(trained.take(1)), *readable(held_out)):
        assert -1 <= batch.label.numpy().min() <= batch.label.numpy().max() < 3


def _manifest(name: str) -> Reader:
    def read(folder: pathlib.Path) -> None:
        for split in Split:
            for row in Manifest(path=str(folder / name), held_out_one_in=2).read(split):
                assert pathlib.Path(row.path).is_file() and row.transcript.encode()

    return read


def _ratings(folder: pathlib.Path) -> None:
    table = RatingsFile(path=str(folder / "ratings.csv")).read()
    assert table.user_count > 0 and len(table.held_out) == table.user_count
    assert 0 <= table.held_out.min() <= table.held_out.max() < table.item_count
    assert (np.diff(table.pairs) > 0).all()


def _subwords(folder: pathlib.Path) -> None:
    path = str(folder / "a.model")
    vocabulary = SentencePieceVocabulary(vocab_size=300, model_file=path)
    trained = vocabulary.trained([], ["de"])
    ids = trained.encode(["red house", "größe\u2028", ""])
    used = set(itertools.chain(*ids))
    assert used <= set(range(300))
    for row in [*ids, range(300)]:
        trained.decode(row)


def _gin(folder: pathlib.Path) -> None:
    experiment, _ = config.load_and_build(Experiment, [folder / "a.gin"], [])
    assert isinstance(experiment, Experiment)
    # What was in effect can be said, and be loaded again.
    config.load([], [config.operative_text()])


def _flags(folder: pathlib.Path) -> None:
    """What the binaries do with their flags before anything is compiled."""
    words = os.fsdecode((folder / "flags").read_bytes()).split("\0")
    with flagsaver.flagsaver():
        try:
            # A run needs a job; and it tries to write to its folder, so none is run.
            needed = ["--gin_file=lm/stdlib_tiny", "--dry_run"]
            left = flags.FLAGS(["meshwright", *needed, *words])
            cli.call(train.NAME, left, _command, check=train_flags.check)
        # As absl prints them, and as the binaries print errors.
        except flags.Error as error:
            raise ValueError(f"flags: {error}") from error
        except SystemExit as stopped:
            assert stopped.code.replace("\n", "").isprintable()
            raise ValueError(f"flags: {stopped.code}") from stopped


def _command() -> cli.Command:
    return cli.Command(run=_use_flags)


def _use_flags(experiment: Experiment, text: str) -> None:
    assert isinstance(experiment, Experiment) and text
    search_main._counts(search_flags.BATCH)
    search_main._counts(search_flags.MICROBATCHES)


@functools.cache
def _published_task() -> LanguageModel:
    norm = RMSNorm(model_dims=4)
    layer = TransformerLayer(
        attention_norm=norm,
        attention=MultiHeadAttention(
            model_dims=4, num_heads=2, head_dim=2, positions=PositionKind.ROTARY
        ),
        feed_forward_norm=norm,
        feed_forward=FeedForward(
            model_dims=4, hidden_dims=6, activation=Activation.GATED_SILU
        ),
    )
    return LanguageModel(
        text=TextInput(sequence_length=8),
        embedding=TokenEmbedding(vocab_size=264, model_dims=4),
        softmax=Softmax(model_dims=4, vocab_size=264),
        stack=Repeat(body=layer, num_layers=1),
        final_norm=norm,
    )


def _published(folder: pathlib.Path) -> None:
    """Weights in safetensors, of the model that config.json says."""
    task = _published_task()
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    theta = task.weights().map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, "float32", sharding=device)
    )
    try:
        taken = weights_from(InitializeFrom(checkpoint=str(folder)), theta, task)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    assert {path: array.shape for path, array in taken.items()} == {
        path: spec.shape for path, spec in theta.items_by_path()
    }


READERS: dict[str, Reader] = {
    "wav": _wav,
    "volume": _volume,
    "label": _label,
    "dataset": _dataset,
    "mo": _pairs(parallel_text.GettextCatalogues),
    "po": _pairs(parallel_text.GettextCatalogues),
    "tsv": _pairs(parallel_text.TsvFiles, held_out_one_in=2),
    "pairs": _pairs(parallel_text.TFRecordFiles, held_out_one_in=2),
    "pictures": _pictures,
    "manifest": _manifest("manifest.tsv"),
    "objects": _manifest("manifest.jsonl"),
    "ratings": _ratings,
    "subwords": _subwords,
    "safetensors": _published,
    "config": _published,
    "index": _published,
    "gin": _gin,
    "flags": _flags,
}
"""By name: reads a folder, and checks what comes of it."""


def forget() -> None:
    """Empties what the readers keep of files between calls."""
    gin.clear_config()
    for name, module in list(sys.modules.items()):
        if name.startswith("meshwright.tasks."):
            for value in vars(module).values():
                getattr(value, "cache_clear", lambda: None)()
