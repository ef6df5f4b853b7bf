import pytest

from harness.domain.graph import Operator
from harness.domain.sharding import (
    cuttable_dims,
    full_blocks,
    full_shape,
    input_block,
    is_partial,
    may_have_copies,
    weight_cuts,
    weight_dims,
    weight_part,
)
from harness.errors import StrategyError


def op(kind, shape, **attrs):
    return Operator(name="o", kind=kind, shape=shape, attrs=attrs)


def test_samples_scale_from_the_graphs_batch():
    assert full_shape(op("linear", {"sample": 4, "feature": 3}), batch=10, graph_batch=4) == {
        "sample": 10,
        "feature": 3,
    }
    assert full_shape(op("other", {}), batch=10, graph_batch=None) == {"sample": 10}


def test_rows_of_several_samples_are_cut_between_samples():
    merged = op("linear", {"sample": 512, "feature": 6})  # 32 samples of 16 rows
    found = full_blocks(merged, {"sample": 3}, batch=32, graph_batch=32)
    assert [block[0] for block in found] == [(0, 160), (160, 336), (336, 512)]
    found = full_blocks(merged, {"sample": [1, 2], "feature": 2}, batch=4, graph_batch=32)
    assert [block[0] for block in found] == [(0, 16), (0, 16), (16, 64), (16, 64)]
    with pytest.raises(StrategyError, match="a dim of 2 elements cut into 3"):
        full_blocks(merged, {"sample": 3}, batch=2, graph_batch=32)


def test_linear_block_reads_all_features_of_its_samples():
    shape = {"sample": 8, "feature": 6}
    found = input_block(op("linear", shape), shape, ((0, 4), (3, 6)), {"sample": 8, "feature": 5})
    assert found == ((0, 4), (0, 5))


def test_convolution_block_reads_its_region_plus_halo_of_all_channels():
    shape = {"sample": 2, "feature": 4, "height": 8, "width": 8}
    conv = op("conv2d", shape, kernel=[3, 3], stride=[1, 1], padding=[1, 1])
    block = ((0, 2), (0, 2), (4, 8), (0, 8))
    producer = {"sample": 2, "feature": 3, "height": 8, "width": 8}
    assert input_block(conv, shape, block, producer) == ((0, 2), (0, 3), (3, 8), (0, 8))


def test_grouped_convolution_reads_the_channels_of_its_groups():
    shape = {"sample": 1, "feature": 8, "height": 4, "width": 4}
    conv = op("conv2d", shape, kernel=3, padding=1, groups=4)
    block = ((0, 1), (2, 4), (0, 4), (0, 4))
    producer = {"sample": 1, "feature": 16, "height": 4, "width": 4}
    assert input_block(conv, shape, block, producer)[1] == (4, 8)


def test_attention_gathers_keys_and_values_but_not_queries():
    shape = {"sample": 2, "seq": 8, "feature": 16}
    operator = op("attention", shape, n_heads=4)
    full = full_shape(operator, batch=2, graph_batch=2)
    assert cuttable_dims(operator, full) == ["sample", "seq", "heads"]
    assert is_partial(operator, "heads")
    block = ((0, 2), (0, 4), (0, 16), (0, 4))
    assert input_block(operator, full, block, shape) == ((0, 2), (0, 4), (0, 16))
    assert input_block(operator, full, block, shape, argument=1) == ((0, 2), (0, 8), (0, 16))


def test_weights_are_cut_with_features_and_copied_over_samples():
    operator = op("linear", {"sample": 8, "feature": 8})
    cuts = {"sample": 2, "feature": 2}
    parts = [weight_part(operator, ["sample", "feature"], cuts, k) for k in range(4)]
    assert parts == [0, 1, 0, 1]


def linear(shape, in_features, **fields):
    fields = {"parameter_bytes": 4, "inputs": ["x"], **fields}
    attrs = {"in_features": in_features}
    return Operator(name="o", kind="linear", shape=shape, attrs=attrs, **fields)


