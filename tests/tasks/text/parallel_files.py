"""Small catalogues, as an installed program has them."""

import polib

WORDS = ["red", "green", "blue", "house", "tree", "river", "stone", "bird"]


def sentences(count: int) -> list[str]:
    """Different sentences of two to five words."""
    texts = []
    for i in range(count):
        words = [WORDS[(i // 8**k) % 8] for k in range(4)]
        texts.append(f"{' '.join(words[: 2 + i % 3])} number {i}")
    return texts


def spell(language: str, text: str) -> str:
    """A translation that can be learned: every word gets an ending."""
    return " ".join(f"{word}{language}" for word in text.split())


def catalogue(messages: dict[str, str], **metadata) -> polib.POFile:
    file = polib.POFile()
    file.metadata = {"Content-Type": "text/plain; charset=UTF-8", **metadata}
    for source, target in messages.items():
        file.append(polib.POEntry(msgid=source, msgstr=target))
    return file


def install(root, language: str, messages: dict[str, str], domain: str = "words"):
    """Writes root/<language>/LC_MESSAGES/<domain>.mo."""
    path = root / language / "LC_MESSAGES" / f"{domain}.mo"
    path.parent.mkdir(parents=True, exist_ok=True)
    catalogue(messages).save_as_mofile(str(path))
    return path


def install_all(root, counts: dict[str, int]) -> None:
    """A catalogue for each language, of so many sentences."""
    for language, count in counts.items():
        texts = sentences(count)
        install(root, language, {text: spell(language, text) for text in texts})
