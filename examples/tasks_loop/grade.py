"""What the evaluator runs where the agent worked: prints the share of doors that the tried keys open.

python3 .hidden/grade.py red green blue
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from environment import Corridor


def main() -> None:
    corridor = Corridor(tuple(sys.argv[1:]))
    attempt = json.loads(Path("attempt.json").read_text())
    for door, key in attempt["tried"][: len(corridor.doors)]:
        corridor.open(door, key)
    # Not needed for the reward: the loop holds it against what the service recorded.
    told = {"completion_tokens": attempt["completion_tokens"]}
    print(json.dumps({"reward": corridor.reward, "metadata": told}))


if __name__ == "__main__":
    main()
