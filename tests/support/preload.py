"""What the server of processes imports once for all of them (see distributed.py)."""

from __future__ import annotations

import gc

import lightning_zero  # noqa: F401
import tests.support.runs  # noqa: F401

gc.collect()
gc.freeze()  # the imported libraries are not searched for garbage after every task
