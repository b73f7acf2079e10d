"""Runs a scenario of a script in a process of its own."""

import json
import subprocess
import sys


def outcome_of(script, name, path, *rest):
    """What a process without JAX found."""
    command = [sys.executable, script.__file__, name, str(path), *map(str, rest)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
