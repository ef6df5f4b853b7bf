"""Plain text for language models, and pairs of sentences for translation.

Text: every *.txt of a directory, or one file; all tokens in a row, with an end token after each
file, are cut into sequences. The target of a token is the next one.

Pairs: every *.tsv of a directory, or one file, with lines `source<TAB>target`. The decoder reads
the target shifted right, and its targets end with the end token.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import DataError
from harness.inputs import shorten
from harness.runtime.data.text.sequences import (
    TextData,
    Vocabulary,
    check_inputs,
    find_files,
    padded,
    read_text,
)
from harness.runtime.models.task import IGNORED, Task

_PAIR = "*.tsv with a source, a tab and a target on each line"


def text_files(data_dir: Path) -> list[Path]:
    """The files of plain text.

    Raises:
        DataError: there are none.
    """
    return find_files(data_dir, ".txt", "plain text in UTF-8")


def pair_files(data_dir: Path) -> list[Path]:
    """The files of pairs.

    Raises:
        DataError: there are none.
    """
    return find_files(data_dir, ".tsv", _PAIR)


def open_text(data_dir: Path, vocabulary: Vocabulary, task: Task) -> TextData:
    """Open plain text for a model that predicts the next token.

    Raises:
        DataError: the files are missing or no text, or the model takes other inputs.
    """
    length = check_inputs("text", task, (("tokens",),), "tokens")
    tokenizer = vocabulary.tokenizer()
    row: list[int] = []
    for path in text_files(data_dir):
        if path.resolve() == vocabulary.path.resolve():
            continue
        lines = read_text(path, "text file").split("\n")
        for found in tokenizer.encode_batch(lines, add_special_tokens=False):
            row += found.ids
        row.append(vocabulary.end)
    starts = range(0, len(row) - 1, length)
    tokens = padded([row[start : min(start + length, len(row) - 1)] for start in starts], length)
    targets = [row[start + 1 : start + 1 + length] for start in starts]
    return TextData((tokens,), padded(targets, length, IGNORED))


def open_pairs(data_dir: Path, vocabulary: Vocabulary, task: Task) -> TextData:
    """Open pairs for a model that predicts target tokens from source tokens; longer sentences than
    the model's sequence are cut.

    Raises:
        DataError: the files are missing or malformed, or the model takes other inputs.
    """
    length = check_inputs("pairs", task, (("source", "target"),), "tokens")
    sources: list[str] = []
    targets: list[str] = []
    for path in pair_files(data_dir):
        for number, line in enumerate(read_text(path, "pairs file").rstrip("\n").split("\n"), 1):
            source, tab, target = line.partition("\t")
            if not tab or not source.strip() or not target.strip() or "\t" in target:
                raise DataError(f"{path}: line {number} is {shorten(line)}: give {_PAIR}")
            sources.append(source)
            targets.append(target)
    tokenizer = vocabulary.tokenizer()

    def tokens_of(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [found.ids[: length - 1] for found in encoded]

    given, wanted = tokens_of(sources), tokens_of(targets)
    source_rows = padded([[*row, vocabulary.end] for row in given], length)
    shifted = padded([[vocabulary.begin, *row] for row in wanted], length)
    next_tokens = padded([[*row, vocabulary.end] for row in wanted], length, IGNORED)
    return TextData((source_rows, shifted), next_tokens)
