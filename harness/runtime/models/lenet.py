"""LeNet-5 with ReLU and max pooling, for images of 28 x 28 or 32 x 32.

LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998, section II.B.
"""

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions, three linear layers; 28 x 28 images are padded to the paper's 32 x 32."""

    def __init__(self, n_classes: int, n_channels: int, image_size: int) -> None:
        super().__init__()
        padding = 2 if image_size < 32 else 0
        side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(n_channels, 6, kernel_size=5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, n_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, channels, size, size) to logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
