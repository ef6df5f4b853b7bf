"""Tokens of text, and the files that they come from.

A vocabulary file of WordPiece (vocab.txt of BERT): one token a line, its number the line's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.errors import DataError
from harness.inputs import decode_text, read_file, shorten
from harness.runtime.models.task import PADDING, Task

PAD, UNKNOWN, BEGIN, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class Vocabulary:
    """Tokens and their numbers.

    Text is written in lower case first, unless a token but those like [MASK] has a capital letter.

    Raises:
        DataError: the file is missing or has another layout.
        ConfigError: tokenizers is not installed.
    """

    def __init__(self, path: Path) -> None:
        data = read_file(path, "vocabulary file", DataError)
        lines = decode_text(data, f"vocabulary file {path}", DataError).rstrip("\n").split("\n")
        self.path = path
        self._numbers = {token: number for number, token in enumerate(lines)}
        if len(self._numbers) < len(lines):
            twice = next(t for number, t in enumerate(lines) if self._numbers[t] != number)
            raise DataError(
                f"vocabulary file {path} has {shorten(twice)} twice: a token is one line"
            )
        missing = [token for token in (PAD, UNKNOWN, BEGIN, END) if token not in self._numbers]
        if missing or self._numbers[PAD] != PADDING:
            lacks = f"lacks {', '.join(missing)}" if missing else f"does not begin with {PAD}"
            raise DataError(
                f"vocabulary file {path} {lacks}: give a vocab.txt of BERT, one token a line, "
                f"{PAD} first"
            )

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def begin(self) -> int:
        return self._numbers[BEGIN]

    @property
    def end(self) -> int:
        return self._numbers[END]

    def tokenizer(self) -> Any:
        try:
            bert_wordpiece = import_module("tokenizers.implementations.bert_wordpiece")
        except ModuleNotFoundError as error:
            raise DataError(f"{error}: pip install tokenizers on every node") from error
        has_capitals = any(t != t.lower() for t in self._numbers if not t.startswith("["))
        kind = bert_wordpiece.BertWordPieceTokenizer
        return kind(vocab=self._numbers, lowercase=not has_capitals)


_LARGEST_FILE_BYTES = 4 << 30


def padded(rows: Sequence[Sequence[int]], length: int, fill: int = PADDING) -> Tensor:
    """Rows of tokens as (rows, length); longer ones are cut."""
    found = torch.full((len(rows), length), fill, dtype=torch.int64)
    for number, row in enumerate(rows):
        kept = row[:length]
        found[number, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
    return found


def read_text(path: Path, kind: str) -> str:
    """Read a file of text.

    Raises:
        DataError: it is missing, or no UTF-8.
    """
    data = read_file(path, kind, DataError, _LARGEST_FILE_BYTES)
    return decode_text(data, f"{kind} {path}", DataError)


def find_file(data_dir: Path, names: Sequence[str], kind: str) -> list[Path]:
    """The file itself if a flag names one, else the first of `names` in the directory.

    Raises:
        DataError: there is none.
    """
    if data_dir.is_file():
        return [data_dir]
    for name in names:
        if (data_dir / name).is_file():
            return [data_dir / name]
    raise DataError(
        f"{data_dir} holds no {' or '.join(names)}: --data-dir and --held-out-dir take a directory "
        f"of {kind}, or the file itself"
    )


def find_files(data_dir: Path, suffix: str, kind: str) -> list[Path]:
    """The file itself if a flag names one, else all of a suffix in the directory, sorted.

    Raises:
        DataError: there is none.
    """
    found = [data_dir] if data_dir.is_file() else sorted(data_dir.glob(f"*{suffix}"))
    if not found:
        raise DataError(
            f"{data_dir} holds no *{suffix}: --data-dir and --held-out-dir take a directory of "
            f"{kind}, or a file"
        )
    return found


def check_inputs(name: str, task: Task, inputs: Sequence[Sequence[str]], targets: str) -> int:
    """Check that a task takes these inputs and targets; return the length of a sequence.

    Args:
        inputs: the possible names.
        targets: what a target is, for the error.
    """
    found = tuple(spec.name for spec in task.inputs)
    if found not in [tuple(each) for each in inputs] or len(task.inputs[0].shape) != 1:
        wanted = " or ".join(" and ".join(each) for each in inputs)
        raise DataError(
            f"--data {name} gives {wanted}, the model takes {' and '.join(found)}: choose a model "
            "of text that takes them"
        )
    length = task.inputs[0].shape[0]
    shapes = {"class": (), "span": (2,), "tokens": (length,)}
    if task.target_shape != shapes[targets]:
        raise DataError(
            f"--data {name} has targets of shape {shapes[targets]} ({targets}), the model's have "
            f"{task.target_shape}: change --head"
        )
    return length


def check_vocabulary(size: int, task: Task, path: Path) -> None:
    """Check that a model has a row for every token."""
    rows = task.inputs[0].n_values or 0
    if size > rows:
        raise DataError(
            f"vocabulary file {path} has {size} tokens, the model {rows}: raise --vocabulary-size"
        )
