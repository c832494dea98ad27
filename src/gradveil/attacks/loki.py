"""LOKI: an imprint block for many clients, local steps and secure aggregation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks import _imprint as imprint
from gradveil.attacks.base import ATTACKS
from gradveil.core.parameters import integer, number
from gradveil.defenses.base import Batch
from gradveil.models.base import image_shape
from gradveil.models.malicious import ClientImprint, Imprinted
from gradveil.task import Task

SELECT, MARKER, ENCODE = "imprint.select.weight", "imprint.marker", "imprint.encode.weight"


@ATTACKS.register("loki")
@dataclass(frozen=True, repr=False)
class Loki(imprint.ImprintAttack):
    r"""Send each client different convolution kernels, so that images stay in separate columns even in a sum.

    The block in front of the model is that of `robbing-the-fed` behind a convolution that copies the image into the
    channels of one client and leaves those of the others zero. The weight gradient of the linear layer is an outer
    product with its input, so client j fills only the columns of its own block, and the sum of all updates leaves each
    block untouched: secure aggregation hides nothing. Within a block, bins are read as in `gradveil.attacks._imprint`.

    Local steps change the block: a step shifts the bins in proportion to ``lr * signal^2`` (`signal` as in
    `robbing-the-fed`), and kernels that should be zero begin to leak. So the signal is chosen small enough for the bins
    to stay where they are; a large one would beat noise, but only if there is a single step. The remaining drift makes
    the two copies of a bin disagree slightly, so after local steps fewer bins are declared certain than hold a single
    image.

    The server is active and sends different weights to different clients (`for_client`); the architecture is the same.
    Where the paper's description leaves room, our choices are: identity kernels of size 3; one constant input per
    client (its marker), whose column replaces the bias gradient, which a sum over clients would mix; the paper's
    scaling factor of the convolution stays at 1, and `drift` sets the balance instead; two copies of each bin, and
    additive decoding, as in `robbing-the-fed`.

    The update may be one client's or the sum or mean of up to `clients`; ``threat.batch_size`` counts all images in it.

    Args:
        clients: how many clients can be told apart; client number c uses block c modulo `clients`.
        bins: number of bins per client.
        drift: how far one image in a batch of its own may shift the bins in one local step, in bin widths.
        lr: learning rate of the local steps, which the server knows.

    References:
        Zhao, Sharma, Elkordy, Ezzeldin, Avestimehr and Bagchi, LOKI: Large-scale Data Reconstruction Attack against
        Federated Learning through Model Manipulation, IEEE S&P 2024.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> from gradveil.update import weighted_mean
        >>> model = models.create("lenet", input_shape=(1, 16, 16), classes=10)
        >>> images = torch.rand(40, 1, 1, 1, generator=torch.manual_seed(1)) * torch.rand(40, 1, 16, 16)
        >>> task, labels = gradveil.Task(model, input_shape=(1, 16, 16), classes=10), torch.arange(40) % 10
        >>> attack, honest = Loki(clients=2, bins=64), gradveil.defense("none")
        >>> sent = attack.modify(task, public=(images[:36], labels[:36]), generator=torch.manual_seed(2))
        >>> threat = gradveil.ThreatModel(server="active", batch_size=4)
        >>> batches = [(0, slice(36, 38)), (1, slice(38, 40))]
        >>> updates = [honest.share(attack.for_client(sent, c), images[at], labels[at]) for c, at in batches]
        >>> found = attack.reconstruct(sent, weighted_mean(updates), threat)
        >>> found.inputs.shape
        torch.Size([1, 4, 1, 16, 16])
    """

    paper = "Zhao et al., IEEE S&P 2024"

    clients: int = integer(10, low=1)
    bins: int = integer(512, low=2)
    drift: float = number(0.1, above=0)
    lr: float = number(0.01, above=0)

    def modify(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Task:
        """The task with a block for all clients in front of its model, with the weights of client 0."""
        measured = imprint.measure(self.name, task, public, self.bins, generator)
        shape = image_shape(self.name, task.input_shape)
        # The drift grows with the square of the signal.
        signal = (self.drift / (self.lr * measured.drift(1.0))) ** 0.5
        values, slope = measured.directions.shape[1], measured.slope(signal)
        block = ClientImprint(shape, self.clients, imprint.COPIES * self.bins).to(task.device, task.dtype)
        with torch.no_grad():
            block.encode.weight[:, : self.clients * values] = slope / values
            thresholds = -slope * measured.edges.repeat(imprint.COPIES).to(task.dtype)
            block.encode.weight[:, self.clients * values :] = thresholds[:, None]
        imprint.set_decoder(block.decode, measured, signal)
        return self.for_client(task.with_model(Imprinted(block, task.copy_model())), 0)

    def for_client(self, task: Task, client: int) -> Task:
        """The task whose kernels lead to the block of this client."""
        parameters = dict(task.parameters)
        select, marker = imprint.locate(self.name, parameters, SELECT, MARKER)
        kernels, channels = torch.zeros_like(parameters[select]), task.input_shape[0]
        block = client % self.clients
        for channel in range(channels):
            kernels[block * channels + channel, channel, 1, 1] = 1
        markers = torch.zeros_like(parameters[marker])
        markers[block] = 1
        return task.with_parameters({**parameters, select: kernels, marker: markers})

    def read(self, task: Task, targets: dict[str, Tensor]) -> imprint.Bins:
        """What each bin of each client holds, ``[victims, clients * bins]``, client after client."""
        (weight,) = imprint.locate(self.name, targets, ENCODE)
        victims, units, columns = targets[weight].shape
        values = columns // self.clients - 1
        shape = (victims, imprint.COPIES, units // imprint.COPIES)
        by_client = []
        for client in range(self.clients):  # one after the other, because a block is large
            rows = targets[weight][:, :, client * values : (client + 1) * values]
            biases = targets[weight][:, :, self.clients * values + client]  # the column of the marker
            by_client.append(imprint.read_bins(rows.reshape(*shape, values), biases.reshape(shape)))
        joined = {
            name: torch.cat([getattr(bins, name) for bins in by_client], 2 if name == "factors" else 1)
            for name in vars(by_client[0])
        }
        return imprint.Bins(**joined)
