"""The tasks; importing them registers each with gin."""

from meshwright.tasks.language_model import LanguageModel
from meshwright.tasks.text_input import TextFiles, TextInput

__all__ = ["LanguageModel", "TextFiles", "TextInput"]
