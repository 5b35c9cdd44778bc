"""Stand-ins for what Opacus' scripts read and cannot find here: data, weights, viewers.

Each has the shapes and the interface of the real thing, as far as the scripts use it, and random
content. `install` puts them where a script imports them; packages that are there stay.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import random
import string
import sys
import types
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

RECORDS = 320
LANGUAGES = ("Czech", "Greek", "Irish", "Polish")
LABELS = ("contradiction", "entailment", "neutral")


def module(name: str, **contents: Any) -> types.ModuleType:
    """A module of that name, in its parent, where the real one is missing."""
    made = types.ModuleType(name)
    made.__dict__.update(contents, __path__=[], __spec__=ModuleSpec(name, None))
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), last, made)
    return made


def missing(name: str) -> bool:
    """Whether a package is not installed."""
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # its parent is missing
        return True


# -- images ---------------------------------------------------------------------------------------


class Images(Dataset):
    """torchvision's MNIST or CIFAR10, with random images."""

    shape: tuple[int, ...] = ()

    def __init__(self, root: str, train: bool = True, transform: Any = None, **options: Any):
        generator = torch.Generator().manual_seed(int(train))
        size = (RECORDS, *self.shape)
        self.data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        self.targets = torch.randint(0, 10, (RECORDS,), generator=generator)
        self.transform = transform or (lambda image: image)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.data[index]), int(self.targets[index])


class MNIST(Images):
    """28 x 28, grey."""

    shape = (28, 28)


class CIFAR10(Images):
    """32 x 32, three colours."""

    shape = (32, 32, 3)


def to_tensor(image: Tensor) -> Tensor:
    """Bytes, height first, to floats, channels first."""
    image = image.unsqueeze(-1) if image.ndim == 2 else image
    return image.movedim(-1, 0).float() / 255


def resize(image: Tensor, size: int) -> Tensor:
    """A grey image of another size."""
    scaled = F.interpolate(image.float()[None, None], size=(size, size))[0, 0]
    return scaled.to(torch.uint8)


def compose(steps: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One transform after the other."""

    def together(image: Any) -> Any:
        for step in steps:
            image = step(image)
        return image

    return together


def normalize(mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    """Channels less their means, over their deviations."""
    centre, scale = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (mean, std))
    return lambda image: (image - centre) / scale


class Block(nn.Module):
    """Two convolutions with a norm each, and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = norm(outside), norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.around = nn.Sequential()
        if stride > 1 or inside != outside:
            self.around = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.around(x))


