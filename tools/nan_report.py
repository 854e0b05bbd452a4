"""``python tools/nan_report.py WORK_DIR``: see ``mmdet_nanfix.report``."""
import os
import sys

if __name__ == '__main__':
    # The module form loads no host, so the table is there at once.
    os.execv(sys.executable, [sys.executable, '-m', 'mmdet_nanfix.report',
                              *sys.argv[1:]])
