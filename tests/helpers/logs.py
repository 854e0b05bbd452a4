"""What a run has logged."""
from __future__ import annotations


def said_in(work_dir):
    """Messages of the plugin in the log file of the only run."""
    (log, ) = work_dir.glob('*/*.log')
    return [part.split('\n20')[0] for part in
            log.read_text().split('nanfix: ')[1:]]
