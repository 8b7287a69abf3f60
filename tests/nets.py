"""Networks and data of every kind that the contract is tried on, small and made here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = 48


class SequenceLSTM(nn.Module):
    """The last state of an LSTM through a linear head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs)[0][:, -1])


class SequenceTransformer(nn.Module):
    """A Transformer encoder with dropout, averaged over positions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(inputs)).mean(1))


class TokenEmbedding(nn.Module):
    """Embeddings of tokens, averaged, normalised, through a linear head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens).mean(1)))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


def resnet(outputs: int) -> nn.Module:
    """ResNet-18 with half its blocks, which takes a third of the time."""
    blocks = torchvision.models.resnet.BasicBlock
    return torchvision.models.ResNet(blocks, [1, 1, 1, 1], num_classes=outputs)


def _rows(generator: torch.Generator) -> Tensor:
    return torch.randn(EXAMPLES, 4, generator=generator)


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(EXAMPLES, 3, 16, 16, generator=generator)


def _sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(EXAMPLES, 5, 3, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 11, (EXAMPLES, 5), generator=generator)


NETS: dict[str, tuple[Callable[[int], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "mlp": (mlp, _rows),
    "resnet": (resnet, _images),
    "transformer": (SequenceTransformer, _sequences),
    "lstm": (SequenceLSTM, _sequences),
    "embedding": (TokenEmbedding, _tokens),
}


def make_data(name: str, task: str) -> TensorDataset:
    """Inputs for a network and targets for a task: 3 classes, or 2 numbers."""
    generator = torch.Generator().manual_seed(7)
    inputs = NETS[name][1](generator)
    if task == "classification":
        return TensorDataset(inputs, torch.randint(0, 3, (EXAMPLES,), generator=generator))
    return TensorDataset(inputs, torch.randn(EXAMPLES, 2, generator=generator))


def loader(data: TensorDataset, shuffle: bool = False, batch_size: int = 16) -> DataLoader:
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)
