"""Text as bytes: the files, their split, and shuffled windows of them through grain."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

VALIDATION_EVERY = 20  # files; a text of one file gives up the last 1/20 of its bytes instead

# Tests would be a third of the corpus; encodings and pydoc_data are generated tables.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class DataConfig:
    path: str = ""  # a folder or a file; empty: the sources of Python's standard library
    pattern: str = "*.py"


@dataclass(frozen=True)
class Text:
    name: str
    train: np.ndarray  # uint8
    validation: np.ndarray  # uint8


def find_files(config: DataConfig) -> list[Path]:
    """The files of the text, sorted. Raises FileNotFoundError where there are none."""
    root = Path(config.path or sysconfig.get_path("stdlib")).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"no such file or folder: {root}")
    skipped = set() if config.path else SKIPPED
    found = [
        file
        for file in sorted(root.rglob(config.pattern))
        if file.is_file() and not skipped & set(file.relative_to(root).parts)
    ]
    if not found:
        raise FileNotFoundError(f"no {config.pattern} file below {root}")
    return found


def split(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """(train, validation), by whole files: no validation byte follows a training byte."""
    train = [file for i, file in enumerate(files) if i % VALIDATION_EVERY]
    return train, files[::VALIDATION_EVERY]


def read(files: list[Path]) -> np.ndarray:
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def load(config: DataConfig) -> Text:
    """Read and split the text that `config` names. Raises OSError where it cannot be read."""
    files = find_files(config)
    if len(files) == 1:
        whole = read(files)
        cut = len(whole) - len(whole) // VALIDATION_EVERY
        return Text(config.path, whole[:cut], whole[cut:])
    train, validation = split(files)
    return Text(config.path or "Python's standard library", read(train), read(validation))


class Windows:
    """A grain data source. Item i starts at byte i * context and has context + 1 bytes."""

    def __init__(self, text: np.ndarray, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self.context
        return self.text[start : start + self.context + 1].astype(np.int32)


def batches(
    text: np.ndarray, context: int, batch_size: int, seed: int
) -> grain.DatasetIterator[np.ndarray]:
    """Endless int32 batches (batch_size, context + 1), each epoch in a new order.

    Save the iterator's `get_state()` with the model: after `set_state(state)` a resumed run goes
    on with the batches it has not seen. Raises ValueError where the text is shorter than a batch.
    """
    windows = Windows(text, context)
    if len(windows) < batch_size:
        raise ValueError(f"{len(text)} bytes are too few for {batch_size} windows of {context}")
    dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat().batch(batch_size)
    return iter(dataset.to_iter_dataset())
