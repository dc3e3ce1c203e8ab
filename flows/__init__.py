"""The DAGs, as Prefect flows, and what serves them.

A wheel holds this package as nanodag.shipped.flows, and tasks beside it: their plain names may be another package's.
A process that begins here finds both by their plain names first, and so does each flow run that it starts.
"""

import os
import sys

from nanodag.host.folders import PROJECT

if __name__ != "flows":
    sys.path.insert(0, str(PROJECT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
