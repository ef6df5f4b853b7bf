"""The MODELS table: published sizes, image sizes, DLRM's shapes."""

from dataclasses import replace

import pytest
import torch

from harness.errors import ModelError
from harness.runtime.models import build_task, fit_options
from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.task import IGNORED, DlrmOptions, ModelOptions, TextOptions


def on_meta(name, **options):
    with torch.device("meta"):
        return build_task(name, fit_options(name, ModelOptions(**options)))


@pytest.mark.parametrize(
    ("name", "n_parameters"),
    [
        ("lenet", 61_706),
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("inception_v3", 23_834_568),  # without the auxiliary classifier
        ("densenet121", 7_978_856),
        ("vit_b_16", 86_567_656),
        # 109,482,240, less 384 of 512 positions, and 1,538 of two classes.
        ("bert_base", 109_482_240 - 384 * 768 + 1_538),
        ("gpt2", 124_439_808),
        ("llama", 1_100_048_384),
    ],
)
def test_models_have_their_published_number_of_parameters(name, n_parameters):
    model = on_meta(name).model
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters


def test_the_datas_image_size_is_used_where_the_model_takes_it():
    assert fit_options("resnet50", ModelOptions(), 32, 3).image_size == 32
    assert fit_options("alexnet", ModelOptions(), 32, 3).image_size == 224
    assert fit_options("lenet", ModelOptions(), 32, 3).n_channels == 3


def test_data_of_other_channels_than_the_models_are_refused_before_it_is_built():
    with pytest.raises(ModelError, match="resnet18 takes images of 3 channels, the data has 1: us"):
        fit_options("resnet18", ModelOptions(), 8, 1)
    assert fit_options("package:net", ModelOptions(), 8, 1).n_channels == 1


def test_dlrm_dot_interaction_multiplies_every_pair_once():
    options = DlrmOptions(bottom_mlp=(4, 2), top_mlp=(5, 1), table_rows=(3, 3), interaction="dot")
    model = build_task("dlrm", ModelOptions(dlrm=options)).model
    vectors = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
    # the dense vector, then 2.1, 3.1 and 3.2
    assert model._interact(vectors).tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0]]


def test_dlrm_sums_several_lookups_of_a_table():
    options = DlrmOptions(bottom_mlp=(1, 2), top_mlp=(4, 1), table_rows=(5,), n_lookups=2)
    model = build_task("dlrm", ModelOptions(dlrm=options)).model
    table = model.tables[0].weight
    found = model.tables[0](torch.tensor([[1, 3]]))
    assert torch.allclose(found[0], table[1] + table[3])
    assert model(torch.zeros(1, 1), torch.tensor([[1, 3]])).shape == (1, 1)


def test_dropout_sets_every_layer_that_drops(monkeypatch, tmp_path):
    (tmp_path / "dropping.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)[0][:, -1]\n\n\n"
        "def net():\n"
        "    layers = nn.Dropout1d(), nn.AlphaDropout(), nn.GRU(4, 4, 2, dropout=0.5)\n"
        "    return Net(*layers), torch.rand(2, 3, 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    drops, alpha, recurrent = build_task("dropping:net", ModelOptions(dropout=0.0)).model
    assert (drops.p, alpha.p, recurrent.dropout) == (0, 0, 0)
    build_task("lenet", fit_options("lenet", ModelOptions(dropout=0.0)))  # as it is anyhow
    with pytest.raises(ModelError, match="of a model, and lenet has none: drop it"):
        build_task("lenet", fit_options("lenet", ModelOptions(dropout=0.3)))


def test_losses_are_sums_over_samples():
    task = build_task("lenet", fit_options("lenet", ModelOptions()))
    outputs, targets = torch.zeros(6, 10), torch.arange(6)
    assert float(task.sum_loss(outputs, targets)) == pytest.approx(6 * 2.302585, rel=1e-6)


def test_sizes_of_text_keep_the_models_ratios():
    text = TextOptions(width=64, n_heads=8, sequence_length=16)
    fitted = fit_options("llama", ModelOptions(text=text)).text
    assert (fitted.n_groups, fitted.mlp_width, fitted.n_layers) == (1, 176, 22)
    task = on_meta("t5", text=replace(text, n_layers=1, vocabulary_size=9))
    assert (task.n_tokens, task.target_shape, task.n_classes) == (32, (16,), 9)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("dlrm", {"top_mlp": (500, 1)}, "starts with 500, but 8 tables of width 64"),
        ("dlrm", {"top_mlp": (576, 2)}, "ends with 2 outputs"),
        ("dlrm", {"table_rows": ()}, "0 tables"),
        ("gpt2", {"width": 100}, "width 100 and 12 heads.*multiple of 24"),
        ("llama", {"n_groups": 3}, "32 heads in 3 groups"),
        ("gpt2", {"head": "span"}, "predicts tokens, not span"),
        ("gpt2", {"n_experts": 4}, "gpt2 has no mixture of experts, and --n-experts is 4"),
        ("llama", {"n_experts": 2, "n_experts_per_token": 3}, "a token of llama has 3 of 2 expert"),
        ("llama", {"capacity_factor": 2.0}, "llama has no experts, so it has no --n-experts-per-t"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, sizes, message):
    is_dlrm = name == "dlrm"
    options = {"dlrm": DlrmOptions(**sizes)} if is_dlrm else {"text": TextOptions(**sizes)}
    with pytest.raises(ModelError, match=message):
        fit_options(name, ModelOptions(**options))


def test_a_later_query_of_a_causal_attention_sees_what_comes_before_it():
    torch.manual_seed(0)
    attention = GroupedAttention(16, 4, n_groups=2, is_causal=True, rotary_base=1e4, n_buckets=8)
    x = torch.randn(2, 6, 16)
    whole = attention(x, x)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(attention(changed, changed)[:, :4], whole[:, :4])
    mask = torch.ones(2, 6, dtype=torch.bool)
    assert torch.allclose(attention(x, x, mask), whole, atol=1e-6)  # float32, sums of 16


def test_targets_of_padding_have_no_loss():
    task = on_meta("gpt2", text=TextOptions(sequence_length=3, vocabulary_size=4))
    outputs = torch.zeros(1, 3, 4)
    loss = task.sum_loss(outputs, torch.tensor([[1, IGNORED, 2]]))
    assert float(loss) == pytest.approx(2 * 1.386294, rel=1e-6)
