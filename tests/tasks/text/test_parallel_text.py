"""Pairs from catalogues, TSV and TFRecord files, and from files that are broken."""

import os

import polib
import pytest
import tensorflow as tf

from meshwright.tasks.input.example_order import Split
from meshwright.tasks.text.parallel_text import (
    Direction,
    GettextCatalogues,
    Pair,
    TFRecordFiles,
    TsvFiles,
)
from tests.fuzz.valid import mo
from tests.tasks.text.parallel_files import catalogue, install, install_all, sentences


def all_pairs(files):
    return sorted(pair for split in Split for pair in files.pairs(split))


def test_catalogues_of_a_locale_folder(tmp_path):
    install(tmp_path, "de", {"house": "Haus", "tree": "Baum"})
    install(tmp_path, "fr", {"house": "maison"})
    install(tmp_path, "fr", {"door": "porte"}, domain="other")
    pairs = list(GettextCatalogues(root=str(tmp_path)).read())
    assert {(p.target_language, p.source, p.target) for p in pairs} == {
        ("de", "house", "Haus"),
        ("de", "tree", "Baum"),
        ("fr", "house", "maison"),
        ("fr", "door", "porte"),
    }
    assert {p.direction for p in pairs} == {"en-de", "en-fr"}
    some = GettextCatalogues(root=str(tmp_path), languages=["fr"], domains=["words"])
    assert list(some.read()) == [Pair("en", "fr", "house", "maison")]


def test_what_is_no_translation_is_left_out(tmp_path):
    po = catalogue({"house": "Haus", "empty": "", "two\nlines": "zwei\nZeilen"})
    po.append(polib.POEntry(msgid="guess", msgstr="Rate", flags=["fuzzy"]))
    po.append(polib.POEntry(msgid="old", msgstr="alt", obsolete=True))
    po.append(polib.POEntry(msgid="x" * 300, msgstr="y"))
    po.append(
        polib.POEntry(
            msgid="%d file",
            msgid_plural="%d files",
            msgstr_plural={0: "%d Datei", 1: "-"},
        )
    )
    po.save(str(tmp_path / "de.po"))
    pairs = list(GettextCatalogues(root=str(tmp_path)).read())
    assert [(p.source, p.target) for p in pairs] == [
        ("house", "Haus"),
        ("%d file", "%d Datei"),
    ]


def test_the_language_of_a_po_file(tmp_path):
    catalogue({"a b": "c"}, Language="pt_BR").save(str(tmp_path / "brazil.po"))
    catalogue({"d e": "f"}).save(str(tmp_path / "sv.po"))
    pairs = GettextCatalogues(root=str(tmp_path)).read()
    assert sorted(p.target_language for p in pairs) == ["pt_BR", "sv"]


def test_linked_catalogues_count_once(tmp_path):
    path = install(tmp_path, "de", {"house": "Haus"})
    (path.parent / "old_name.mo").symlink_to(path)
    assert len(list(GettextCatalogues(root=str(tmp_path)).read())) == 1


def test_a_broken_catalogue_is_named_and_left_out(tmp_path, caplog):
    install(tmp_path, "de", {"house": "Haus"})
    broken = tmp_path / "de" / "LC_MESSAGES" / "broken.mo"
    broken.write_bytes(b"\xde\x12\x04\x95 and no more")
    latin = tmp_path / "de" / "LC_MESSAGES" / "latin.po"
    latin.write_bytes('msgid "a"\nmsgstr "\xe4"\n'.encode("latin-1"))
    pairs = list(GettextCatalogues(root=str(tmp_path)).read())
    assert [p.target for p in pairs] == ["Haus"]
    assert str(broken) in caplog.text and str(latin) in caplog.text


def test_sources_are_held_out_in_all_languages_alike(tmp_path):
    install_all(tmp_path, {"de": 200, "fr": 200})
    files = GettextCatalogues(root=str(tmp_path), held_out_one_in=10)
    train, held_out = ({p.source for p in files.pairs(split)} for split in Split)
    assert not train & held_out
    assert train | held_out == set(sentences(200))
    assert 5 < len(held_out) < 40
    more = GettextCatalogues(root=str(tmp_path), languages=["de"], held_out_one_in=10)
    assert {p.source for p in more.pairs(Split.HELD_OUT)} == held_out


