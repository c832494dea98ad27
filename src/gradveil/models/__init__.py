"""The papers' models by name: ``create("lenet", input_shape=(3, 32, 32), classes=10)``."""

# Importing a model's file registers it.
from gradveil.models import (  # noqa: F401
    cnn6,
    convnet,
    lenet,
    mlp,
    mnist_cnn,
    resnet,
    smollm2,
    text_embedding,
    text_transformer,
    vgg,
    vit,
)
from gradveil.models.base import Description, create, describe, names

__all__ = ["Description", "create", "describe", "names"]