def test_a_linear_operator_is_cut_along_its_contraction_into_partial_sums():
    operator = linear({"sample": 4, "feature": 6}, 8)
    full = full_shape(operator, batch=4, graph_batch=4)
    assert list(full.items()) == [("sample", 4), ("feature", 6), ("contraction", 8)]
    assert cuttable_dims(operator, full) == ["sample", "feature", "contraction"]
    assert is_partial(operator, "contraction")
    assert not is_partial(operator, "feature")


def test_a_contraction_needs_weights_and_one_input():
    shape = {"sample": 4, "feature": 6}
    for fields in ({"parameter_bytes": 0}, {"inputs": []}, {"inputs": ["x", "y"]}):
        assert "contraction" not in full_shape(linear(shape, 8, **fields), batch=4, graph_batch=4)
    assert "contraction" not in full_shape(op("conv2d", shape), batch=4, graph_batch=4)


def test_weights_are_cut_by_feature_and_contraction_together():
    operator = linear({"sample": 4, "feature": 6}, 8)
    dims, cuts = ["sample", "feature", "contraction"], {"sample": 2, "feature": 2, "contraction": 2}
    parts = [weight_part(operator, dims, cuts, k) for k in range(8)]
    assert parts == [0, 1, 2, 3, 0, 1, 2, 3]
    assert weight_dims(operator) == ("feature", "contraction")


def test_a_layer_norm_is_cut_along_what_it_does_not_normalise():
    shape = {"sample": 2, "seq": 3, "feature": 4}
    assert cuttable_dims(op("layer_norm", shape, n_normalized=1), shape) == ["sample", "seq"]
    assert cuttable_dims(op("layer_norm", shape, n_normalized=2), shape) == ["sample"]
    assert cuttable_dims(op("layer_norm", shape), shape) == ["sample"]


def test_an_operator_of_a_written_buffer_is_on_one_device():
    shape = {"sample": 16, "feature": 4}
    for kind in ("elementwise", "other"):
        assert may_have_copies(op(kind, shape))
        writing = op(kind, shape, writes_buffers=["queue"])
        assert not cuttable_dims(writing, shape)
        assert not may_have_copies(writing)


def test_features_of_a_linear_operator_are_its_last_dim_or_cannot_be_cut():
    operator = linear({"sample": 2, "feature": 7, "height": 7, "width": 6}, 8)
    full = full_shape(operator, batch=2, graph_batch=2)
    assert cuttable_dims(operator, full) == ["sample", "contraction"]
    assert weight_dims(operator) == ("contraction",)
    producer = {"sample": 2, "feature": 7, "height": 7, "width": 8}
    block = ((0, 1), (0, 7), (0, 7), (0, 6), (4, 8))
    assert input_block(operator, full, block, producer) == ((0, 1), (0, 7), (0, 7), (4, 8))


def test_features_of_a_batch_norm_are_its_second_dim_or_cannot_be_cut():
    shape = {"sample": 2, "seq": 3, "feature": 4}
    assert cuttable_dims(op("batch_norm", shape), shape) == ["sample"]
    assert weight_dims(op("batch_norm", shape)) == ()


@pytest.mark.parametrize(
    ("attrs", "rows", "read"),
    [
        ({"kernel": [3, 3], "stride": [2, 2], "padding": [1, 1]}, (2, 4), (3, 8)),
        ({"kernel": [3, 3], "stride": [1, 1], "dilation": [2, 2]}, (0, 2), (0, 6)),
        # "same" for an even kernel pads one row less in front than behind.
        ({"kernel": [4, 4], "padding": [1, 1]}, (0, 4), (0, 6)),
        ({"kernel": [4, 4], "padding": [1, 1]}, (4, 8), (3, 8)),
    ],
)
def test_windows_of_a_convolution(attrs, rows, read):
    n_rows = 4 if "stride" in attrs and attrs["stride"] == [2, 2] else 8
    shape = {"sample": 1, "feature": 2, "height": n_rows, "width": 8}
    block = ((0, 1), (0, 2), rows, (0, 8))
    producer = {"sample": 1, "feature": 2, "height": 8, "width": 8}
    assert input_block(op("conv2d", shape, **attrs), shape, block, producer)[2] == read


