"""Text files and folders: how they are read, and what is said when they cannot be."""

from __future__ import annotations

import os

import numpy as np
import pytest
from corpus_texts import VERSE, error, write

from normjax.data import corpora
from normjax.data.corpora import DataConfig

pytestmark = pytest.mark.usefixtures("own_folders")


def test_a_folder_is_read_in_the_order_of_relative_paths(tmp_path):
    folder = tmp_path / "poems"
    for name in ("b.txt", "a/z.md", "a.TXT", ".hidden.txt", ".git/x.txt", "c.rst", "a/b/c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, f"<{name}>" + VERSE)
    corpus = corpora.open_corpus(DataConfig(corpus=str(folder), window=8))
    order = ["a.TXT", "a/b/c.txt", "a/z.md", "b.txt"]
    text = "\n".join(f"<{name}>" + VERSE for name in order)
    tokens = np.concatenate([corpus.train, corpus.held_out])
    assert corpus.vocabulary.decode(tokens) == text
    assert corpus.name == "poems"
    assert "4 text files" in corpus.description


def test_byte_order_mark_and_line_ends_do_not_matter(tmp_path):
    plain = corpora.open_corpus(DataConfig(corpus=write(tmp_path / "a.txt")))
    for prefix, end in (("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r")):
        text = prefix + (VERSE * 20).replace("\n", end)
        other = corpora.open_corpus(DataConfig(corpus=write(tmp_path / "b.txt", text)))
        assert other.fingerprint == plain.fingerprint
        np.testing.assert_array_equal(other.train, plain.train)


def test_nothing_is_written_on_a_mistake(tmp_path):
    write(tmp_path / "short.txt", "abc")
    error(corpus=str(tmp_path / "short.txt"))
    error(corpus=str(tmp_path / "no.txt"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["short.txt"]


def test_a_missing_file(tmp_path, monkeypatch):
    write(tmp_path / "sonnets.txt")
    message = error(corpus=str(tmp_path / "sonets.txt"))
    assert "no such file or folder" in message
    assert "did you mean" in message and "sonnets.txt'" in message
    assert "tfds:NAME" in message and "plays" in message and "slash" in message
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'sonnets.txt'" in error(corpus="sonets.txt")
    assert "did you mean 'plays'" in error(corpus="play")
    assert "no such file" in error(corpus=str(tmp_path / "no" / "such" / "folder.txt"))
    assert "no such file" in error(corpus="~/surely/not/here.txt")
    assert "no such file" in error(corpus="~nobody-of-this-name/here.txt")


def test_names_that_are_no_paths():
    long = error(corpus="x" * 5000)  # which of the two depends on the version of Python
    assert "cannot be read (File name too long)" in long or "no such file or folder" in long
    assert "pass a path" in error(corpus="a\0b")
    assert "must name a text" in error(corpus="") and "must name a text" in error(corpus=" ")


def test_a_folder_without_texts(tmp_path):
    write(tmp_path / "image.png")
    assert "holds no text file (*.txt or *.md" in error(corpus=str(tmp_path))


def test_what_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe, not a file" in error(corpus=str(tmp_path / "pipe"))


def test_an_unreadable_file(tmp_path, monkeypatch):
    """Tests may run as root, whom no permission stops: the operating system's answer is played."""
    path, opened = write(tmp_path / "secret.txt"), os.open

    def refuse(path, *args, **kwargs):
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert "cannot be read (Permission denied)" in error(corpus=path)
    message = error(corpus=str(tmp_path))
    assert "1 unreadable: Permission denied (1,320 bytes; secret.txt)" in message
    write(tmp_path / "open.txt")
    assert "secret.txt" in corpora.open_corpus(DataConfig(corpus=str(tmp_path))).files.words


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_a_file_without_permission(tmp_path):
    path = write(tmp_path / "secret.txt")
    os.chmod(path, 0)
    assert "cannot be read (Permission denied)" in error(corpus=path)


@pytest.mark.parametrize("text", ["", " \n\t\r\n", "\ufeff", "\ufeff\n"])
def test_empty_and_blank_texts(tmp_path, text):
    assert "empty or only blank" in error(corpus=write(tmp_path / "t.txt", text))


def test_not_utf8_names_the_place(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\ntwo\nna\xefve\n")
    message = error(corpus=str(path))
    assert message.startswith(f"data.corpus={path}: not UTF-8, byte 0xef at offset 10 (line 3)")
    assert "iconv" in message
    path.write_bytes(b"cut \xe6\xbc")
    assert "byte 0xe6 at offset 4 (line 1)" in error(corpus=str(path))


def test_binary_files(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"ab\nc\0d")
    assert "not a text file, zero byte at offset 4 (line 2)" in error(corpus=str(path))
    path.write_bytes("text".encode("utf-16"))
    assert "UTF-16" in error(corpus=str(path))


def test_a_bad_file_inside_a_folder_is_named(tmp_path):
    write(tmp_path / "good.txt")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "bad.md").write_bytes(b"\xe9t\xe9")
    corpus = corpora.open_corpus(DataConfig(corpus=str(tmp_path)))
    assert corpus.vocabulary.decode(corpus.train) == (VERSE * 20)[: len(corpus.train)]
    assert "text files of the folder" in corpus.description
    assert "(2 entries left out)" in corpus.description
    words = corpus.files.words
    assert "1 not UTF-8 (3 bytes; bad.md; read by --config.data.encoding=NAME)" in words
    assert "1 in UTF-16 (3 bytes; bad.txt; read by --config.data.encoding=utf-16)" in words
