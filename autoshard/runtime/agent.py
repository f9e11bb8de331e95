"""torchrun, whose ranks get the time after SIGTERM that ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` says, on every torch.

torchrun reads the variable from torch 2.12 on (pytorch/pytorch #172596). Before, as in the torch 2.9 that the Neuron
stack supports, its ranks are killed after 30 s, and a step of a large model takes minutes. SIGUSR1, which users of
Slurm ask for (``sbatch --signal=USR1@90``), would kill torchrun itself: it stops the ranks as SIGTERM does. Type
``python3 -m autoshard.runtime.agent`` in the place of ``torchrun``.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from autoshard.runtime.launch import agent_patience_s


def patient(shutdown: Callable[..., None], wait_s: int) -> Callable[..., None]:
    """Return an agent's ``_shutdown`` that waits so long for ranks to which a signal is passed on.

    After a rank has failed the others are stopped without naming a signal, and soon: they wait for the dead one.
    """

    def shutdown_patiently(agent: Any, death_sig: signal.Signals | None = None, *more: Any) -> None:
        if death_sig is None:
            shutdown(agent, *more)
            return
        ranks = agent._pcontext
        if ranks:
            ranks.close(death_sig, wait_s)
        shutdown(agent, death_sig, *more)  # which finds no rank any more

    return shutdown_patiently


def as_sigterm(*_: object) -> None:
    """Answer a signal that torchrun does not know with one that it passes on."""
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run torchrun with an agent that waits so long."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import main as torchrun

    if "shutdown_timeout" not in {field.name for field in fields(LaunchConfig)}:
        agent: Any = LocalElasticAgent  # what torch calls private has no other name
        agent._shutdown = patient(agent._shutdown, agent_patience_s())
    signal.signal(signal.SIGUSR1, as_sigterm)
    torchrun()


if __name__ == "__main__":
    main()
