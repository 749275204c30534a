"""The sandboxes that tests share, and the reason to skip where there are none."""

from __future__ import annotations

import pytest

from nanok3.envs.bubblewrap import check

reason = check()
needs_sandbox = pytest.mark.skipif(reason is not None, reason=f"no sandbox here: {reason}")
