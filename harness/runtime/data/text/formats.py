"""Files of text as their authors lay them out.

Text: every *.txt of a directory, or one file; all tokens in a row, with an end token after each
file, are cut into sequences. The target of a token is the next one.

Pairs, for translation: every *.tsv of a directory, or one file, with lines `source<TAB>target`. The
decoder reads the target shifted right, and its targets end with the end token.

SQuAD: train-v1.1.json or train-v2.0.json. A paragraph that is longer than the model's sequence
gives several samples, whose windows overlap. The target is the first and last token of the answer,
or twice the first token of the sequence ([CLS]) where the window has no answer.

SST-2, as in GLUE: train.tsv with a line `sentence<TAB>label` first and labels 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from harness.domain.files import decode
from harness.errors import DataError
from harness.inputs import read_file, shorten
from harness.runtime.data.batch import MemoryData
from harness.runtime.data.text.sequences import (
    Vocabulary,
    check_inputs,
    find_file,
    find_files,
    padded,
    read_text,
)
from harness.runtime.models.task import IGNORED, Task

_PAIR = "*.tsv with a source, a tab and a target on each line"


text_files = partial(find_files, suffix=".txt", kind="plain text in UTF-8")
pair_files = partial(find_files, suffix=".tsv", kind=_PAIR)


def open_text(data_dir: Path, vocabulary: Vocabulary, task: Task) -> MemoryData:
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
    return MemoryData((tokens,), padded(targets, length, IGNORED))


def open_pairs(data_dir: Path, vocabulary: Vocabulary, task: Task) -> MemoryData:
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
    return MemoryData((source_rows, shifted), next_tokens)


_KIND = "train-v1.1.json or train-v2.0.json of SQuAD"
_LARGEST_BYTES = 1 << 30
# Longest question in tokens, as in BERT.
_LONGEST_QUESTION = 64


class _Answer(msgspec.Struct):
    text: str
    answer_start: int


class _Question(msgspec.Struct):
    id: str
    question: str
    answers: list[_Answer] = []
    is_impossible: bool = False


class _Paragraph(msgspec.Struct):
    context: str
    qas: list[_Question]


class _Article(msgspec.Struct):
    paragraphs: list[_Paragraph]


class _Squad(msgspec.Struct):
    data: list[_Article]


squad_file = partial(find_file, names=("train-v1.1.json", "train-v2.0.json"), kind=_KIND)


def _read(path: Path) -> Iterator[tuple[str, _Question, tuple[int, int] | None]]:
    """Yield context, question, and first and last character of the answer."""
    data = read_file(path, _KIND, DataError, _LARGEST_BYTES)
    squad = decode(data, _Squad, source=f"{path}, which should be {_KIND}", error=DataError)
    for article in squad.data:
        for paragraph in article.paragraphs:
            for question in paragraph.qas:
                yield paragraph.context, question, _place(path, paragraph.context, question)


def _place(path: Path, context: str, question: _Question) -> tuple[int, int] | None:
    if question.is_impossible or not question.answers:
        return None
    answer = question.answers[0]
    start, stop = answer.answer_start, answer.answer_start + len(answer.text)
    if start < 0 or not answer.text or context[start:stop] != answer.text:
        raise DataError(
            f"{path}: question {shorten(question.id)} has the answer {shorten(answer.text)} at "
            f"{start}, where its context has {shorten(context[max(0, start) : stop])}: "
            "give the file as its authors published it"
        )
    return start, stop - 1


def _span(window: Any, place: tuple[int, int] | None) -> tuple[int, int]:
    """First and last token of an answer in a window; twice 0 if it is not whole in it."""
    if place is None:
        return 0, 0
    of_context = [
        (number, offsets)
        for number, (offsets, sequence) in enumerate(
            zip(window.offsets, window.sequence_ids, strict=True)
        )
        if sequence == 1
    ]
    first = [number for number, (low, high) in of_context if low <= place[0] < high]
    last = [number for number, (low, high) in of_context if low <= place[1] < high]
    return (first[0], last[-1]) if first and last else (0, 0)


def open_squad(data_dir: Path, vocabulary: Vocabulary, task: Task) -> MemoryData:
    """Open the training questions.

    Raises:
        DataError: the file is missing or malformed, or the model takes other inputs.
    """
    length = check_inputs("squad", task, (("tokens", "segments"), ("tokens",)), "span")
    if length < 16:
        raise DataError(
            f"--sequence-length {length} leaves no room for a question and a paragraph of squad: "
            "give at least 16"
        )
    plain, tokenizer = vocabulary.tokenizer(), vocabulary.tokenizer()
    longest = min(_LONGEST_QUESTION, length // 2 - 3)
    tokenizer.enable_truncation(length, stride=length // 4, strategy="only_second")
    rows: list[list[int]] = []
    segments: list[list[int]] = []
    spans: list[tuple[int, int]] = []
    for context, question, place in _read(*squad_file(data_dir)):
        asked = plain.encode(question.question, add_special_tokens=False)
        cut = asked.offsets[longest - 1][1] if len(asked.ids) > longest else None
        found = tokenizer.encode(question.question[:cut], context)
        for window in (found, *found.overflowing):
            rows.append(window.ids)
            segments.append(window.type_ids)
            spans.append(_span(window, place))
    inputs = (padded(rows, length), padded(segments, length))[: len(task.inputs)]
    return MemoryData(inputs, torch.tensor(spans, dtype=torch.int64).reshape(-1, 2))


_HEADER = "sentence\tlabel"
_SST2 = "train.tsv of SST-2"


sst2_file = partial(find_file, names=("train.tsv", "SST-2/train.tsv"), kind=_SST2)


def _read_sentences(path: Path) -> tuple[list[str], list[int]]:
    header, *lines = read_text(path, _SST2).rstrip("\n").split("\n")
    if header != _HEADER:
        raise DataError(f"{path} begins with {shorten(header)}, not {_HEADER!r}: give {_SST2}")
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


def open_sst2(data_dir: Path, vocabulary: Vocabulary, task: Task) -> MemoryData:
    """Open the training sentences; longer ones than the model's sequence are cut.

    Raises:
        DataError: the file is missing or malformed, or the model takes other inputs.
    """
    length = check_inputs("sst2", task, (("tokens", "segments"), ("tokens",)), "class")
    sentences, labels = _read_sentences(*sst2_file(data_dir))
    tokenizer = vocabulary.tokenizer()
    tokenizer.enable_truncation(length)
    tokens = padded([found.ids for found in tokenizer.encode_batch(sentences)], length)
    inputs = (tokens, torch.zeros_like(tokens))[: len(task.inputs)]
    return MemoryData(inputs, torch.tensor(labels))
