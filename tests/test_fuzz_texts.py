"""Any text, folder of texts or prediction: what stands in it, or one line of what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import shutil

import pytest
from fuzzing import SCALARS, TEXTS, VALUES, assert_one_line, bounded, changed, nested
from hypothesis import given
from hypothesis import strategies as st

from normjax.data import corpora, text_files
from normjax.data.corpora import DataConfig
from normjax.data.text_files import How
from normjax.errors import UserError
from normjax.predictions import given as named
from normjax.predictions import parsing
from normjax.predictions.prediction import LEVELS, LOSSES, Candidate, from_json, to_json

VERSE = "The quick brown fox\njumps over the lazy dog;\nagain, again, again!\n" * 4
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32-le", "latin-1", "cp1252", "shift_jis",
             "gb18030", "koi8-r", "cp037", "iso2022_jp", "hz", "ascii")  # fmt: skip
NOT_ENCODINGS = ("idna", "rot13", "hex", "zlib", "unicode_escape", "utf-7", "undefined", "mbcs")
MOST = 1 << 16
BOMB = gzip.compress(bytes(1 << 24), 9)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder for one text or several, away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("texts")
        patch.setenv("NORMJAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield folder / "corpus"


def clear(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def said(read, *arguments):
    """Return what a reader returns, or None where it says in one line why not."""
    with bounded(most_bytes=1 << 27):
        try:
            return read(*arguments)
        except UserError as error:
            assert_one_line(str(error))
            str(error).encode()
    return None


@st.composite
def contents(draw):
    """Return bytes as a text file may hold: a text in some encoding, damaged or not, or none."""
    text = draw(st.one_of(st.text(max_size=200), st.just(VERSE), TEXTS, st.just("\ufeff" + VERSE),
                          st.just(VERSE.replace("\n", "\r\n"))))  # fmt: skip
    data = text.encode(draw(st.sampled_from(ENCODINGS)), "replace" if draw(st.booleans()) else
                       "backslashreplace")  # fmt: skip
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=8)) + data[at + draw(st.integers(0, 4)) :]
    return draw(st.sampled_from([data, data, data * 50, b"", BOMB]) | st.binary(max_size=64))


@st.composite
def compressed(draw, content):
    """Return gzip of a content, damaged or not: members in a row, cut short, bytes behind it."""
    data = gzip.compress(content, mtime=0) * draw(st.sampled_from([1, 1, 2]))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at:][draw(st.integers(0, 8)) :]
    return data


SUFFIXES = st.lists(st.sampled_from([".txt", "md", "*", "*.py", "", ".", "gz"]) | TEXTS,
                    min_size=1, max_size=2).map(tuple)  # fmt: skip


def plain(data, encoding):
    """Return what a content is as a text, by Python alone; None where it is none."""
    try:
        text = data.decode(encoding)
        text.encode()
    except UnicodeError:
        return None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


@given(contents(), st.sampled_from(ENCODINGS), st.booleans(), st.data())
def test_any_file_is_its_text_or_one_line(place, content, encoding, packed, data):
    path = place.with_name("text.txt.gz" if packed else "text.txt")
    stored = data.draw(compressed(content)) if packed else content
    path.write_bytes(stored)
    found = said(text_files.read, str(path), (), How(encoding=encoding, most=MOST))
    if found is not None:
        if packed:
            content = gzip.decompress(stored)
        assert len(content) <= MOST and found.text == plain(content, encoding)
    elif not packed and content and b"\0" not in content and len(content) <= MOST:
        assert plain(content, encoding) is None or encoding != "utf-8" or content[:2] in (
            b"\xff\xfe", b"\xfe\xff")  # fmt: skip


@given(st.lists(VALUES, max_size=4), st.sampled_from(["text", "", "é", "a.b"]) | TEXTS, st.data())
def test_any_lines_of_json_are_their_texts_or_one_line(place, values, field, data):
    lines = [{field: VERSE, "other": value} for value in values]
    lines = data.draw(st.just(lines) | changed(lines))
    path = place.with_name("lines.jsonl")
    text = "\n".join(map(json.dumps, lines if isinstance(lines, list) else [lines]))
    text += data.draw(st.sampled_from(["", "\n", "\n\n{", "\r\n", "\n" + "[" * 10**5]))
    path.write_text(text)
    found = said(text_files.read, str(path), (), How(field=field))
    if found is not None and field:
        texts = [line[field] for line in lines]
        assert found.text == plain("\n".join(texts).encode(), "utf-8")


NAMES = st.one_of(
    st.sampled_from(["a.txt", "b.md", "c.TXT", "d.txt.gz", ".hidden.txt", "e.png", "f", "g.jsonl"]),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1,
            max_size=20).map(lambda name: f"x{name}.txt"),
    st.binary(min_size=1, max_size=20).map(
        lambda name: os.fsdecode(b"y" + name.replace(b"/", b"").replace(b"\0", b"") + b".txt")),
)  # fmt: skip
KINDS = ("file", "file", "file", "folder", "pipe", "loop", "out", "inside", "nowhere")


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(KINDS), contents()), max_size=5),
       SUFFIXES, st.booleans())  # fmt: skip
def test_any_folder_is_accounted_for_or_one_line(place, entries, suffixes, deep):
    clear(place)
    folder = place / "sub" if deep else place
    folder.mkdir(parents=True)
    for name, (kind, content) in entries.items():
        path = folder / name
        if kind == "file":
            path.write_bytes(content)
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(
                {"loop": path, "out": "/etc/passwd", "nowhere": "none"}.get(kind, place)
            )
    found = said(text_files.read, str(place), (), How(suffixes=suffixes, most=MOST))
    if found is None:
        return
    listed = [name for name in sorted(entries) if entries[name][0] != "folder"]
    assert found.files.read + found.files.missing == len(listed)
    assert "root:" not in found.text or any(b"root:" in c for _, c in entries.values())
    found.files.words.encode()


@given(TEXTS | st.sampled_from(ENCODINGS + NOT_ENCODINGS), SUFFIXES, TEXTS, TEXTS,
       st.integers(1, 2**40))  # fmt: skip
def test_any_configuration_of_data_is_tokens_or_one_line(
    place, encoding, suffixes, field, corpus, most
):
    path = place.with_name("verse.txt")
    path.write_text(VERSE)
    for name in (str(path), corpus):
        config = DataConfig(corpus=name, encoding=encoding, suffixes=suffixes, field=field,
                            max_bytes=most, window=8)  # fmt: skip
        found = said(corpora.open_corpus, config)
        if found is not None and name == str(path) and encoding == "utf-8":
            both = [*found.train, *found.validation]
            assert found.vocabulary.decode(both) == VERSE


# --- predictions ----------------------------------------------------------------------------------

VARIANTS = ("full", "no-attention", "no-mlp", "post-norm")
GRID = [Candidate(name, name.replace("no-", "minus "), planned=name != "post-norm")
        for name in VARIANTS]  # fmt: skip
FORMS = (
    {"ranking": ["full", ["no-mlp", "post-norm"], "no-attention"], "author": "me", "reason": "so"},
    {"losses": {"full": [2, 1, 3], "no-mlp": 2.5, "no-attention": [3]}, "level": 95},
)
WORDS = st.one_of(
    st.sampled_from(VARIANTS), TEXTS, SCALARS.map(str),
    st.sampled_from(["author:", "level: 95", "reason:", "#", " = ", ": ", " (1 to 3)", " ± 0.2",
                     "1. ", "- ", "•\t", "\u2028", "\x0b", "\x85", "2.1 nats", "٣: 2", "full: ٣",
                     "full: 1e999", "full: 2 (1e-999 to 1e308)", "0" * 4000 + "1. "]),
)  # fmt: skip


@st.composite
def predictions(draw):
    """Return the text of a prediction, or what might be meant as one."""
    if draw(st.booleans()):
        value = draw(changed(draw(st.sampled_from(FORMS))))
        return json.dumps(value, ensure_ascii=draw(st.booleans()))
    lines = draw(st.lists(st.lists(WORDS, max_size=4).map("".join), max_size=6))
    return draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines)


@given(predictions())
def test_any_prediction_is_what_it_says_or_one_line(text):
    found = said(parsing.parse, text, "--predict=x", GRID)
    if found is None:
        return
    names = [entry.name for entry in found.entries]
    assert set(names) <= set(VARIANTS) and len(names) == len(set(names))
    assert found.level in LEVELS and from_json(json.loads(json.dumps(to_json(found)))) == found
    if found.kind == LOSSES:
        values = {e.name: [e.loss, e.low, e.high] if e.low is not None else e.loss
                  for e in found.entries}  # fmt: skip
        again = {"losses": values}
    else:
        places = sorted({entry.place for entry in found.entries})
        again = {"ranking": [[e.name for e in found.entries if e.place == p] for p in places]}
    head = {"author": found.author, "reason": found.reason, "level": found.level}
    assert parsing.parse(json.dumps(again | head), "--predict=x", GRID) == found


@given(st.one_of(
    st.binary(max_size=200), predictions().map(lambda t: t.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"[" * 10**6, b"{" * 10**6, b'{"a":' * 10**5, b"full\n" * 10**5,
                     b"full = " * 10**5, b"=" * 10**6, b" " * (1 << 20), b"#" * 10**6,
                     b"full: " + b"9" * 10**6, b"full: 2" + b" " * 10**6 + b"(",
                     b"(" * 10**6, b"full: 1" + b" " * 10**5 + b"x", bytes(1 << 21),
                     json.dumps(nested(900)).encode(), b"\xff\xfe" + "full".encode("utf-16")]),
), TEXTS)  # fmt: skip
def test_any_file_of_a_prediction_is_read_or_one_line(place, content, name):
    path = place.with_name("mine.txt")
    path.write_bytes(content)
    text = said(named.read, str(path))
    if text is not None:
        assert text.encode() == content
        said(parsing.parse, text, f"--predict={path}", GRID)
    said(named.read, name)
