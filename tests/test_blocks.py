import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from torch import nn

from fedmask import BlockError, Blocks, bernoulli_mask
from fedmask.blocks import average_buffers
from fedmask.federated import resnet18

from .strategies import cohorts


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.encoder.weight


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@given(cohorts())
def test_blocks_cover_every_parameter_once_in_flat_order(cohort):
    blocks = cohort.blocks
    assert blocks.sizes.sum() == blocks.parameters == sum(math.prod(shape) for shape in blocks.shapes)
    assert len(blocks.block_names) == len(set(blocks.block_names)) == blocks.count
    assert [blocks.block_name(b) for b in range(blocks.count)] == list(blocks.block_names)
    stops = [0, *(piece.stop for piece in blocks.pieces)]
    assert [piece.start for piece in blocks.pieces] == stops[:-1]


@given(cohorts())
def test_flat_and_named_are_inverse_and_views_share_memory(cohort):
    flat = cohort.updates[0].clone()
    views = cohort.blocks.views(flat)
    assert torch.equal(cohort.blocks.flatten(views), flat)
    for view in views.values():
        view.fill_(7)
    assert torch.all(flat == 7)


@pytest.mark.parametrize(
    ("granularity", "names", "sizes"),
    [
        (
            "element",
            [
                "0.weight[0,0]",
                "0.weight[0,1]",
                "0.weight[1,0]",
                "0.weight[1,1]",
                "0.bias[0]",
                "0.bias[1]",
                "1.weight[0,0]",
                "1.weight[0,1]",
                "1.bias[0]",
            ],
            [1] * 9,
        ),
        (
            "row",
            ["0.weight[0]", "0.weight[1]", "0.bias[0]", "0.bias[1]", "1.weight[0]", "1.bias[0]"],
            [2, 2, 1, 1, 2, 1],
        ),
        ("tensor", ["0.weight", "0.bias", "1.weight", "1.bias"], [4, 2, 2, 1]),
        ("layer", ["0", "1"], [6, 3]),
        ("model", ["model"], [9]),
    ],
)
def test_granularities_of_a_small_model(granularity, names, sizes):
    blocks = Blocks.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), granularity)
    assert list(blocks.block_names) == names
    assert blocks.sizes.tolist() == sizes


def test_resnet18_has_62_tensors():
    assert Blocks.of(resnet18()).count == 62


def test_tied_parameters_stand_once():
    model = Tied()
    for source in (model, model.state_dict()):
        blocks = Blocks.of(source)
        assert blocks.names == ("encoder.weight", "decoder.weight")
        assert blocks.aliases == {"head.weight": "encoder.weight"}
        assert torch.equal(blocks.flatten(model.state_dict()), blocks.flatten(tensors(model)))


def test_tied_parameters_that_differ_are_refused():
    blocks, state = Blocks.of(Tied()), Tied().state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}
    state["head.weight"] += 1
    with pytest.raises(BlockError, match=r"'head.weight' and 'encoder.weight' are tied"):
        blocks.flatten(state)


def test_tensors_are_matched_by_name_not_by_order():
    model = nn.Sequential(OrderedDict(conv2=nn.Conv2d(1, 1, 3), conv10=nn.Conv2d(1, 1, 3)))
    blocks = Blocks.of(model)
    state = tensors(model)
    reordered = {name: state[name] for name in sorted(state)}
    assert list(reordered) != list(state)
    assert torch.equal(blocks.flatten(reordered), blocks.flatten(state))


def test_a_compiled_wrapped_or_parallel_model_has_the_same_blocks_and_masks():
    model = resnet18()
    blocks = Blocks.of(model)
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in tensors(model).items()}
    inner = {name.replace("layer1.0.", "layer1.0._checkpoint_wrapped_module."): t for name, t in tensors(model).items()}
    for other in (
        Blocks.of(torch.compile(model)),
        Blocks.of(nn.DataParallel(model)),
        Blocks.of(compiled),
        Blocks.of(inner),
    ):
        assert other == blocks
    assert torch.equal(blocks.flatten(compiled), blocks.flatten(tensors(model)))
    parallel = nn.DataParallel(model).state_dict()
    assert torch.equal(blocks.flatten(parallel), blocks.flatten(tensors(model)))
    draw = {"seed": 1, "round_": 1, "client": 1, "p": 0.5}
    one, other = (bernoulli_mask(blocks=b.count, **draw) for b in (blocks, Blocks.of(torch.compile(model))))
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("1.bias"), "'1.bias' is missing"),
        (lambda state: state.update({"2.weight": torch.zeros(1)}), "'2.weight' is unknown"),
        (lambda state: state.update({"0.weight": torch.zeros(2, 3)}), r"'0.weight' has shape \(2, 3\)"),
        (lambda state: state.update({"_orig_mod.1.bias": torch.zeros(1)}), "one canonical name"),
    ],
)
def test_an_unknown_missing_or_misshaped_tensor_is_refused_and_nothing_written(change, message):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    state = tensors(model)
    change(state)
    blocks = Blocks.of(model)
    out = torch.full((blocks.parameters,), 5.0)
    with pytest.raises(BlockError, match=message):
        blocks.flatten(state, out=out)
    assert torch.all(out == 5)


def test_a_model_without_parameters_or_with_integer_ones_is_refused():
    with pytest.raises(BlockError, match="no parameters"):
        Blocks.of(nn.ReLU())
    with pytest.raises(BlockError, match="only floating types"):
        Blocks.of({"steps": torch.zeros(2, dtype=torch.int64)})


def test_binding_makes_parameters_views_of_the_flat_vector():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    blocks = Blocks.of(model)
    flat = torch.arange(float(blocks.parameters))
    blocks.bind(model, flat)
    assert model[1].bias.item() == flat[-1]
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.all(flat[:4] == 0)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert flat[-1] == blocks.parameters - 2


def test_buffers_have_no_block_and_integers_stay_integers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not any("running" in name or "num_batches" in name for name in Blocks.of(model).names)
    cohort = [
        {"mean": torch.tensor([1.0, 0.0]), "steps": torch.tensor(2**60 + 1), "seen": torch.tensor([True, False])},
        {"mean": torch.tensor([3.0, 4.0]), "steps": torch.tensor(7), "seen": torch.tensor([False, False])},
    ]
    merged = average_buffers(cohort, [0.75, 0.25])
    assert merged["mean"].tolist() == [1.5, 1.0]
    assert merged["steps"].dtype == torch.int64
    assert merged["steps"].item() == 2**60 + 1
    assert merged["seen"].tolist() == [True, False]
    with pytest.raises(BlockError, match="'mean' is missing"):
        average_buffers([cohort[0], {"steps": torch.tensor(7)}], [0.5, 0.5])
