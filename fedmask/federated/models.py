"""The paper's network, ResNet-18 with GroupNorm, and a small one for small images; and how to train them fast.

With the torchvision stem the last stage of ResNet-18 sees images of one pixel, where a 3×3 kernel with padding
meets nothing but padding outside its middle. :func:`crop_kernels` cuts such taps away: nothing that is computed
changes, but three quarters of the weights need no gradient, and what is left runs as one matrix product.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from fedmask.errors import FedmaskError

__all__ = ["STEMS", "Crop", "SmallCNN", "crop_kernels", "resnet18"]

STEMS = ("cifar", "torchvision")

Crop = tuple[slice, slice]  # the rows and columns of a kernel that are kept


def resnet18(*, classes: int = 10, channels: int = 3, stem: str = "cifar", groups: int = 32) -> nn.Module:
    """ResNet-18 (He et al. 2016) with GroupNorm (Wu & He 2018) in place of BatchNorm: 62 parameter tensors.

    Args:
        classes: outputs.
        channels: of the images.
        stem: "cifar", a 3×3 convolution of stride 1 and no max-pool, for 32×32 images; or "torchvision",
            the 7×7 convolution of stride 2 and a max-pool, for ImageNet's size and about ten times faster.
        groups: of each GroupNorm; divides 64.

    Raises:
        FedmaskError: if the stem is unknown or the groups do not divide the channels.
    """
    from torchvision.models.resnet import BasicBlock, ResNet  # here, since importing it takes seconds

    if stem not in STEMS:
        raise FedmaskError(f"stem {stem!r} is unknown; use one of {', '.join(STEMS)}")
    if groups < 1 or 64 % groups:
        raise FedmaskError(f"groups is {groups}; it must divide ResNet-18's 64 channels")
    model: nn.Module = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=classes, norm_layer=partial(nn.GroupNorm, groups))
    if stem == "cifar":
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model


class SmallCNN(nn.Module):
    """Two 3×3 convolutions with GroupNorm, average-pooled to 4×4, and one linear layer: 8 parameter tensors."""

    def __init__(self, *, classes: int = 10, channels: int = 3, width: int = 32, groups: int = 8) -> None:
        """``width`` channels after the first convolution, twice that after the second.

        Raises:
            FedmaskError: if the groups do not divide the width.
        """
        super().__init__()
        if groups < 1 or width % groups:
            raise FedmaskError(f"groups is {groups}; it must divide the small CNN's {width} channels")
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.GroupNorm(groups, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.GroupNorm(groups, 2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.head = nn.Linear(2 * width * 16, classes)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Class scores."""
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


class ProductConv2d(nn.Conv2d):
    """A convolution that works as a matrix product where images are at most 2×2, on the CPU.

    There PyTorch's own kernels spend tens of times longer, most of it on the weight's gradient.
    """

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch out rows columns"]:
        """The convolution of ``images``."""
        size = images.shape[2:]
        if images.device.type != "cpu" or size.numel() > 4 or self.bias is not None or isinstance(self.padding, str):
            result: Tensor = super().forward(images)
            return result
        matrix = self.weight.flatten(1).T
        if self.kernel_size == size and self.padding == (0, 0):
            return (images.flatten(1) @ matrix)[:, :, None, None]
        patches = functional.unfold(images, self.kernel_size, padding=self.padding, stride=self.stride)
        rows, columns = (
            (size[axis] + 2 * self.padding[axis] - self.kernel_size[axis]) // self.stride[axis] + 1 for axis in (0, 1)
        )
        places = patches.transpose(1, 2).reshape(-1, patches.shape[1]) @ matrix  # (batch · rows · columns, out)
        return places.view(len(images), -1, places.shape[1]).transpose(1, 2).view(len(images), -1, rows, columns)


def crop_kernels(model: nn.Module, image_shape: Sequence[int]) -> dict[str, Crop]:
    """Cut away, in place, the taps that only ever meet padding on images of ``image_shape``; see the module's text.

    Such a tap has no influence on any output, so its gradient is exactly zero and without weight decay SGD leaves
    it as it is. The model is for images of this size alone afterwards.

    Args:
        model: whose convolutions each see images of one size.
        image_shape: (channels, height, width).

    Returns:
        For each weight that was cut, by name: the kernel's rows and columns that are left.
    """
    sizes: dict[str, tuple[int, int]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: sizes.update({name: inputs[0].shape[2:]}))
        for name, module in model.named_modules()
        if type(module) is nn.Conv2d and module.dilation == (1, 1) and module.groups == 1
    ]
    try:
        with torch.no_grad():
            model(next(model.parameters()).new_zeros(1, *image_shape))
    finally:
        for hook in hooks:
            hook.remove()
    crops: dict[str, Crop] = {}
    for name, size in sizes.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Conv2d)
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            continue
        small, crop = _for_images(module, size)
        if small.weight.shape != module.weight.shape:
            crops[f"{name}.weight"] = crop
        model.set_submodule(name, small)
    return crops


def _for_images(module: nn.Conv2d, size: tuple[int, int]) -> tuple[ProductConv2d, Crop]:
    """The same convolution for images of one size, and what is left of the kernel."""
    assert not isinstance(module.padding, str)
    axes = [
        _used_taps(size[axis], module.kernel_size[axis], module.stride[axis], module.padding[axis]) for axis in (0, 1)
    ]
    kernel, padding = module.kernel_size, (module.padding[0], module.padding[1])
    crop = (slice(0, kernel[0]), slice(0, kernel[1]))
    if all(before == after >= 0 for _, before, after in axes):  # else no symmetric padding gives the same
        crop = (axes[0][0], axes[1][0])
        padding = (axes[0][1], axes[1][1])
    weight = module.weight[:, :, *crop]
    small = ProductConv2d(
        module.in_channels,
        module.out_channels,
        (weight.shape[2], weight.shape[3]),
        stride=(module.stride[0], module.stride[1]),
        padding=padding,
        bias=module.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        small.weight.copy_(weight)
        if small.bias is not None and module.bias is not None:
            small.bias.copy_(module.bias)
    return small, crop


def _used_taps(size: int, kernel: int, stride: int, padding: int) -> tuple[slice, int, int]:
    """Along one axis: the taps that meet the image, and the padding before and after that they need."""
    outputs = (size + 2 * padding - kernel) // stride + 1
    taps = [t for t in range(kernel) if any(0 <= i * stride - padding + t < size for i in range(outputs))]
    kept = slice(taps[0], taps[-1] + 1)
    before = padding - kept.start
    return kept, before, (outputs - 1) * stride + kept.stop - kept.start - size - before
