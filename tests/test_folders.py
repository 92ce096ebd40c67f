"""A folder as a text: every entry is read, or left out and why; nothing waits, nothing is lost."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
from pathlib import Path

import jax
import numpy as np
import pytest
import report_workdirs
from corpus_texts import VERSE, error, write

from normjax import configs, regular_files
from normjax.data import corpora, text_files
from normjax.data.corpora import DataConfig
from normjax.errors import UserError
from normjax.reporting import report
from normjax.runs import estimates, files
from normjax.runs.grid import ExperimentConfig

pytestmark = pytest.mark.usefixtures("own_folders", "no_wait")


@pytest.fixture
def no_wait():
    """What takes longer than a minute waits for something: the test fails instead of hanging."""

    def stop(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def opened(path, **fields):
    return corpora.open_corpus(DataConfig(corpus=str(path), window=8, **fields))


def text_of(corpus):
    return corpus.vocabulary.decode(np.concatenate([corpus.train, corpus.held_out]))


def count(folder):
    """Count what is no folder, in another way than the program does."""
    return sum(
        len(files) + sum(os.path.islink(os.path.join(root, d)) for d in folders)
        for root, folders, files in os.walk(folder)
    )


def by_reason(corpus):
    return {group["reason"]: group["count"] for group in corpus.record()["files"]["left_out"]}


def full_of_everything(folder: Path) -> dict[str, int]:
    """Fill a folder with one or two of every kind of entry and return how many of each."""
    outside = folder.parent / "secret.txt"
    write(outside, "SECRET " * 99)
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / ".git" / "refs").mkdir(parents=True)
    write(folder / "a.txt")
    write(folder / "pkg" / "deep" / "b.md", VERSE)
    write(folder / "pkg" / "again.txt", VERSE)
    write(folder / "pkg" / "m.py")
    write(folder / "Makefile")
    write(folder / ".hidden.txt")
    write(folder / ".git" / "refs" / "x.txt")
    write(folder / "empty.txt", "")
    (folder / "image.txt").write_bytes(b"ab\0c" * 99)
    (folder / "latin.txt").write_bytes(b"na\xefve" * 9)
    (folder / "wide.txt").write_bytes(VERSE.encode("utf-16"))
    (folder / "out.txt").symlink_to(outside)
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "round.txt").symlink_to("round.txt")
    (folder / "nowhere.txt").symlink_to("nobody.txt")
    (folder / "up").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(folder, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/socket.txt")
        os.close(here)
    with open(folder / "sparse.txt", "wb") as file:
        file.truncate(1 << 40)
    (folder / "bad.txt.gz").write_bytes(b"\x1f\x8bno")
    (folder / "a.txt.gz").write_bytes(gzip.compress((VERSE * 20).encode()))
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.py")).write_text(VERSE)
    return {
        "with another ending": 3, "hidden": 2, "empty": 1, "binary": 1, "not UTF-8": 1,
        "in UTF-16": 1, "a link out of the folder": 2, "a link that leads nowhere": 2,
        "a link to a folder": 1, "not a regular file": 2, "too large": 1, "damaged gzip": 1,
        "the same text compressed": 1,
    }  # fmt: skip


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="a long path to a socket")
def test_every_entry_of_a_folder_is_accounted_for(tmp_path):
    folder = tmp_path / "folder"
    expected = full_of_everything(folder)
    corpus = opened(folder)
    assert by_reason(corpus) == expected
    record = corpus.record()["files"]
    assert record["read"] == 3 and record["repeated"] == 1
    assert record["read"] + sum(expected.values()) == count(folder)
    assert text_of(corpus) == "\n".join([VERSE * 20, "", VERSE, VERSE])
    assert "SECRET" not in text_of(corpus)
    assert f"({sum(expected.values())} entries left out)" in corpus.description
    assert r"caf\xe9.py" in record["words"]
    json.dumps(record, ensure_ascii=False).encode()  # it can be written to any page
    (large,) = (g for g in record["left_out"] if g["reason"] == "too large")
    assert large == {
        "reason": "too large", "count": 1, "bytes": 1 << 40, "names": ["sparse.txt"]
    }  # fmt: skip
    assert f"sparse.txt; read by --config.data.max_bytes={1 << 40})" in record["words"]


def test_a_folder_of_texts_leaves_nothing_out(tmp_path):
    write(tmp_path / "a.txt")
    write(tmp_path / "b.md")
    corpus = opened(tmp_path)
    assert corpus.record()["files"]["words"] == (
        "2 read (2,640 bytes, 1 of them repeat another's text), none left out"
    )
    assert "left out" not in corpus.description
    assert opened(tmp_path / "a.txt").files is None


def test_the_flags_that_an_account_names_read_what_was_left_out(tmp_path):
    """Of a folder of code: as it is said, word for word, until nothing of another name is left."""
    folder = tmp_path / "code"  # beside the cache
    folder.mkdir()
    for i in range(5):
        write(folder / f"m{i}.py", f"def f{i}(): return {i}\n" * 30)
    write(folder / "README.md")
    write(folder / "Makefile", "all:\n")
    first = opened(folder)
    assert by_reason(first) == {"with another ending": 6}
    (flag,) = re.findall(r"--config.data.suffixes=(\S+) \(5 of them\)", first.files.words)
    second = opened(folder, suffixes=tuple(flag.split(",")))
    assert by_reason(second) == {"with another ending": 1}
    assert text_of(second).count("def f") == 150
    (flag,) = re.findall(r"read by --config.data.suffixes=(\S+)\)", second.files.words)
    assert flag == "*"
    assert by_reason(opened(folder, suffixes=("*",))) == {}


def test_no_flag_is_named_that_would_read_nothing(tmp_path):
    """Pictures and archives are left out whatever is passed; a text among them is not."""
    write(tmp_path / "a.txt")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(bytes(999)))
    (tmp_path / "d.zip").write_bytes(b"PK\x03\x04\x14\0")
    (tmp_path / "e.latin").write_bytes(b"\xe9t\xe9 " * 3)
    assert "read by" not in text_files.read(str(tmp_path)).files.words
    (tmp_path / "f.tex.gz").write_bytes(gzip.compress(b"words " * 99))
    words = text_files.read(str(tmp_path)).files.words
    assert "read by --config.data.suffixes=.txt,.md,.tex (1 of them)" in words


@pytest.mark.parametrize("given", [".py", "py", "*.py", ".PY", ".Py"])
def test_an_ending_may_be_written_as_people_write_it(tmp_path, given):
    write(tmp_path / "a.py")
    write(tmp_path / "happy", "not this")
    assert text_of(opened(tmp_path, suffixes=(given,))) == VERSE * 20


def test_a_refused_folder_says_what_is_in_it_and_what_reads_it(tmp_path):
    write(tmp_path / "a.jsonl", '{"text": "words"}\n' * 30)
    message = error(corpus=str(tmp_path))
    assert "1 with another ending (540 bytes; a.jsonl; read by --config.data.field=NAME)" in message
    assert text_of(opened(tmp_path, field="text")) == "\n".join(["words"] * 30)


def test_the_account_is_shown_before_a_run_and_on_its_page(tmp_path):
    write(tmp_path / "folder.txt", "")  # beside the folder: no part of it
    folder = tmp_path / "code"
    folder.mkdir()
    write(folder / "a.txt")
    write(folder / "<b>.py")
    config = configs.replace(ExperimentConfig(), {"data.corpus": str(folder)})
    corpus = corpora.open_corpus(config.data)
    shown = estimates.describe([], corpus, jax.local_devices())
    assert "files: 1 read (1,320 bytes), 1 left out\n" in shown
    assert "    left out: 1 with another ending (1,320 bytes; <b>.py; read by " in shown
    workdir = report_workdirs.ablation(tmp_path / "work", seeds=1)
    without = report.write(workdir).read_text()
    plan = files.read_sealed(workdir / "grid.json")
    files.write_sealed(workdir / "grid.json", plan | {"corpus": corpus.record()})
    page = report.write(workdir).read_text()
    assert "Files of the corpus" in page and "Files of the corpus" not in without
    assert "1 left out: 1 with another ending (1,320 bytes; &lt;b&gt;.py; read by" in page


# --- other forms of text --------------------------------------------------------------------------


def test_compressed_texts_are_read_as_what_they_hold(tmp_path):
    plain = opened(write(tmp_path / "a.txt"))
    path = tmp_path / "b.txt.gz"
    data = gzip.compress((VERSE * 10).encode())
    path.write_bytes(data + data)  # of two members, as `cat a.gz b.gz` makes it
    assert opened(path).fingerprint == plain.fingerprint
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "b.txt.gz")
    assert opened(folder).fingerprint == plain.fingerprint
    for broken in (data[:-9], data[:-1], data + b"junk", b"plain", b"", data[:40] + b"x" * 9):
        path.write_bytes(broken)
        message = error(corpus=str(path))
        assert "named .gz and not whole gzip" in message or "empty or only blank" in message


def test_a_bomb_is_given_up_at_the_bound(tmp_path, monkeypatch):
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 50_000_000))
    assert path.stat().st_size < 60_000
    taken = []
    collected = regular_files.collected
    monkeypatch.setattr(
        regular_files, "collected",
        lambda file, most, look=None: collected(file, most, lambda p, n: taken.append(n + len(p))),
    )  # fmt: skip
    message = error(corpus=str(path), max_bytes=3_000_000)
    assert "has more than 3,000,000 bytes; pass --config.data.max_bytes=MORE" in message
    assert max(taken) <= 3_000_000
    monkeypatch.undo()
    (tmp_path / "zeros.txt.gz").write_bytes(gzip.compress(bytes(1 << 22)))
    assert "zero byte at offset 0" in error(corpus=str(tmp_path / "zeros.txt.gz"))


@pytest.mark.parametrize("over", [0, 1])
def test_the_bound_holds_for_a_file_and_for_a_folder(tmp_path, over):
    write(tmp_path / "a.txt", "ab" * 300)
    write(tmp_path / "b.txt", "ba" * 300)
    for path, size in ((tmp_path / "a.txt", 600), (tmp_path, 1200)):
        if over:
            message = error(corpus=str(path), max_bytes=size - 1)
            assert f"more than {size - 1:,}" in message
            assert f"pass --config.data.max_bytes={'MORE' if path.is_dir() else size}" in message
        else:
            assert opened(path, max_bytes=size).vocabulary_size in (2, 3)


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "cp037"]
)
def test_other_encodings(tmp_path, encoding):
    text = "naïve words, again\n" * 40
    expected = opened(write(tmp_path / "utf8.txt", text))
    path = tmp_path / "other.txt"
    path.write_bytes(text.encode(encoding))
    assert opened(path, encoding=encoding).fingerprint == expected.fingerprint
    (tmp_path / "utf8.txt").unlink()
    assert opened(tmp_path, encoding=encoding).fingerprint == expected.fingerprint
    if encoding in ("utf-16", "latin-1", "cp1252"):
        assert "--config.data.encoding=" in error(corpus=str(path))


@pytest.mark.parametrize(
    "encoding, words",
    [
        ("utf-17", "data.encoding='utf-17': no encoding of text has this name; did you mean"),
        ("rot13", "no encoding of text"),
        ("zip", "no encoding of text"),
        ("idna", "no encoding of text"),
        ("", "no encoding of text"),
        ("utf-8\0", "no encoding of text"),
    ],
)
def test_what_is_no_encoding(tmp_path, encoding, words):
    message = error(corpus=write(tmp_path / "t.txt"), encoding=encoding)
    assert words in message and "--config.data.encoding=utf-8" in message


def test_text_that_is_not_of_the_encoding_said(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"abc")
    message = error(corpus=str(path), encoding="utf-16-le")
    assert "not UTF-16-LE, byte 0x63 at offset 2" in message
    path.write_bytes("a\0b".encode("utf-16-le"))
    assert "zero character at 1" in error(corpus=str(path), encoding="utf-16-le")


def test_a_field_of_json_lines_is_the_text(tmp_path):
    documents = ["one\u2028line", "naïve\r\nwords", "", "漢字" * 50]
    lines = [json.dumps({"id": i, "body": d}) for i, d in enumerate(documents)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(["", *lines, "  "]))
    corpus = opened(path, field="body", vocabulary="byte")
    assert text_of(corpus) == "\n".join(documents).replace("\r\n", "\n")
    path.rename(tmp_path / "a.json")
    (tmp_path / "b.JSONL.gz").write_bytes(gzip.compress(lines[3].encode()))
    write(tmp_path / "c.txt", "plain")
    both = text_of(opened(tmp_path, field="body"))
    assert both == "\n".join([*documents, documents[3], "plain"]).replace("\r\n", "\n")


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"title": "x", "n": 1}', "line 2 has no text 'body', but title"),
        ('{"body": 3}', "line 2 is not an object of JSON with a text 'body'"),
        ('{"body": null}', "line 2 is not an object"),
        ('["body"]', "line 2 is not an object"),
        ("body", "line 2 is not an object"),
        ("[" * 99_999, "line 2 is not an object"),
        ('{"body": "\\ud800"}', "line 2 has half a pair"),
    ],
)
def test_every_line_must_have_the_field(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "words"}\n' + line + "\n")
    message = error(corpus=str(path), field="body")
    assert words in message and "--config.data.field=NAME" in message
    write(tmp_path / "b.txt")
    assert by_reason(opened(tmp_path, field="body")) == {"without 'body' in every line": 1}


@pytest.mark.parametrize("corpus", ["tfds:tiny_shakespeare", "task:copy"])
@pytest.mark.parametrize("fields", [{"field": "x"}, {"suffixes": (".py",)}, {"encoding": "cp1252"}])
def test_how_files_are_read_says_nothing_of_what_is_none(corpus, fields):
    (name,) = fields
    message = error(corpus=corpus, **fields)
    assert message.startswith(f"data.{name}=") and f"leave --config.data.{name} away" in message


# --- a path that is named -------------------------------------------------------------------------


def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("/dev/zero", "zero")
    os.symlink("loop", "loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name, words in (
        ("pipe", "is a pipe, not a file"),
        ("socket", "is a socket, not a file"),
        ("zero", "is a device, not a file"),
        ("/dev/zero", "is a device, not a file"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
    ):
        assert words in error(corpus=name)


def test_a_file_of_a_terabyte_is_refused_by_its_size(tmp_path):
    with open(tmp_path / "sparse.txt", "wb") as file:
        file.truncate(1 << 40)
    message = error(corpus=str(tmp_path / "sparse.txt"))
    assert f"has 1,099,511,627,776 bytes, more than {text_files.MOST_BYTES:,}" in message
    assert f"pass --config.data.max_bytes={1 << 40}" in message
    message = error(corpus=str(tmp_path / "sparse.txt"), max_bytes=1 << 40)
    assert "zero byte at offset 0" in message  # of which one piece was read


def test_names_that_are_not_utf8_or_not_one_line(tmp_path):
    for name in (b"caf\xe9.txt", b"two\nlines.txt"):
        path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
        Path(path).write_bytes(b"\xff" * 9)
    assert r"caf\xe9.txt: must be UTF-8; rename" in error(
        corpus=os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    )
    assert r"two\nlines.txt: not UTF-8" in error(corpus=str(tmp_path / "two\nlines.txt"))
    assert r"caf\xe9.txt, two\nlines.txt" in error(corpus=str(tmp_path))


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "log.txt")
    collected = regular_files.collected

    def meanwhile(file, most, look=None):
        data = collected(file, most, look)
        with open(path, "a") as log:
            log.write("one more line\n")
        return data

    monkeypatch.setattr(regular_files, "collected", meanwhile)
    assert "changed while it was read; pass a text that nobody writes to" in error(corpus=path)
    with pytest.raises(UserError, match="1 changed while it was read"):
        opened(tmp_path)


def test_a_folder_of_folders_without_end(tmp_path):
    """Deeper than a recursion, and than a path may be long."""
    before, deep = os.getcwd(), 1200
    write(tmp_path / "a.txt")
    try:
        os.chdir(tmp_path)
        for _ in range(deep):
            os.mkdir("dddd")
            os.chdir("dddd")
        Path("b.txt").write_text(VERSE)
        os.chdir(before)
        corpus = opened(tmp_path)
        assert text_of(corpus) == VERSE * 20
        assert by_reason(corpus) == {"unreadable: File name too long": 1}
    finally:
        os.chdir(tmp_path)
        for _ in range(deep):
            os.chdir("dddd")
        os.unlink("b.txt")
        for _ in range(deep):
            os.chdir("..")
            os.rmdir("dddd")
        os.chdir(before)


# --- any folder -----------------------------------------------------------------------------------

NAMES = ["a.txt", "b.md", "c.jsonl", "d.txt.gz", ".h.txt", "e.py", "é.txt", "f.TXT", "g"]


def random_folder(rng, folder):
    """Write files of random names and contents, some spoiled, and links among them."""
    folder.mkdir()
    for i in range(int(rng.integers(1, 9))):
        parent = folder / str(rng.choice(["", "sub", ".hid"]))
        parent.mkdir(exist_ok=True)
        path = parent / f"{i}{rng.choice(NAMES)}"
        text = "".join(rng.choice(list("ab é\n\r漢"), int(rng.integers(0, 300))))
        data = text.encode(str(rng.choice(["utf-8", "utf-8", "utf-16", "utf-8-sig"])))
        if path.name.endswith("l") and rng.random() < 0.8:
            data = json.dumps({"text": text}).encode()
        if path.suffix == ".gz" and rng.random() < 0.8:
            data = gzip.compress(data)
        data = bytearray(data)
        if data and rng.random() < 0.3:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        kind = rng.random()
        if kind < 0.1:
            os.mkfifo(path)
        elif kind < 0.2:
            path.symlink_to(rng.choice(["/dev/zero", "..", "0a.txt", "/etc/hostname", "."]))
        else:
            path.write_bytes(data)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 5000), marks=pytest.mark.slow)]
)
def test_any_folder_is_read_and_accounted_for_or_refused_in_one_line(tmp_path, seeds):
    outcomes = set()
    for seed in seeds:
        rng, folder = np.random.default_rng(seed), tmp_path / f"f{seed}"
        random_folder(rng, folder)
        how = text_files.How(
            suffixes=[(".txt", ".md"), ("*",), (".py",)][seed % 3],
            encoding=["utf-8", "utf-8", "latin-1", "utf-16"][seed % 4],
            field=["", "text"][seed % 2],
        )
        try:
            text = text_files.read(str(folder), (), how)
        except UserError as refused:
            assert "\n" not in str(refused) and "no text file" in str(refused), f"seed {seed}"
            outcomes.add("refused")
        else:
            assert text.files.read + text.files.missing == count(folder), f"seed {seed}"
            assert str(text.files.missing) in text.files.total or not text.files.missing
            outcomes.add("read")
    assert outcomes == {"read", "refused"}
