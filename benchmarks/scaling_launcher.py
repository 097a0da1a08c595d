"""torchrun for the scaling benchmark, which ends with it.

    python -m benchmarks.scaling_launcher ARGUMENTS OF TORCHRUN

If the benchmark is killed, the kernel kills this process, and then the workers, which do the same with this process
(`deskside/utils/launched.py`).
"""

import os
import sys

from deskside.utils import launched


def main() -> None:
    """Run torchrun in this process."""
    launched.begin()
    os.environ |= launched.environment()  # its workers are this process's children
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
