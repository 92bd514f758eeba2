"""The tasks; importing them registers each with gin."""

from meshwright.tasks.images.image_classification import ImageClassification
from meshwright.tasks.images.image_files import ImageFiles
from meshwright.tasks.images.image_input import ImageInput
from meshwright.tasks.images.synthetic_images import SyntheticImages
from meshwright.tasks.input.batched_input import Resume
from meshwright.tasks.input.dataset_input import DatasetInput
from meshwright.tasks.input.token_dataset import TokenDataset
from meshwright.tasks.keras.keras_model import KerasCompile, KerasModel
from meshwright.tasks.keras.keras_optimizer import KerasOptimizer
from meshwright.tasks.recommendation.interactions import RatingsFile
from meshwright.tasks.recommendation.recommendation import Recommendation
from meshwright.tasks.recommendation.recommendation_input import RecommendationInput
from meshwright.tasks.recommendation.synthetic_interactions import SyntheticInteractions
from meshwright.tasks.segmentation.segmentation import Segmentation
from meshwright.tasks.segmentation.segmentation_input import SegmentationInput
from meshwright.tasks.segmentation.synthetic_volumes import SyntheticVolumes
from meshwright.tasks.segmentation.volume_files import Intensities, VolumeFiles
from meshwright.tasks.speech.espeak import EspeakSpeech
from meshwright.tasks.speech.speech import SpeechRecognition
from meshwright.tasks.speech.speech_audio import LogMel, SpecAugment
from meshwright.tasks.speech.speech_input import SpeechInput
from meshwright.tasks.speech.speech_manifest import Manifest
from meshwright.tasks.speech.speech_pretraining import (
    MaskedPrediction,
    SpeechPretraining,
)
from meshwright.tasks.speech.speech_text import CharacterVocabulary
from meshwright.tasks.task import BatchServing, Decoding, Serving, Task, TaskLoss
from meshwright.tasks.text.decoding import BeamSearch, Sampling
from meshwright.tasks.text.language_model import LanguageModel
from meshwright.tasks.text.model_sizes import model_size, warmup_steps
from meshwright.tasks.text.parallel_text import (
    GettextCatalogues,
    TFRecordFiles,
    TsvFiles,
)
from meshwright.tasks.text.text_input import TextFiles, TextInput
from meshwright.tasks.text.translation import Translation
from meshwright.tasks.text.translation_input import TranslationInput
from meshwright.tasks.text.vocabulary import SentencePieceVocabulary

__all__ = [
    "BatchServing",
    "BeamSearch",
    "CharacterVocabulary",
    "DatasetInput",
    "Decoding",
    "EspeakSpeech",
    "GettextCatalogues",
    "ImageClassification",
    "ImageFiles",
    "ImageInput",
    "Intensities",
    "KerasCompile",
    "KerasModel",
    "KerasOptimizer",
    "LanguageModel",
    "LogMel",
    "Manifest",
    "MaskedPrediction",
    "RatingsFile",
    "Recommendation",
    "RecommendationInput",
    "Resume",
    "Sampling",
    "Segmentation",
    "SegmentationInput",
    "SentencePieceVocabulary",
    "Serving",
    "SpecAugment",
    "SpeechInput",
    "SpeechPretraining",
    "SpeechRecognition",
    "SyntheticImages",
    "SyntheticInteractions",
    "SyntheticVolumes",
    "TFRecordFiles",
    "Task",
    "TaskLoss",
    "TextFiles",
    "TextInput",
    "TokenDataset",
    "Translation",
    "TranslationInput",
    "TsvFiles",
    "VolumeFiles",
    "model_size",
    "warmup_steps",
]
