"""Decide on the cause of a failed step, and on what helps.

================  =========================================================
``symptoms``      what the state of a run says, without a replay
``verdict``       the rules that give a cause its code, and its remedy
``advice``        what helps, in words and as a change of the config
``config_patch``  where in a config the modules of a model are
================  =========================================================
"""
