"""``python tools/nan_report.py WORK_DIR``: see ``mmdet_nanfix.report``."""
from __future__ import annotations

import os
import sys

if __name__ == '__main__':
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [root, os.environ.get('PYTHONPATH', '')]
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    # The module form loads no host, so the table is there at once.
    os.execv(sys.executable, [sys.executable, '-m', 'mmdet_nanfix.report',
                              *sys.argv[1:]])
