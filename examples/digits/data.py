"""The 1,797 handwritten digits of scikit-learn, 8x8 pixels each. Nothing is downloaded."""

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits

TRAINING_IMAGES, TEST_IMAGES = 1437, 360

Batch = tuple[np.ndarray, np.ndarray]
"""Images (batch, 8, 8, 1), from 0 to 1, and labels (batch,)."""


def load() -> tuple[Batch, Batch]:
    """The images to train on and those to test with, the same ones each time."""
    images, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    images, labels = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[training], labels[training]), (images[test], labels[test])


def batches(training: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Shuffled batches without end; what is left at the end of an epoch is left out."""
    (images, labels), rng = training, np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield images[rows], labels[rows]