def resnet18(
    num_classes: int = 1000,
    width: int = 16,
    pretrained: bool = False,
    norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d,
) -> nn.Module:
    """Eighteen layers with a norm, a quarter as wide, and never trained before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), norm_layer(width)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for stage in range(4):
        inside = width * 2 ** max(0, stage - 1)
        outside = width * 2**stage
        layers.append(Block(inside, outside, 1 + (stage > 0), norm_layer))
        layers.append(Block(outside, outside, 1, norm_layer))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, num_classes)
    )


def torchvision() -> None:
    """Data, transforms, a network and a file of images."""
    module("torchvision")
    module("torchvision.datasets", MNIST=MNIST, CIFAR10=CIFAR10)
    module("torchvision.models", resnet18=resnet18)
    module("torchvision.utils", save_image=lambda images, path, **options: Path(path).touch())
    module(
        "torchvision.transforms",
        Compose=compose,
        ToTensor=lambda: to_tensor,
        Normalize=normalize,
        Resize=lambda size: partial(resize, size=size),
        RandomCrop=lambda size, padding=0: lambda image: image,
        RandomHorizontalFlip=lambda: lambda image: image,
    )


# -- text -----------------------------------------------------------------------------------------


def words(generator: random.Random, most: int = 12) -> str:
    """A few random words."""
    return " ".join(
        "".join(generator.choices(string.ascii_lowercase, k=generator.randint(2, 8)))
        for _ in range(generator.randint(2, most))
    )


def names(folder: Path) -> None:
    """A file of names for each language."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    for language in LANGUAGES:
        lines = (words(generator, 2).replace(" ", "").title() for _ in range(RECORDS // 4))
        (folder / f"{language}.txt").write_text("\n".join(lines))


def pairs() -> str:
    """SNLI's table, shortened: a label and two sentences."""
    generator = random.Random(1)
    rows = ["gold_label\tsentence1\tsentence2"]
    for _ in range(RECORDS // 4):
        rows.append(f"{generator.choice(LABELS)}\t{words(generator)}\t{words(generator)}")
    return "\n".join(rows)


def download(url: str, filename: str) -> None:
    """urllib.request.urlretrieve of the two archives that the tutorials read."""
    with zipfile.ZipFile(filename, "w") as archive:
        if "snli" in url:
            for part in ("train", "dev"):
                archive.writestr(f"snli_1.0/snli_1.0_{part}.txt", pairs())
        else:
            names(Path("made-names"))
            for file in Path("made-names").iterdir():
                archive.writestr(f"data/names/{file.name}", file.read_text())


class Table(Dataset):
    """Hugging Face's data set of dictionaries, as imdb.py uses it."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows, self.columns = rows, list(rows[0])

    def map(self, function: Callable[[Any], Any], batched: bool = True) -> Table:
        new = function({key: [row[key] for row in self.rows] for key in self.rows[0]})
        return Table([row | {key: new[key][i] for key in new} for i, row in enumerate(self.rows)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: torch.tensor(self.rows[index][key]) for key in self.columns}


class Tables(dict):  # type: ignore[type-arg]
    """Hugging Face's dictionary of data sets."""

    def map(self, function: Callable[[Any], Any], batched: bool = True) -> Tables:
        return Tables({name: table.map(function, batched) for name, table in self.items()})

    def set_format(self, type: str, columns: list[str]) -> None:
        for table in self.values():
            table.columns = columns


def load_dataset(name: str, **options: Any) -> Tables:
    """Reviews of random words, with a label."""
    generator = random.Random(2)
    return Tables(
        {
            part: Table(
                [
                    {"text": words(generator, 30), "label": generator.randint(0, 1)}
                    for _ in range(RECORDS // 4)
                ]
            )
            for part in ("train", "test")
        }
    )


class Encoding(dict):  # type: ignore[type-arg]
    """What a tokenizer returns: fields by name, as keys and as attributes."""

    __getattr__ = dict.__getitem__


class Tokenizer:
    """BERT's tokenizer with letters for words: ids, attention and types, cut or padded."""

    vocabulary = 2 + len(string.ascii_lowercase)

    def __len__(self) -> int:
        return self.vocabulary

    def __call__(self, texts: list[str], max_length: int, **options: Any) -> Encoding:
        return Encoding(input_ids=[self.ids(text)[:max_length] for text in texts])

    def ids(self, text: str) -> list[int]:
        """A number for every letter, 1 for anything else; 0 is padding."""
        return [2 + string.ascii_lowercase.find(c) if c.isalpha() else 1 for c in text.lower()]


def features(examples: list[Any], tokenizer: Any, label_list: Any, max_length: int, **o: Any):  # type: ignore[no-untyped-def]
    """transformers' removed glue_convert_examples_to_features: both texts in one row."""
    rows = []
    for example in examples:
        first, second = tokenizer.ids(example.text_a), tokenizer.ids(example.text_b)
        length = min(max_length, len(first) + len(second))
        padding = [0] * (max_length - length)
        types_ = ([0] * len(first) + [1] * len(second))[:length]
        rows.append(
            Encoding(
                input_ids=(first + second)[:length] + padding,
                attention_mask=[1] * length + padding,
                token_type_ids=types_ + padding,
                label=list(label_list).index(example.label),
            )
        )
    return rows


def transformers() -> None:
    """Random weights from a small config in place of those that would be downloaded."""
    import transformers as library

    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    small |= {"num_hidden_layers": 2, "vocab_size": Tokenizer.vocabulary}
    kinds = (library.BertConfig, library.BertForSequenceClassification)
    for kind in kinds:
        kind.from_pretrained = classmethod(  # type: ignore[method-assign]
            lambda cls, name, config=None, **options: (
                cls(**small, **options) if config is None else cls(config).eval()
            )
        )
    for kind in (library.BertTokenizer, library.BertTokenizerFast):
        kind.from_pretrained = staticmethod(lambda *a, **o: Tokenizer())
    if missing("transformers.data.processors.glue"):
        for name in ("data", "data.processors"):
            if missing(f"transformers.{name}"):
                module(f"transformers.{name}")
        module("transformers.data.processors.utils", InputExample=Encoding)
        module("transformers.data.processors.glue")
    sys.modules["transformers.data.processors.glue"].glue_convert_examples_to_features = features  # type: ignore[attr-defined]


# -- Lightning, notebooks -------------------------------------------------------------------------


def lightning() -> None:
    """What Lightning 1 had and 2 has not, and the data module of pl_bolts."""
    import pytorch_lightning as pl
    import torchmetrics

    class MNISTDataModule(pl.LightningDataModule):
        def __init__(self, batch_size: int = 64) -> None:
            super().__init__()
            self.size = batch_size

        def loader(self, train: bool) -> DataLoader[Any]:
            return DataLoader(MNIST("", train, to_tensor), batch_size=self.size)

        train_dataloader = lambda self: self.loader(True)  # noqa: E731
        test_dataloader = lambda self: self.loader(False)  # noqa: E731

    module("pl_bolts")
    module("pl_bolts.datamodules", MNISTDataModule=MNISTDataModule)
    if missing("pytorch_lightning.utilities.cli"):
        module("pytorch_lightning.utilities.cli", LightningCLI=None)
    torchmetrics.Accuracy = lambda: torchmetrics.classification.MulticlassAccuracy(10)  # type: ignore[assignment]
    connector = "pytorch_lightning.trainer.connectors.data_connector"
    kind = importlib.import_module(connector)._DataConnector
    kind._train_dataloader_source = property(lambda self: self.trainer.fit_loop._data_source)
    start = pl.Trainer.__init__

    def short(self: Any, **options: Any) -> None:
        start(self, **options | {"max_epochs": 1, "accelerator": "cpu", "logger": False})

    pl.Trainer.__init__ = short


def notebooks() -> None:
    """Progress bars and pictures without a notebook, and archives without a network."""
    import urllib.request

    import tqdm

    urllib.request.urlretrieve = download  # type: ignore[assignment]
    module("tqdm.notebook", tqdm=partial(tqdm.tqdm, file=io.StringIO()))
    if missing("requests"):
        module("requests")
    module("IPython")
    module("IPython.display", Image=lambda filename: None)


def install(wanted: tuple[str, ...]) -> None:
    """Put the stand-ins of these names in place."""
    for name in wanted:
        {
            "torchvision": torchvision,
            "transformers": transformers,
            "lightning": lightning,
            "notebooks": notebooks,
            "datasets": lambda: module("datasets", load_dataset=load_dataset),
            "names": lambda: names(Path("names")),
        }[name]()
