"""Checkpoints of a training with Adam, so that an interrupted one continues where it was."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def save(checkpoint: Path, step: int, network: torch.nn.Module, optimizer: torch.optim.Adam) -> None:
    tensors = {"steps": torch.tensor(step)}
    for name, value in network.named_parameters():
        tensors[name] = value.detach().contiguous()
        tensors |= {f"{key}/{name}": optimizer.state[value][key].contiguous() for key in ADAM_STATE}
    temporary = checkpoint.with_suffix(".new")
    save_file(tensors, temporary)
    temporary.replace(checkpoint)  # so that an interruption never leaves half a checkpoint


def restore(checkpoint: Path, network: torch.nn.Module, optimizer: torch.optim.Adam) -> int:
    """Restore everything as it was saved and return the number of finished steps."""
    tensors = load_file(checkpoint)
    for name, value in network.named_parameters():
        value.data.copy_(tensors[name])
        # The moments have the memory format of their parameter, as Adam creates them.
        moments = {key: torch.empty_like(value).copy_(tensors[f"{key}/{name}"]) for key in ADAM_STATE[1:]}
        optimizer.state[value] = {"step": tensors[f"step/{name}"], **moments}
    return int(tensors["steps"])
