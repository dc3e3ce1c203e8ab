"""Python imports this at its start where this folder is on PYTHONPATH: processes of a test's pipeline launch the fake
worker, whatever started them."""

import os
from dataclasses import replace

if "FAKE_ORDERS" in os.environ:
    from nanodag.config.kinds import shipped

    shipped().update({name: replace(kind, module="fake_worker") for name, kind in shipped().items()})
