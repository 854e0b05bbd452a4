"""Run a failed step again, and look.

===============  ==========================================================
``request``      what a replay changes and looks at
``replayer``     runs one replay; leaves no trace behind; how far gradients
                 fill half's range
``driver``       the same replays on all ranks
``probe``        traces non-finite numbers to their origins
``op_record``    what is noted of operations and of memory
``call_site``    file and line of an operation, also in a backward
``origin``       which operation to tell of
``culprit``      which image and which annotation are to blame
``batch_view``   a batch by its images, and other batches made of it
``annotations``  annotations that no loss can be computed from
===============  ==========================================================
"""
