"""CIFAR-10, CIFAR-100 and folders of images, by torchvision's data sets, without downloads."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.errors import DataError
from harness.inputs import one_line
from harness.runtime.data.batch import Batch, BatchedData, MemoryData
from harness.runtime.models.torchvision_import import import_torchvision

CIFAR_LAYOUT = {
    "cifar10": "cifar-10-batches-py/ with data_batch_1 to 5, test_batch and batches.meta",
    "cifar100": "cifar-100-python/ with train, test and meta",
}
FOLDER_LAYOUT = "one directory per class, each with its images (class_a/1.jpg, class_b/2.jpg)"
_N_DIGITS = 1440
# Channel means and deviations of ImageNet, as torchvision's reference training uses them.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageData(BatchedData):
    """Batches from a torchvision data set of (image tensor, class)."""

    def __init__(self, images: Any) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, indices: list[int]) -> Batch:
        samples = [self._sample(index) for index in indices]
        images = torch.stack([image for image, _ in samples])
        return Batch((images,), torch.tensor([target for _, target in samples]))

    def _sample(self, index: int) -> tuple[Tensor, int]:
        try:
            image, target = self._images[index]
        except Exception as error:  # each image format's decoder raises its own errors
            files = getattr(self._images, "samples", None)
            name = files[index][0] if files else f"image {index}"
            raise DataError(
                f"{name} cannot be decoded ({type(error).__name__}: {one_line(str(error))}): "
                "remove it or save it again"
            ) from error
        return image, target


def _to_tensor(transforms: Any) -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]


def open_cifar(
    name: str, data_dir: Path, image_size: int, *, is_held_out: bool = False
) -> ImageData:
    """Open the training set of CIFAR-10 or CIFAR-100, or its test set, resized.

    Raises:
        DataError: the files are missing or damaged.
    """
    transforms = import_torchvision("transforms")
    resize = transforms.Resize((image_size, image_size))
    steps = transforms.Compose([resize, *_to_tensor(transforms)])
    kind = import_torchvision("datasets").__dict__[name.upper()]
    try:
        whole = kind(str(data_dir), train=not is_held_out, transform=steps, download=False)
        return ImageData(whole)
    except RuntimeError as error:
        raise DataError(
            f"{name} is not (whole) in --data-dir {data_dir}: it should hold {CIFAR_LAYOUT[name]}, "
            "as the archive from its authors unpacks"
        ) from error


def open_digits(shape: tuple[int, ...], *, is_held_out: bool = False) -> MemoryData:
    """Open the 8 x 8 images of handwritten digits that scikit-learn ships: 1440 to train by, and
    357 held out.

    Args:
        shape: channels, height and width of a sample.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "--data digits is in scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[_N_DIGITS:] if is_held_out else order[:_N_DIGITS]
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)[chosen] / 8 - 1
    n_channels, *size = shape
    images = functional.interpolate(images, size=size, mode="bilinear")
    images = images.expand(-1, n_channels, -1, -1).contiguous()
    return MemoryData((images,), torch.from_numpy(labels).long()[chosen])


def class_names(data_dir: Path) -> list[str]:
    """List the classes of a folder of images.

    Raises:
        DataError: the directory is missing or holds no class.
    """
    names = sorted(e.name for e in data_dir.iterdir() if e.is_dir()) if data_dir.is_dir() else []
    if not names:
        raise DataError(
            f"{data_dir} holds no classes: --data-dir and --held-out-dir hold {FOLDER_LAYOUT}"
        )
    return names


def _load(path: str) -> Any:
    """Read an image as RGB.

    Raises:
        ValueError: it has integers of 16 or 32 bits or floats, which PIL would clip to 8 bits.
    """
    with import_module("PIL.Image").open(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(f"mode {image.mode} has over 8 bits a channel, which RGB would clip")
        return image.convert("RGB")


def open_folder(data_dir: Path, image_size: int) -> ImageData:
    """Open a folder of images by class, resized and center-cropped to squares.

    Raises:
        DataError: the directory does not have this layout.
    """
    class_names(data_dir)
    transforms = import_torchvision("transforms")
    to_square = transforms.Resize(image_size), transforms.CenterCrop(image_size)
    steps = transforms.Compose([*to_square, *_to_tensor(transforms)])
    try:
        folder = import_torchvision("datasets").ImageFolder(str(data_dir), steps, loader=_load)
        return ImageData(folder)
    except FileNotFoundError as error:
        raise DataError(f"{data_dir}: {error}; it should hold {FOLDER_LAYOUT}") from error
