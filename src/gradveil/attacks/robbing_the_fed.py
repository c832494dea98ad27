"""Robbing the Fed: an imprint block that hands the server its clients' images."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks import _imprint as imprint
from gradveil.attacks.base import ATTACKS
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import integer, number
from gradveil.defenses.base import Batch
from gradveil.models.malicious import Imprint, Imprinted
from gradveil.task import Task

ENCODE, ENCODE_BIAS = "imprint.encode.weight", "imprint.encode.bias"


@ATTACKS.register("robbing-the-fed")
@dataclass(frozen=True, repr=False)
class RobbingTheFed(imprint.ImprintAttack):
    r"""Put a linear layer in front of the model that sorts images into bins, and read each bin off its rows.

    .. math:: x = \frac{\nabla W_i - \nabla W_{i+1}}{\nabla b_i - \nabla b_{i+1}}
              \quad \text{if one image has } c_i < \bar x \le c_{i+1}

    All rows measure the mean of the pixels; the thresholds c are quantiles of that mean over public images, so that
    all bins are equally likely. An image that is alone in its bin is recovered exactly: with n images and B bins that
    is a share of :math:`(1 - 1/B)^{n-1}`, .94 for 9 images and 128 bins. See `gradveil.attacks._imprint`.

    The server is active: honest clients must train `modify(task, public=...)`, which predicts like the given model
    (images are changed by 1 % before they reach it). Where the paper leaves room or we differ: the block adds to the
    image instead of replacing it; each bin has two copies with different output directions, which tell bins with
    one image from mixtures without ground truth and halve the noise; quantiles are blurred (`imprint.thresholds`); the
    lowest bin begins below black, so that no image is missed. Images that were not found are grey.

    Args:
        bins: number of bins; the block has 2 x bins rows. Use more bins than images, or images share bins.
        signal: typical size of the bias gradient caused by one image alone in its batch. The server is free to choose
            it, because the model computes the same: a large signal beats noise of a fixed size, but not a defense that
            scales with the gradient.

    References:
        Fowl, Geiping, Czaja, Goldblum and Goldstein, Robbing the Fed: Directly Obtaining Private Data in Federated
        Learning with Modified Models, ICLR 2022.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("lenet", input_shape=(1, 16, 16), classes=10)
        >>> images = torch.rand(40, 1, 1, 1, generator=torch.manual_seed(1)) * torch.rand(40, 1, 16, 16)
        >>> task, labels = gradveil.Task(model, input_shape=(1, 16, 16), classes=10), torch.arange(40) % 10
        >>> attack = RobbingTheFed(bins=64)
        >>> sent = attack.modify(task, public=(images[:36], labels[:36]), generator=torch.manual_seed(2))
        >>> update = gradveil.defense("none").share(sent, images[36:], labels[36:])
        >>> found = attack.reconstruct(sent, update, ThreatModel(server="active", batch_size=4))
        >>> found.inputs.shape, found.certain.shape
        (torch.Size([1, 4, 1, 16, 16]), torch.Size([1, 4]))
    """

    paper = "Fowl et al., ICLR 2022"

    bins: int = integer(128, low=2)
    signal: float = number(100.0, above=0)

    def modify(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Task:
        """The task with an imprint block in front of its model."""
        measured = imprint.measure(self.name, task, public, self.bins, generator)
        values, slope = measured.directions.shape[1], measured.slope(self.signal)
        block = Imprint(values, imprint.COPIES * self.bins).to(task.device, task.dtype)
        with torch.no_grad():
            block.encode.weight.fill_(slope / values)
            block.encode.bias.copy_(-slope * measured.edges.repeat(imprint.COPIES))
        imprint.set_decoder(block.decode, measured, self.signal)
        return task.with_model(Imprinted(block, task.copy_model()))

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse local steps."""
        super().check_threat(task, threat)
        if threat.local is not None:
            raise ThreatModelError(
                f"{self.name}: reads single gradients, got local={threat.local}; loki is made for local steps"
            )

    def read(self, task: Task, targets: dict[str, Tensor]) -> imprint.Bins:
        """Read the differences of neighbouring rows, all victims at once."""
        weight, bias = imprint.locate(self.name, targets, ENCODE, ENCODE_BIAS)
        victims, units, values = targets[weight].shape
        shape = (victims, imprint.COPIES, units // imprint.COPIES)
        return imprint.read_bins(targets[weight].view(*shape, values), targets[bias].view(shape))
