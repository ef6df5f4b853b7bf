"""An RNN over packed sequences is one operator, which is cut by samples."""

import pytest
import torch
from nets import held, users_task
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from harness.errors import ModelError


class Tagger(nn.Module):
    def __init__(self, kind=nn.LSTM, reads="outputs", **unpacking):
        super().__init__()
        self.words, self.rnn = nn.Embedding(9, 4), kind(4, 3, 2, bidirectional=True)
        self.last, self.reads, self.unpacking = nn.Linear(6, 5), reads, unpacking

    def forward(self, tokens, lengths):
        x = self.words(tokens)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, state = self.rnn(packed)
        if self.reads == "both":
            _, state = self.rnn(x.transpose(0, 1))
        if self.reads in ("state", "both"):
            return self.last(torch.cat([state[-2], state[-1]], 1))
        if self.reads == "packed":
            return self.last(y.data[: len(x)])
        total = {"total_length": tokens.shape[1]} | self.unpacking
        y, counts = pad_packed_sequence(y, batch_first=True, **total)
        return self.last(y) / counts[:, None, None].to(y.device)


def captured(tagger):
    example = {"tokens": torch.randint(9, (3, 6)), "lengths": torch.tensor([2, 6, 5])}
    return held(users_task(tagger, example))


@pytest.mark.parametrize(
    ("kind", "reads"), [(nn.LSTM, "outputs"), (nn.GRU, "state"), (nn.RNN, "outputs")]
)
def test_packing_and_unpacking_are_one_operator_with_the_rnn(kind, reads):
    found = captured(Tagger(kind, reads))
    functions = [op.attrs.get("function") for op in found.graph.operators]
    assert f"Packed{kind.__name__}" in functions
    assert found.graph.mixing_operator() is None
    assert not any(
        "is_cut_by_samples" in op.attrs for op in found.graph.operators if op.weight_bytes
    )


@pytest.mark.parametrize(
    ("tagger", "message"),
    [
        (Tagger(total_length=None), "give it total_length=x.shape"),
        (Tagger(total_length=9), "makes 9 steps of 6"),
        (Tagger(padding_value=1.0), "another batch_first or padding_value"),
        (
            Tagger(nn.GRU, reads="both"),
            "calls 'rnn' with a packed sequence and with one that is not: pack",
        ),
        (Tagger(reads="packed"), "unpack it by pad_packed_sequence"),
    ],
)
def test_what_depends_on_the_lengths_is_refused_in_one_line(tagger, message):
    with pytest.raises(ModelError, match=message) as caught:
        captured(tagger)
    assert "\n" not in str(caught.value)
