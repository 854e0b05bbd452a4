"""``python -m mmdet_nanfix.report WORK_DIR``."""
from __future__ import annotations

import sys

from . import main

if __name__ == '__main__':
    sys.exit(main())