def test_directions(tmp_path):
    install(tmp_path, "de", {text: text.upper() for text in sentences(8)})
    kwargs = {"root": str(tmp_path), "held_out_one_in": 2}
    forward = all_pairs(GettextCatalogues(**kwargs))
    backward = all_pairs(GettextCatalogues(direction=Direction.BACKWARD, **kwargs))
    both = all_pairs(GettextCatalogues(direction=Direction.BOTH, **kwargs))
    assert {p.direction for p in backward} == {"de-en"}
    assert sorted(p.reversed() for p in backward) == forward
    assert both == sorted([*forward, *backward])


def test_tsv(tmp_path, caplog):
    (tmp_path / "en-de.tsv").write_text("house\tHaus\r\n\ntree\tBaum\n")
    (tmp_path / "en-fr.tsv").write_text("house\tmaison\n")
    (tmp_path / "ru-de.tsv").write_text("дом\tHaus\n")
    pairs = list(TsvFiles(root=str(tmp_path), languages=["de"]).read())
    assert pairs == [
        Pair("en", "de", "house", "Haus"),
        Pair("en", "de", "tree", "Baum"),
    ]
    assert "en-de.tsv: skipped 1 empty lines" in caplog.text


@pytest.mark.parametrize("line", ["house", "a\tb\tc", "house\t ", "\tHaus"])
def test_a_wrong_line_of_tsv_is_named(tmp_path, line):
    (tmp_path / "en-de.tsv").write_text(f"tree\tBaum\n{line}\n")
    with pytest.raises(ValueError, match=r"en-de.tsv:2 has \d columns.*one tab"):
        TsvFiles(root=str(tmp_path)).pairs(Split.TRAIN)


def test_tsv_in_another_encoding_is_named(tmp_path):
    (tmp_path / "en-de.tsv").write_bytes("tree\tB\xe4ume\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"en-de.tsv is not in UTF-8"):
        TsvFiles(root=str(tmp_path)).pairs(Split.TRAIN)


def record(**features: str) -> bytes:
    def feature(text):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))

    encoded = {name: feature(text) for name, text in features.items()}
    return tf.train.Example(
        features=tf.train.Features(feature=encoded)
    ).SerializeToString()


