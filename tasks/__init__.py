"""The tasks; importing them registers each with gin."""

from meshwright.tasks.decoding import BeamSearch, Sampling
from meshwright.tasks.espeak import EspeakSpeech
from meshwright.tasks.language_model import LanguageModel
from meshwright.tasks.parallel_text import GettextCatalogues, TFRecordFiles, TsvFiles
from meshwright.tasks.speech import SpeechRecognition
from meshwright.tasks.speech_audio import LogMel, SpecAugment
from meshwright.tasks.speech_input import SpeechInput
from meshwright.tasks.speech_manifest import Manifest
from meshwright.tasks.speech_pretraining import MaskedPrediction, SpeechPretraining
from meshwright.tasks.speech_text import CharacterVocabulary
from meshwright.tasks.text_input import TextFiles, TextInput
from meshwright.tasks.translation import Translation
from meshwright.tasks.translation_input import TranslationInput
from meshwright.tasks.vocabulary import SentencePieceVocabulary

__all__ = [
    "BeamSearch",
    "CharacterVocabulary",
    "EspeakSpeech",
    "GettextCatalogues",
    "LanguageModel",
    "LogMel",
    "Manifest",
    "MaskedPrediction",
    "Sampling",
    "SentencePieceVocabulary",
    "SpecAugment",
    "SpeechInput",
    "SpeechPretraining",
    "SpeechRecognition",
    "TFRecordFiles",
    "TextFiles",
    "TextInput",
    "Translation",
    "TranslationInput",
    "TsvFiles",
]
