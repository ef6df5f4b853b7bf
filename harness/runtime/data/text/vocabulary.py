"""A vocabulary file of WordPiece (vocab.txt of BERT): one token a line, its number the line's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from harness.errors import DataError
from harness.inputs import decode_text, read_file, shorten
from harness.runtime.models.task import PADDING

PAD, UNKNOWN, BEGIN, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class Vocabulary:
    """Tokens and their numbers.

    Text is written in lower case first, unless a token has a capital letter.

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
        """A tokenizer of the library `tokenizers`."""
        try:
            bert_wordpiece = import_module("tokenizers.implementations.bert_wordpiece")
        except ModuleNotFoundError as error:
            raise DataError(f"{error}: pip install tokenizers on every node") from error
        marks = {PAD, UNKNOWN, BEGIN, END, "[MASK]"}
        has_capitals = any(token != token.lower() for token in self._numbers.keys() - marks)
        kind = bert_wordpiece.BertWordPieceTokenizer
        return kind(vocab=self._numbers, lowercase=not has_capitals)
