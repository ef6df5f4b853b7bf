from harness.domain.graph import Operator
from harness.domain.sharding import cuttable_dims, full_shape, input_block, is_partial, weight_part


def op(kind, shape, **attrs):
    return Operator(name="o", kind=kind, shape=shape, attrs=attrs)


def test_samples_scale_from_the_graphs_batch():
    assert full_shape(op("linear", {"sample": 4, "feature": 3}), batch=10, graph_batch=4) == {
        "sample": 10,
        "feature": 3,
    }
    assert full_shape(op("other", {}), batch=10, graph_batch=None) == {"sample": 10}


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


def test_adaptive_pool_reads_the_whole_plane_of_its_own_channels():
    shape = {"sample": 2, "feature": 4, "height": 1, "width": 1}
    block = ((0, 1), (2, 4), (0, 1), (0, 1))
    producer = {"sample": 2, "feature": 4, "height": 7, "width": 7}
    assert input_block(op("pool", shape), shape, block, producer) == (
        (0, 1),
        (2, 4),
        (0, 7),
        (0, 7),
    )


def test_add_that_broadcasts_reads_the_small_dim_whole():
    shape = {"sample": 4, "feature": 8}
    found = input_block(op("add", shape), shape, ((0, 4), (0, 4)), {"sample": 4, "feature": 1})
    assert found == ((0, 4), (0, 1))


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
