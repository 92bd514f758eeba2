"""The pictures of docs/images are what their script draws."""

import importlib.util
import pathlib

import pytest

IMAGES = pathlib.Path(__file__).parents[3] / "docs" / "images"
_SPEC = importlib.util.spec_from_file_location("pictures", IMAGES / "pictures.py")
pictures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pictures)
DRAWN = pictures.pictures()


@pytest.mark.parametrize("name", DRAWN)
def test_the_picture_is_current(name):
    text = (IMAGES / name).read_text()
    assert text == DRAWN[name], "run python docs/images/pictures.py"