def test_rows_are_not_cut_where_every_row_may_depend_on_all():
    shape = {"sample": 2, "feature": 4, "height": 7, "width": 7}
    assert cuttable_dims(op("pool", shape), shape) == ["sample", "feature"]
    circular = op("conv2d", shape, kernel=3, padding=1, padding_mode="circular")
    assert cuttable_dims(circular, shape) == ["sample", "feature"]


def test_attention_with_a_mask_keeps_sequences_whole():
    shape = {"sample": 2, "seq": 8, "feature": 16}
    operator = Operator(name="o", kind="attention", shape=shape, inputs=["q", "k", "v", "m"])
    assert cuttable_dims(operator, shape) == ["sample"]


def test_samples_are_cut_where_they_come_first_and_can_be_taken_apart():
    permuted = {"seq": 3, "sample": 4, "feature": 5}
    assert cuttable_dims(op("elementwise", permuted), permuted) == ["seq", "feature"]
    shape = {"sample": 4, "feature": 5}
    assert cuttable_dims(op("cat", shape, is_cut_by_samples=False), shape) == []


TAKEN = {"sample": 4, "feature": 8, "height": 3, "width": 6}  # samples, experts, slots, width


def einsum(shape, equation, summed, n_summed, **fields):
    attrs = {"equation": equation, "summed": summed, "n_summed": n_summed}
    return Operator(name="o", kind="einsum", shape=shape, attrs=attrs, **fields)


def test_experts_read_their_own_tokens_and_weights():
    shape = {**TAKEN, "width": 5}
    operator = einsum(shape, "necd,*edh->nech", "d", 6, parameter_bytes=960, inputs=["x"])
    full = full_shape(operator, batch=4, graph_batch=4)
    assert cuttable_dims(operator, full) == [*shape, "contraction"]
    assert weight_dims(operator) == ("feature", "width", "contraction")
    block = ((0, 4), (2, 4), (0, 3), (0, 5), (0, 6))
    assert input_block(operator, full, block, TAKEN) == ((0, 4), (2, 4), (0, 3), (0, 6))
    block = ((1, 2), (0, 8), (0, 3), (0, 5), (2, 4))
    assert input_block(operator, full, block, TAKEN) == ((1, 2), (0, 8), (0, 3), (2, 4))


def test_results_of_some_experts_are_a_partial_sum():
    tokens = {"sample": 4, "seq": 7, "feature": 6}
    operator = einsum(tokens, "ntec,necd->ntd", "e", 8, inputs=["w", "y"])
    full = full_shape(operator, batch=4, graph_batch=4)
    assert is_partial(operator, "contraction")
    block = ((0, 4), (0, 7), (0, 6), (4, 8))
    weights = {"sample": 4, "feature": 7, "height": 8, "width": 3}
    assert input_block(operator, full, block, weights)[1:] == ((0, 7), (4, 8), (0, 3))
    found = input_block(operator, full, block, TAKEN, argument=1)
    assert found == ((0, 4), (4, 8), (0, 3), (0, 6))


def test_an_embedding_by_rows_cuts_a_tied_weight_as_an_output_layer_by_features():
    shape = {"sample": 8, "seq": 4, "feature": 16}
    embedding, head = op("embedding", shape), op("linear", shape, summed=16)
    by_rows = weight_cuts(embedding, {"sample": 2, "contraction": 4})
    assert by_rows == weight_cuts(head, {"feature": 4}) == {0: 4}
    assert weight_cuts(embedding, {"feature": 4}) == {1: 4}
    assert weight_cuts(head, {"sample": 8}) == weight_cuts(op("elementwise", shape), {}) == {}
