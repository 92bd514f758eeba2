"""The tasks; importing them registers each with gin."""

from meshwright.tasks.decoding import BeamSearch, Sampling
from meshwright.tasks.espeak import EspeakSpeech
from meshwright.tasks.image_classification import ImageClassification
from meshwright.tasks.image_files import ImageFiles
from meshwright.tasks.image_input import ImageInput
from meshwright.tasks.interactions import RatingsFile
from meshwright.tasks.language_model import LanguageModel
from meshwright.tasks.parallel_text import GettextCatalogues, TFRecordFiles, TsvFiles
from meshwright.tasks.recommendation import Recommendation
from meshwright.tasks.recommendation_input import RecommendationInput
from meshwright.tasks.segmentation import Segmentation
from meshwright.tasks.segmentation_input import SegmentationInput
from meshwright.tasks.speech import SpeechRecognition
from meshwright.tasks.speech_audio import LogMel, SpecAugment
from meshwright.tasks.speech_input import SpeechInput
from meshwright.tasks.speech_manifest import Manifest
from meshwright.tasks.speech_pretraining import MaskedPrediction, SpeechPretraining
from meshwright.tasks.speech_text import CharacterVocabulary
from meshwright.tasks.synthetic_images import SyntheticImages
from meshwright.tasks.synthetic_interactions import SyntheticInteractions
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
    "ImageClassification",
    "ImageFiles",
    "ImageInput",
    "Intensities",
    "LanguageModel",
    "LogMel",
    "Manifest",
    "MaskedPrediction",
    "RatingsFile",
    "Recommendation",
    "RecommendationInput",
    "Sampling",
    "Segmentation",
    "SegmentationInput",
    "SentencePieceVocabulary",
    "SpecAugment",
    "SpeechInput",
    "SpeechPretraining",
    "SpeechRecognition",
    "SyntheticImages",
    "SyntheticInteractions",
    "SyntheticVolumes",
    "TFRecordFiles",
    "TextFiles",
    "TextInput",
    "Translation",
    "TranslationInput",
    "TsvFiles",
    "VolumeFiles",
]
