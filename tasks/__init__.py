"""The tasks; importing them registers each with gin."""

from meshwright.tasks.decoding import BeamSearch, Sampling
from meshwright.tasks.espeak import EspeakSpeech
from meshwright.tasks.language_model import LanguageModel
from meshwright.tasks.parallel_text import GettextCatalogues, TFRecordFiles, TsvFiles
from meshwright.tasks.segmentation import Segmentation
from meshwright.tasks.segmentation_input import SegmentationInput
from meshwright.tasks.speech import SpeechRecognition
from meshwright.tasks.speech_audio import LogMel, SpecAugment
from meshwright.tasks.speech_input import SpeechInput
from meshwright.tasks.speech_manifest import Manifest
from meshwright.tasks.speech_pretraining import MaskedPrediction, SpeechPretraining
from meshwright.tasks.speech_text import CharacterVocabulary
from meshwright.tasks.synthetic_volumes import SyntheticVolumes
from meshwright.tasks.text_input import TextFiles, TextInput
from meshwright.tasks.translation import Translation
from meshwright.tasks.translation_input import TranslationInput
from meshwright.tasks.vocabulary import SentencePieceVocabulary
from meshwright.tasks.volume_files import Intensities, VolumeFiles

__all__ = [
    "BeamSearch",
    "CharacterVocabulary",
    "EspeakSpeech",
    "GettextCatalogues",
    "Intensities",
    "LanguageModel",
    "LogMel",
    "Manifest",
    "MaskedPrediction",
    "Sampling",
    "Segmentation",
    "SegmentationInput",
    "SentencePieceVocabulary",
    "SpecAugment",
    "SpeechInput",
    "SpeechPretraining",
    "SpeechRecognition",
    "SyntheticVolumes",
    "TFRecordFiles",
    "TextFiles",
    "TextInput",
    "Translation",
    "TranslationInput",
    "TsvFiles",
    "VolumeFiles",
]
