"""The tasks; importing them registers each with gin."""

from meshwright.tasks.decoding import BeamSearch, Sampling
from meshwright.tasks.language_model import LanguageModel
from meshwright.tasks.parallel_text import GettextCatalogues, TFRecordFiles, TsvFiles
from meshwright.tasks.text_input import TextFiles, TextInput
from meshwright.tasks.translation import Translation
from meshwright.tasks.translation_input import TranslationInput
from meshwright.tasks.vocabulary import SentencePieceVocabulary

__all__ = [
    "BeamSearch",
    "GettextCatalogues",
    "LanguageModel",
    "Sampling",
    "SentencePieceVocabulary",
    "TFRecordFiles",
    "TextFiles",
    "TextInput",
    "Translation",
    "TranslationInput",
    "TsvFiles",
]
