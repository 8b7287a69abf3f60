"""Launch from the head of a cluster: the script that ``ray submit`` copies there and runs.

The words after ``--`` are those of ``lightning-bnn launch``; paths in them are paths on the head,
and as they pass through a shell there, what has spaces or stars in it is quoted twice::

    ray submit cluster/aws.yaml cluster/launch.py -- --config configs/mnist_ensemble.yaml \
        --members 20 --storage s3://bucket/run7 --cpus 4 --gpus 1

The exit code is that of the command. A driver that died is started again by the same line, and runs
only the members that are missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

__all__ = ["SETTINGS", "main", "prepare"]

# `ray submit` opens a shell of its own, so that nothing of what the processes of the cluster were
# started with arrives here, and the driver is one end of their connections.
SETTINGS = {
    "RAY_ADDRESS": "auto",
    "RAY_AUTH_MODE": "token",
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def prepare(environment: MutableMapping[str, str]) -> None:
    """Join the cluster of this machine with its settings, unless told otherwise.

    Example:
        >>> environment = {"RAY_ADDRESS": "192.0.2.1:6379"}
        >>> prepare(environment)
        >>> environment["RAY_ADDRESS"], environment["RAY_AUTH_MODE"]
        ('192.0.2.1:6379', 'token')
    """
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)


def main(arguments: Sequence[str]) -> int:
    """Hand the arguments to ``lightning-bnn launch``, and give its exit code."""
    prepare(os.environ)  # Ray reads its settings when it is imported
    from lightning_bnn.cli import main as command_line

    words = list(arguments)
    # `ray submit` takes the first -- away; started by hand, the script sees it
    return command_line(["launch", *(words[1:] if words[:1] == ["--"] else words)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
