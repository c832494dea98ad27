"""When a reconstruction counts as a leak."""

from torch import Tensor

LEAK_PSNR = 15.0  # dB
LEAK_SSIM = 0.5
LEAK_MARGIN = 2.0  # dB above the blind guess


def leaked(psnr: Tensor, ssim: Tensor, blind_psnr: Tensor) -> Tensor:
    """Whether each image has leaked: ``(PSNR >= 15 or SSIM >= .5) and PSNR >= blind guess's PSNR + 2``.

    The second half keeps an attack from being credited with what the class mean alone shows.

    Args:
        psnr: of each reconstruction, in dB [N].
        ssim: of each reconstruction [N].
        blind_psnr: of the blind guess for the same originals [N].

    >>> import torch
    >>> psnr, ssim, blind_psnr = torch.tensor([[20.0, 20.0, 9.0], [0.3, 0.3, 0.1], [10.0, 19.0, 5.0]])
    >>> leaked(psnr, ssim, blind_psnr)
    tensor([ True, False, False])
    """
    recognisable = (psnr >= LEAK_PSNR) | (ssim >= LEAK_SSIM)
    return recognisable & (psnr >= blind_psnr + LEAK_MARGIN)
