"""Many processes create one file at the same moment; run by test_files.py.

Usage: python -m tests.storage.race_script DIRECTORY PROCESSES ROUNDS. Prints JSON: by round, the
numbers of the processes that were told that the file is theirs, and whose bytes are there. Children
are forked after the imports, so that they start together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from lightning_bnn.storage.files import open_directory


def create_all(directory: str, number: int, rounds: int, begin: float) -> list[int]:
    """Create the file of each round, and give the rounds that were won."""
    files, won = open_directory(directory), []
    for turn in range(rounds):
        time.sleep(max(0.0, begin + 0.02 * turn - time.monotonic()))
        if files.create(f"folder-{turn}/one", f"process {number}".encode() * 1000):
            won.append(turn)
    return won


def main(directory: str, processes: int, rounds: int) -> None:
    """Let the processes race, then compare what they were told with what is there."""
    begin = time.monotonic() + 0.5
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            won = create_all(directory, number, rounds, begin)
            Path(directory, f"won-{number}.json").write_text(json.dumps(won))
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    winners: list[list[int]] = [[] for _ in range(rounds)]
    for number in range(processes):
        for turn in json.loads(Path(directory, f"won-{number}.json").read_text()):
            winners[turn].append(number)
    files = open_directory(directory)
    there = []
    for turn in range(rounds):
        data = files.get(f"folder-{turn}/one") or b""
        number = int(data.split(b"process ")[1])
        assert data == f"process {number}".encode() * 1000
        assert files.names(f"folder-{turn}") == ["one"]
        there.append(number)
    print(json.dumps({"winners": winners, "there": there}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
