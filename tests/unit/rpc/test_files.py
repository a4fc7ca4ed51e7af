"""The soft limit of open files is raised to the hard one, in a process of its own."""

import subprocess
import sys

SCRIPT = """
import resource, sys
from rpc.files import raise_file_limit
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_file_limit())
"""


def test_the_soft_limit_is_raised_to_the_hard_one_and_not_beyond():
    for soft, hard in ((256, 512), (512, 512)):
        command = [sys.executable, "-c", SCRIPT, str(soft), str(hard)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.split() == ["512"] * 4
