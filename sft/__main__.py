"""`accelerate launch sft --config …` and `python -m sft`: the same command as `sft.train`."""

import sys
from pathlib import Path

# Run as a folder, this folder heads the module path; the package is imported by its full name instead, and
# nothing here may stand in the way of a package of the same name.
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)

from sft.train import main

if __name__ == "__main__":
    main()
