import pytest
import torch

from lightning_bnn.data import CIFAR10
from lightning_bnn.data.cifar10 import crop_and_flip
from lightning_bnn.errors import ConfigurationError, DataError


def loaded(folder, **options):
    data = CIFAR10(folder, **{"validation": 6, "augment": False, **options})
    data.setup()
    return data


def epoch(loader):
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


@pytest.mark.parametrize("layout", ["cifar10_dir", "cifar10_batches_dir"])
def test_both_layouts_give_the_images(request, layout, cifar10_images, cifar10_labels):
    data = loaded(request.getfixturevalue(layout))
    images = torch.from_numpy(cifar10_images.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2)
    labels = torch.from_numpy(cifar10_labels.reshape(-1)).long()
    parts = (data.splits.train, data.splits.validation, data.splits.test)
    assert [len(part) for part in parts] == [24, 6, 6]
    assert torch.equal(torch.cat([part.tensors[0] for part in parts]), images)
    assert torch.equal(torch.cat([part.tensors[1] for part in parts]), labels)
    assert data.input_shape == (3, 32, 32)


def test_batches_are_normalised_floats(cifar10_dir, cifar10_images):
    pixels = torch.from_numpy(cifar10_images[5]).permute(0, 3, 1, 2).float() / 255
    plain, _ = epoch(loaded(cifar10_dir, normalise=False).test_dataloader())
    assert torch.equal(plain, pixels)
    mean = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
    scale = torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
    normalised, _ = epoch(loaded(cifar10_dir).test_dataloader())
    assert torch.allclose(normalised, (pixels - mean) / scale, atol=1e-6)


def test_only_training_images_are_augmented(cifar10_dir):
    plain, augmented = loaded(cifar10_dir), loaded(cifar10_dir, augment=True)
    for name in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        one, other = epoch(getattr(plain, name)()), epoch(getattr(augmented, name)())
        assert torch.equal(one[0], other[0])
    torch.manual_seed(0)
    first, labels = epoch(augmented.train_dataloader())
    torch.manual_seed(0)
    unchanged, same_labels = epoch(plain.train_dataloader())
    assert torch.equal(labels, same_labels)  # the same order
    changed = (first != unchanged).flatten(1).any(dim=1)
    assert changed.sum() > 20  # 1 in 162 images stays as it is


def test_each_image_gets_a_shift_and_a_flip_of_its_own():
    image = torch.arange(1, 1 + 3 * 32 * 32, dtype=torch.int32).reshape(3, 32, 32)
    padded = torch.zeros(3, 40, 40, dtype=torch.int32)
    padded[:, 4:36, 4:36] = image
    possible = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 32, left : left + 32]
            possible[crop.contiguous().numpy().tobytes()] = (top, left, False)
            possible[crop.flip(2).contiguous().numpy().tobytes()] = (top, left, True)
    assert len(possible) == 162
    # 8100 images in 162 cells, 50 expected in each. Chi-square of 161 degrees of freedom is above
    # 222 once in a thousand seeds.
    torch.manual_seed(0)
    out = crop_and_flip(image.expand(8100, -1, -1, -1))
    counts = dict.fromkeys(possible.values(), 0)
    for crop in out:
        counts[possible[crop.contiguous().numpy().tobytes()]] += 1
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 222


def test_workers_augment_as_a_function_of_the_seed_at_the_start_of_the_epoch(cifar10_dir):
    data = loaded(cifar10_dir, augment=True, num_workers=1)
    loader = data.train_dataloader()
    torch.manual_seed(0)
    first, _ = epoch(loader)
    torch.manual_seed(1)
    second, _ = epoch(loader)
    assert not torch.equal(first, second)
    # A run that starts at the second epoch sees the same pictures there.
    torch.manual_seed(1)
    again, _ = epoch(data.train_dataloader())
    assert torch.equal(second, again)


def test_missing_files_are_named(tmp_path):
    expected = rf"Expected {tmp_path}/cifar-10-batches-py, .*LIGHTNING_BNN_DATA.*download=True"
    with pytest.raises(ConfigurationError, match=expected):
        loaded(tmp_path)


def test_damaged_batches(cifar10_batches_dir):
    path = cifar10_batches_dir / "cifar-10-batches-py" / "data_batch_2"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"pickled.*corrupted"):
        loaded(cifar10_batches_dir)
