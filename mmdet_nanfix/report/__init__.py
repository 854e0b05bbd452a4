"""Show the incidents of a work directory, of all its resumes and ranks.

``python -m mmdet_nanfix.report WORK_DIR`` prints them. Exit status: 0 no
incident, 1 some, 2 misuse.

===========  ==============================================================
``table``    finds the logs; one row an incident, one paragraph a place
``command``  the command line
===========  ==============================================================
"""
from __future__ import annotations

from .command import main

__all__ = ['main']
