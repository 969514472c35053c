"""Files written before modules got their present names load, and hold what the same calls make today."""

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from tests.saved_objects import LAYERS, TENSORS, result
from tests.tensor.cases import assert_same_bytes

ARCHIVE = Path(__file__).parent / "data" / "saved_objects.zip"


def read(name: str) -> bytes:
    with zipfile.ZipFile(ARCHIVE) as archive:
        return archive.read(name)


def from_file(name: str):
    return torch.load(io.BytesIO(read(f"{name}.pt")), weights_only=True)


def assert_same_state(state, expected):
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert_same_bytes(state[name], value)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    layer, expected = pickle.loads(read(f"{name}.pkl")), LAYERS[name]()
    assert type(layer) is type(expected)
    assert_same_state(layer.state_dict(), expected.state_dict())
    assert_same_bytes(result(layer), result(expected))


@pytest.mark.parametrize("name", LAYERS)
def test_state_dicts(name):
    state, layer = from_file(name), LAYERS[name]()
    assert_same_state(state, layer.state_dict())
    layer.load_state_dict(state)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name):
    expected = TENSORS[name]()
    for loaded in (pickle.loads(read(f"{name}.pkl")), from_file(name)):
        assert_same_bytes(loaded, expected)
