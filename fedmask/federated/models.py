"""The paper's network, ResNet-18 with GroupNorm, and a small one for small images."""

from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from fedmask.errors import FedmaskError

__all__ = ["STEMS", "SmallCNN", "resnet18"]

STEMS = ("cifar", "torchvision")


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
