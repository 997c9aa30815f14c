"""`python -m tests.chaos`: a run of real processes that are killed, frozen and cut off until enough was broken.

Prints a line per fault and a verdict; exits with 1 when anything is wrong, and then leaves all files in its folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.driver import chaos
from tests.chaos.faults import drawn, named, paired


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="strike so often")
    parser.add_argument("--minutes", type=float, default=25.0, help="but strike no more after so long")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of the choice of faults")
    parser.add_argument("--only", action="append", default=[], help="only faults whose name begins so; may be repeated")
    parser.add_argument("--pairs", action="store_true", help="two faults at once: more than exactness is promised for")
    parser.add_argument("--folder", type=Path, help="keep everything here")
    parser.add_argument("--no-replay", action="store_true", help="leave the comparison of weights out")
    told = parser.parse_args()
    faults = named(*told.only)
    folder = told.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=folder / "driver.log", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    print(f"seed {told.seed}, files in {folder}", flush=True)

    def say(line: str) -> None:
        print(line, flush=True)

    verdict = asyncio.run(
        chaos(
            folder.resolve(),
            (paired if told.pairs else drawn)(told.seed, faults, told.faults),
            minutes=told.minutes,
            seed=told.seed,
            say=say,
            replay=not told.no_replay,
            exact=not told.pairs,
        )
    )
    print("\n".join(verdict.lines()), flush=True)
    if not verdict.wrong and told.folder is None:
        shutil.rmtree(folder)
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
