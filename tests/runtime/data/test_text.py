"""Data sets of text: tokens and targets that files give, and files that are refused."""

import json
from dataclasses import replace

import pytest
import torch

from harness.errors import DataError
from harness.runtime.data import (
    DATA,
    DataOptions,
    count_targets,
    fit_to_data,
    open_data,
    open_held_out,
)
from harness.runtime.models import build_task
from harness.runtime.models.task import IGNORED, DlrmOptions, ModelOptions, TextOptions

pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", ".", "who", "?", "mat"]
NUMBER = {word: number for number, word in enumerate(WORDS)}


def options(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    if not vocabulary.exists():
        vocabulary.write_text("\n".join(WORDS) + "\n")
    return DataOptions(data_dir=tmp_path, dlrm=DlrmOptions(), vocabulary=vocabulary)


def task_of(model, data, tmp_path, length=6, **sizes):
    text = TextOptions(sequence_length=length, n_layers=1, width=8, n_heads=2, **sizes)
    fitted = fit_to_data(model, ModelOptions(text=text), data, options(tmp_path))
    return build_task(model, fitted)


def opened(model, data, tmp_path, length=6):
    task = task_of(model, data, tmp_path, length)
    return open_data(data, options(tmp_path), task, 2), task


def numbers(text):
    return [NUMBER[word] for word in text.split()]


def test_sst2_gives_classes_of_sentences(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nThe cats sat \t1\nmat mat dog.\t0\n")
    data, task = opened("bert_base", "sst2", tmp_path)
    (tokens, segments), targets = data.__getitems__([0, 1])
    assert tokens.tolist() == [
        numbers("[CLS] the cat ##s sat [SEP]"),
        numbers("[CLS] mat mat [UNK] . [SEP]"),
    ]
    assert (int(segments.sum()), targets.tolist(), task.n_classes) == (0, [1, 0], 2)
    assert count_targets(data, task, [0, 1]) == (1, 1)


def squad(**question):
    asked = {"id": "q1", "question": "Who sat?", **question}
    paragraph = {"context": "the mat . the mat . the cats sat.", "qas": [asked]}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


def test_squad_gives_spans_in_overlapping_windows(tmp_path):
    answer = {"text": "cats", "answer_start": 24}
    (tmp_path / "train-v1.1.json").write_text(squad(answers=[answer]))
    data, task = opened("bert_base", "squad", tmp_path, length=16)
    # [CLS] who sat ? [SEP], then 10 of the context's 11 tokens or the last 5, then [SEP].
    assert len(data) == 2
    (tokens, segments), spans = data.__getitems__([0, 1])
    for row, (first, last) in zip(tokens, spans, strict=True):
        assert row[first : last + 1].tolist() == numbers("cat ##s")
    assert segments[0].tolist() == [0] * 5 + [1] * 11
    assert count_targets(data, task, [0]) == (2,)
    assert int(segments[1].sum()) == int((tokens[1] != 0).sum()) - 5


def test_a_question_without_an_answer_points_to_the_first_token(tmp_path):
    (tmp_path / "train-v2.0.json").write_text(squad(answers=[], is_impossible=True))
    data, _ = opened("bert_base", "squad", tmp_path, length=24)
    assert data[0].targets.tolist() == [[0, 0]]


def test_plain_text_predicts_the_next_token(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\non the mat.\n")
    data, task = opened("gpt2", "text", tmp_path)
    (tokens,), targets = data.__getitems__([0, 1])
    row = numbers("the cat sat [UNK] the mat . [SEP]")
    assert tokens.tolist() == [row[:6], [row[6], 0, 0, 0, 0, 0]]
    assert targets.tolist() == [row[1:7], [row[7], *[IGNORED] * 5]]
    assert count_targets(data, task, [1, 0]) == (1, 6)


def test_capitals_of_special_tokens_do_not_tell_that_text_keeps_its_own(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "[EOS]"]))
    (tmp_path / "a.txt").write_text("The Cat")
    data, _ = opened("gpt2", "text", tmp_path)
    assert data[0].inputs[0][0, :2].tolist() == numbers("the cat")


def test_pairs_shift_the_target(tmp_path):
    (tmp_path / "a.tsv").write_text("the cat\tmat sat .\n")
    data, _ = opened("nmt", "pairs", tmp_path)
    (source, target), targets = data[0]
    assert source.tolist() == [[*numbers("the cat [SEP]"), 0, 0, 0]]
    assert target.tolist() == [[*numbers("[CLS] mat sat ."), 0, 0]]
    assert targets.tolist() == [[*numbers("mat sat . [SEP]"), IGNORED, IGNORED]]


def test_held_out_text_is_that_of_another_file(tmp_path):
    (tmp_path / "a.txt").write_text("the cat\n")
    (tmp_path / "val").mkdir()
    held_out = tmp_path / "val" / "b.txt"
    held_out.write_text("mat sat .\n")
    given, task = options(tmp_path), task_of("gpt2", "text", tmp_path)
    data = open_held_out("text", replace(given, held_out_dir=held_out), task, 2)
    assert data[0].inputs[0][0, :3].tolist() == numbers("mat sat .")
    DATA["text"].check(replace(given, held_out_dir=held_out.parent))
    file = tmp_path / "a.txt"
    for trained, other in ((tmp_path, file), (file, tmp_path)):
        with pytest.raises(DataError, match=r"a.txt of --held-out-dir is among the files of --da"):
            DATA["text"].check(replace(given, data_dir=trained, held_out_dir=other))
    with pytest.raises(DataError, match=r"^--held-out-dir is --data-dir .*: give data of its own"):
        open_held_out("text", replace(given, held_out_dir=tmp_path), task, 2)
    with pytest.raises(
        DataError, match=r"^/.*val holds no train.tsv .*--held-out-dir take .* or the file itself$"
    ):
        DATA["sst2"].check(replace(given, data_dir=file, held_out_dir=held_out.parent))
    held_out.write_text("")
    with pytest.raises(DataError, match="val holds out no sample: leave out --evaluate"):
        open_held_out("text", replace(given, held_out_dir=held_out.parent), task, 2)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.tsv", "text\tlabel\n", "begins with 'text.tlabel', not 'sentence.tlabel'"),
        ("train.tsv", "sentence\tlabel\ngood\t2\n", "line 2 is 'good.t2'"),
        ("train.tsv", b"sentence\tlabel\n\xff\t1\n", "not UTF-8"),
        ("train-v1.1.json", '{"data": [{"paragraphs": 3}]}', "train-v1.1.json.*data.0"),
        (
            "train-v1.1.json",
            squad(answers=[{"text": "dog", "answer_start": 4}]),
            "answer 'dog' at 4, where its context has 'mat'",
        ),
        ("a.tsv", "the cat\n", "line 1 is 'the cat'"),
        ("empty.txt", "", "holds no sample"),
        ("train.tsv", "sentence\tlabel\n", "holds no sample"),
        ("train-v2.0.json", '{"data": []}', "holds no sample"),
        ("vocab.txt", "[UNK]\n[CLS]\n", "lacks .PAD., .SEP."),
        ("vocab.txt", "[UNK]\n[PAD]\n[CLS]\n[SEP]\n", "does not begin with .PAD."),
        ("vocab.txt", "[PAD]\nx\nx\n", "has 'x' twice"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, file, content, message):
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    names = {".tsv": ("nmt", "pairs"), ".txt": ("gpt2", "text"), ".json": ("bert_base", "squad")}
    model, data = ("bert_base", "sst2") if file == "train.tsv" else names[path.suffix]
    with pytest.raises(DataError, match=message) as found:
        opened(model, data, tmp_path, length=16)
    assert "\n" not in str(found.value)


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("the cat\n")
    task = task_of("gpt2", "text", tmp_path, vocabulary_size=5)
    with pytest.raises(DataError, match="has 12 tokens, the model 5"):
        open_data("text", options(tmp_path), task, 1)


def test_the_mean_over_targets_does_not_depend_on_how_a_batch_is_divided(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\non the mat.\n")
    data, task = opened("gpt2", "text", tmp_path)
    task.model.eval()
    whole = data.__getitems__([0, 1])
    n_targets = sum(count_targets(data, task, [0, 1]))
    apart = sum(task.sum_loss(task.model(*b.inputs), b.targets) for b in (data[0], data[1]))
    logits = task.model(*whole.inputs)
    kept = whole.targets != IGNORED
    mean = torch.nn.functional.cross_entropy(logits[kept], whole.targets[kept])
    # float32: sums of 7 terms in another order
    assert float(apart.detach()) / n_targets == pytest.approx(float(mean.detach()), rel=1e-5)