def test_tfrecord(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(record(source="house", target="Haus", target_language="de"))
        writer.write(record(source="house", target="maison", target_language="fr"))
    pairs = list(TFRecordFiles(root=str(tmp_path), languages=["fr"]).read())
    assert pairs == [Pair("en", "fr", "house", "maison")]


def test_tfrecords_that_are_something_else_are_named(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(record(source="house", target="Haus"))
    message = "record 0 of .*a.tfrecord is no tf.train.Example .*target_language"
    with pytest.raises(ValueError, match=message):
        TFRecordFiles(root=str(tmp_path)).pairs(Split.TRAIN)
    (tmp_path / "a.tfrecord").write_text("no record " * 9)
    with pytest.raises(
        ValueError, match="record 0 of .*a.tfrecord: the file is no TFR"
    ):
        TFRecordFiles(root=str(tmp_path), source_language="xx").pairs(Split.TRAIN)


def test_no_files_or_no_language(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .mo or .po files.*iso-codes"):
        GettextCatalogues(root=str(tmp_path)).pairs(Split.TRAIN)
    install(tmp_path, "de", {"house": "Haus"})
    files = GettextCatalogues(root=str(tmp_path), languages=["de", "xx"])
    with pytest.raises(FileNotFoundError, match="no pairs of language xx.*iso-codes"):
        files.pairs(Split.TRAIN)


def test_an_empty_split_is_named(tmp_path):
    install(tmp_path, "de", {"house": "Haus"})
    files = GettextCatalogues(root=str(tmp_path), held_out_one_in=10**9)
    with pytest.raises(ValueError, match="no held_out pairs under.*held_out_one_in"):
        files.pairs(Split.HELD_OUT)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"held_out_one_in": 1}, "held_out_one_in is 1; .* at least 2"),
        ({"languages": ["de", "de"]}, "names de twice"),
        ({"languages": ["en"]}, "names en twice, or as a translation of itself"),
    ],
)
def test_wrong_hyperparameters(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GettextCatalogues(**kwargs)


@pytest.mark.parametrize("direction", [Direction.BACKWARD, Direction.BOTH])
def test_what_is_translated_is_trained_on_or_held_out_not_both(tmp_path, direction):
    # Twenty texts have the same translation: a hash of them parts it.
    messages = {f"text {i}": f"ord {max(i, 20)}" for i in range(80)}
    install(tmp_path, "sv", messages)
    files = GettextCatalogues(
        root=str(tmp_path), held_out_one_in=4, direction=direction
    )
    sources = [{pair.source for pair in files.pairs(split)} for split in Split]
    assert "ord 20" in sources[0] and not sources[0] & sources[1]
    assert len(sources[1]) > 5


def test_tsv_of_a_language_with_a_region(tmp_path):
    (tmp_path / "pt-BR-zh-Hans.tsv").write_text("casa\t房子\n")
    (tmp_path / "en-de.tsv").write_text("house\tHaus\n")
    (pair,) = TsvFiles(root=str(tmp_path), source_language="pt-BR").read()
    assert pair == Pair("pt-BR", "zh-Hans", "casa", "房子")


def test_tfrecords_without_a_text_are_named(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(record(source="house", target=" ", target_language="de"))
    with pytest.raises(ValueError, match="record 0 of .*a.tfrecord has an empty"):
        TFRecordFiles(root=str(tmp_path)).pairs(Split.TRAIN)


@pytest.mark.parametrize(
    "places",
    [
        {2: (2**31 - 1, 0)},  # Beyond the file.
        {2: (4, 2**31)},
        dict.fromkeys(range(4), (200, 0)),  # All of the file, again and again.
    ],
)
def test_a_catalogue_whose_strings_lie_elsewhere_is_left_out(tmp_path, caplog, places):
    entries = [(b"", b"Language: de\n"), (b"house", b"Haus" * 40)]
    (tmp_path / "de.mo").write_bytes(mo(entries))
    (tmp_path / "fr.mo").write_bytes(mo(entries, places=places))
    pairs = GettextCatalogues(root=str(tmp_path)).read()
    assert [pair.target_language for pair in pairs] == ["de"]
    assert "fr.mo (" in caplog.text


@pytest.mark.parametrize("line", ['"x"', "# x", "#. x", '#| "x"'])
def test_a_catalogue_that_would_take_hours_is_left_out(tmp_path, caplog, line):
    many = f"{line}\n" * 10**6
    (tmp_path / "de.po").write_text(f'msgid "a"\nmsgstr ""\n{many}')
    assert list(GettextCatalogues(root=str(tmp_path)).read()) == []
    assert "de.po (a text has more than 5000 lines)" in caplog.text


def test_what_is_no_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "en-fr.tsv")
    (tmp_path / "en-de.tsv").write_text("house\tHaus\n")
    (pair,) = TsvFiles(root=str(tmp_path)).read()
    assert pair.target_language == "de"


def test_a_file_of_another_name_is_left_out_and_a_right_name_is_said(tmp_path, caplog):
    (tmp_path / "dates.tsv").write_text("May 1\t1. Mai\n")
    message = r"no train pairs .*; a file is named after .* such as en-de\.tsv"
    with pytest.raises(ValueError, match=message):
        TsvFiles(root=str(tmp_path)).pairs(Split.TRAIN)
    assert "its name is not en and a language, as in en-de.tsv: " in caplog.text
    with pytest.raises(FileNotFoundError, match="has some; a file is named after its"):
        TsvFiles(root=str(tmp_path / "none")).pairs(Split.TRAIN)
