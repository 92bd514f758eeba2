"""The order of examples is kept: a run resumed by a newer version reads the same.

What changes it, even a NumPy or a SentencePiece that draws otherwise, is to be known
before it is released.
"""

import hashlib
import json

import numpy as np
import pytest

from meshwright.tasks.images.image_input import ImageInput
from meshwright.tasks.recommendation.recommendation_input import RecommendationInput
from meshwright.tasks.recommendation.synthetic_interactions import SyntheticInteractions
from meshwright.tasks.segmentation.patches import Patches
from meshwright.tasks.segmentation.segmentation_input import SegmentationInput
from meshwright.tasks.segmentation.volume_files import VolumeFiles
from meshwright.tasks.speech.speech_input import SpeechInput
from meshwright.tasks.speech.speech_manifest import Manifest
from meshwright.tasks.speech.speech_text import CharacterVocabulary
from meshwright.tasks.text.parallel_text import GettextCatalogues
from meshwright.tasks.text.text_input import TextFiles, TextInput
from meshwright.tasks.text.translation_input import TranslationInput
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary
from tests.tasks.images import image_records
from tests.tasks.segmentation import volume_files_on_disk
from tests.tasks.speech import speech_files
from tests.tasks.text import parallel_files


def text(folder):
    for i in range(60):
        (folder / f"{i}.py").write_text(f"{i} " * (1 + i % 7))
    given = TextInput(files=TextFiles(root=str(folder)), sequence_length=10, seed=3)
    return given, lambda batch: batch.ids


def translation(folder):
    parallel_files.install_all(folder, {"de": 60, "fr": 20})
    given = TranslationInput(
        files=GettextCatalogues(root=str(folder), held_out_one_in=5),
        vocabulary=SentencePieceVocabulary(vocab_size=320),
        source_length=40,
        target_length=48,
        temperature=2.0,
        seed=3,
    )
    vocabulary = given.trained_vocabulary()
    return given, lambda batch: [vocabulary.decode(ids) for ids in batch.target_labels]


def speech(folder):
    manifest = speech_files.install(folder, speech_files.sentences(30))
    given = SpeechInput(
        files=Manifest(path=str(manifest), held_out_one_in=4),
        vocabulary=CharacterVocabulary(),
        label_length=30,
        bucket_frames=(80, 120, 200),
        seed=3,
    )
    return given, lambda batch: batch.utterance


def images(folder):
    files = image_records.install(folder, 11, 5)
    given = ImageInput(files=files, size=8, num_classes=3, seed=3)
    shade = image_records.SHADES
    return given, lambda batch: np.rint(batch.image[..., 2].mean((1, 2)) / shade)


def recommendation(folder):
    made = SyntheticInteractions(users=12, items=20, per_user=6)
    given = RecommendationInput(files=made, negatives=3, held_out_negatives=9, seed=3)
    return given, lambda batch: [batch.user, batch.item]


def segmentation(folder):
    files = VolumeFiles(path=str(volume_files_on_disk.install(folder)))
    given = SegmentationInput(files=files, patch=(5, 4, 3), num_classes=3, seed=3)
    return Patches(volumes=given, labelled=given.patch), lambda batch: batch.label


def digest(batches, read) -> str:
    """Of what is read of each batch."""
    checksum = hashlib.sha256()
    for batch in batches:
        values = np.asarray(read(batch.map(lambda tensor: tensor.numpy())))
        checksum.update(json.dumps(values.tolist()).encode())
    return checksum.hexdigest()[:12]


@pytest.mark.parametrize(
    "make, train, held_out",
    [
        (text, "476e22bbf829", "a1ebe19fbf68"),
        (translation, "1b3cceb885ab", "9c07396017da"),
        (speech, "c81425ce05d3", "f60017122b08"),
        (images, "5d2c1110d47a", "84bc02900581"),
        (recommendation, "cc1386eb19de", "6c3c7f22d65a"),
        (segmentation, "0169a26070a7", "63cdbcbafd76"),
    ],
)
def test_the_order_of_examples_is_the_one_of_earlier_versions(
    make, train, held_out, tmp_path
):
    given, read = make(tmp_path)
    rows = {"global_batch": 4, "rows": range(4)}
    # The batches 10 to 14: of a later epoch, for most.
    assert digest(given.train_batches(10, **rows).take(5), read) == train
    assert digest(given.held_out_batches(**rows), read) == held_out
