"""Which knowledge of a defense an adaptive attacker uses, including a fallback for defenses that declare none.

Each defense declares what can be known about it in its own file (`Defense.adapt`).
"""

from functools import partial

import torch
from torch import Tensor

from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.randomness import derived_generator
from gradveil.defenses import Defense
from gradveil.defenses.knowledge import Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import LocalSteps

DRAWS = 4
"""The number of simulated draws of a defense over which the cost is averaged."""


def find_knowledge(attack: str, task: Task, threat: ThreatModel) -> Knowledge | None:
    """The knowledge that a threat model grants; None for a plain attack. A form that does not exist is refused."""
    defense, adaptive, local = threat.defense, threat.adaptive, threat.local
    if adaptive is False:
        return None
    if defense is None:
        raise ThreatModelError(f"{attack}: has no adaptive form without a defense; use ThreatModel(adaptive=False)")
    forms = defense.adapt(task, batch_size=threat.batch_size, local=local)
    forms = forms or {"expectation": expectation(defense, local)}
    if adaptive is True:
        form = next(iter(forms.values()))
    elif adaptive in forms:
        form = forms[adaptive]
    else:
        raise ThreatModelError(
            f"{attack}: has no adaptive form {adaptive!r} against {defense.name}; it has: {', '.join(forms)}"
        )
    if form.single_gradient and local:
        raise ThreatModelError(
            f"{attack}: the adaptive form {adaptive!r} expects each update to be a single gradient, got local steps "
            f"{local}; use another form or ThreatModel(local=None)"
        )
    return form


def expectation(defense: Defense, local: LocalSteps | None = None) -> Knowledge:
    r"""Average the cost over simulated draws of the defense on the candidate: the fallback for any defense.

    .. math:: E_D \, distance(D(\nabla L(x)), u), \qquad \partial D(g) / \partial g := 1

    The draws are the same at every step, so that the cost is a function of the candidate. Defenses round, sort and
    draw at random, which has no useful derivative, so the derivative of the undefended gradient is used instead
    (straight-through).
    """
    return Knowledge(f"averages over {DRAWS} simulated draws of the defense", draw=partial(_simulated, defense, local))


def _simulated(
    defense: Defense, local: LocalSteps | None, task: Task, gradients: Gradients, inputs: Tensor, labels: Tensor
) -> list[Gradients]:
    fixed = {name: value.detach() for name, value in gradients.items()}
    task = task.by_autograd(False)  # as on a client: defenses may use functional transforms

    def share(generator: torch.Generator) -> Gradients:
        if defense.gradient_only:
            return defense.perturb(fixed, generator=generator, memory={})
        batch = inputs.detach().to(task.dtype), labels
        return defense.share(task, *batch, generator=generator, memory={}, local=local)

    drawn = [share(derived_generator(0, "draw", number, device=task.device)) for number in range(DRAWS)]
    return [
        {name: value + (update[name].to(value) - fixed[name]) for name, value in gradients.items()} for update in drawn
    ]
