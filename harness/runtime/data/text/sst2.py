"""SST-2 as GLUE lays it out: train.tsv with a line `sentence<TAB>label` first, labels 0 and 1."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.errors import DataError
from harness.inputs import shorten
from harness.runtime.data.text.sequences import (
    TextData,
    Vocabulary,
    check_inputs,
    find_file,
    padded,
    read_text,
)
from harness.runtime.models.task import Task

_HEADER = "sentence\tlabel"
_KIND = "train.tsv of SST-2"


def sst2_file(data_dir: Path) -> Path:
    """The file of training sentences.

    Raises:
        DataError: it is missing.
    """
    return find_file(data_dir, ("train.tsv", "SST-2/train.tsv"), _KIND)


def _read(path: Path) -> tuple[list[str], list[int]]:
    header, *lines = read_text(path, _KIND).rstrip("\n").split("\n")
    if header != _HEADER:
        raise DataError(f"{path} begins with {shorten(header)}, not {_HEADER!r}: give {_KIND}")
    sentences: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(lines, start=2):
        sentence, _, label = line.rpartition("\t")
        if label not in ("0", "1") or not sentence.strip():
            raise DataError(
                f"{path}: line {number} is {shorten(line)}, not a sentence, a tab and 0 or 1"
            )
        sentences.append(sentence.strip())
        labels.append(int(label))
    return sentences, labels


def open_sst2(data_dir: Path, vocabulary: Vocabulary, task: Task) -> TextData:
    """Open the training sentences; longer ones than the model's sequence are cut.

    Raises:
        DataError: the file is missing or malformed, or the model takes other inputs.
    """
    length = check_inputs("sst2", task, (("tokens", "segments"), ("tokens",)), "class")
    sentences, labels = _read(sst2_file(data_dir))
    tokenizer = vocabulary.tokenizer()
    tokenizer.enable_truncation(length)
    tokens = padded([found.ids for found in tokenizer.encode_batch(sentences)], length)
    inputs = (tokens, torch.zeros_like(tokens))[: len(task.inputs)]
    return TextData(inputs, torch.tensor(labels))
